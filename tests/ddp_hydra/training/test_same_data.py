"""Ranks that would train on different data are refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import random_split

from ddp_hydra.errors import DataError
from ddp_hydra.training import build_data, data_description
from tests.ddp_hydra.training.loop_runs import Numbers, config


def halves(part: str = "train"):
    return random_split(Numbers(40), [30, 10])[part == "val"]


def test_a_set_is_split_alike_whichever_part_is_built_and_the_generators_stay():
    cfg = config()
    cfg.data.train = {"_target_": f"{__name__}.halves"}
    cfg.data.val = {"_target_": f"{__name__}.halves", "part": "val"}
    torch.manual_seed(9)
    with build_data.opened(cfg, "train") as train_set, build_data.opened(cfg, "val") as val_set:
        assert sorted([*train_set.indices, *val_set.indices]) == list(range(40))
    drawn = torch.rand(())
    torch.manual_seed(9)
    assert torch.equal(torch.rand(()), drawn)
    with build_data.opened(cfg, "val") as again:
        assert again.indices == val_set.indices
    torch.manual_seed(cfg.seed)
    assert random_split(Numbers(40), [30, 10])[1].indices == val_set.indices  # as in a script
    cfg.seed = 5
    with build_data.opened(cfg, "val") as other:
        assert other.indices != val_set.indices


def compare(*sets) -> None:
    """Check some data sets as if each were another rank's."""
    made = iter([[len(data) for data in sets], [data_description.fingerprint(data, 0) for data in sets]])
    world = SimpleNamespace(gather_objects=lambda value: next(made))
    data_description.check_same_data(sets[0], "data.train", 0, world)


class Shifted(Numbers):
    def __init__(self, n: int, by: float) -> None:
        super().__init__(n)
        self.x += by


class Named(Numbers):
    def sample_id(self, index: int) -> str:
        return f"{self.x[index].tolist()}"


def test_a_file_name_that_is_not_utf_8_is_a_name():
    class Odd(Numbers):
        def sample_id(self, index: int) -> str:
            return f"na\udcefve/{index}\ud83d.png"  # the second one as a JSON file may name it

    compare(Odd(3), Odd(3))


def test_ids_that_are_known_once_a_sample_was_read_are_not_compared():
    class Late(Numbers):
        def sample_id(self, index: int) -> str:
            raise KeyError(index)

    compare(Late(3), Late(3))
    with pytest.raises(DataError, match="3, 4 samples on the ranks"):
        compare(Late(3), Late(4))


class Words(Numbers):
    def __init__(self, n: int, *words: float) -> None:
        super().__init__(n)
        self.words = list(words)

    def __getitem__(self, index: int) -> dict[str, list[float]]:
        return {"words": self.words}


class Noise(Numbers):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(3, generator=torch.Generator().manual_seed(torch.seed()))}


def test_ranks_with_the_same_data_go_on():
    compare(Numbers(9), Numbers(9))
    compare(Named(9), Named(9))
    compare(Numbers(9), Shifted(9, 1e-6))  # decoded by other instructions
    compare(Noise(9), Noise(9))
    compare(Words(9, 1.0, math.nan, math.inf), Words(9, 1.0005, math.nan, math.inf))
    compare(Words(9, *range(1_000_000)), Words(9, *range(1_000_000)))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((Numbers(9), Numbers(8)), r"data\.train: Numbers has 9, 8 samples on the ranks"),
        ((Numbers(9), Shifted(9, 1)), r"data\.train: Numbers has other samples on rank 1 than on rank 0"),
        ((Words(9, 1.0, 2.0), Words(9, 1.0, 2.01)), r"Words has other samples on rank 1"),
        ((Words(9, 1.0, math.nan), Words(9, 1.0, 0.0)), r"Words has other samples on rank 1"),
        ((Words(9, *range(5000)), Words(9, *range(5001))), r"Words has other samples on rank 1"),
        ((Named(9), Named(9).__class__(9)), None),
    ],
)
def test_ranks_with_other_data_do_not(sets, said):
    if said is None:
        sets[1].x = sets[1].x.flip(0)
        said = "Named has other samples on rank 1"
    with pytest.raises(DataError, match=said):
        compare(*sets)
