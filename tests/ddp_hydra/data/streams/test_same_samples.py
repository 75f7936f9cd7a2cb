"""A stream that gives each rank samples of its own is noticed where all ranks are taken to read the same ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddp_hydra.data.streams import RepeatedPart, StreamLoader, StreamSampler, split, whole
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE
from ddp_hydra.training import build_data
from tests.ddp_hydra.training.loop_runs import config

CPU = torch.device("cpu")


class Numbers:
    """Every n-th number from a rank on."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self):
        return (torch.full((3,), float(number)) for number in range(self.rank, 40, self.ranks))


def read(data, other, way: str, how: str | None) -> int:
    """Read as one of two ranks; return the number of batches."""
    others = []
    list(StreamLoader(other, CPU, gather=lambda first: others.append(first) or [first]).each_once(4, 0, 2))
    calls = []

    def gather(first):
        calls.append(first)
        return [first, *others]

    loader = StreamLoader(data, CPU, way=how, gather=gather)
    if way == "validation":
        passes = [len(list(loader.each_once(4, 0, 2))) for _ in range(2)]
    elif way == "prediction":
        passes = [len(list(loader.in_order(whole(data, 2, how), 4, lambda start: True)))]
    else:
        part = split(data, 0, 2, how)
        sampler = StreamSampler(
            RepeatedPart(part.dataset, 0, 2, part=part, steps=1) if way == "repeated" else part, 4, 40
        )
        passes = [sum(1 for parts in loader.steps(sampler.batches(epoch), 1) if list(parts)) for epoch in (0, 1)]
    assert len(calls) == (how is None)  # once in a run
    return passes[0]


@pytest.mark.parametrize("way", ["training", "repeated", "validation", "prediction"])
def test_ranks_that_read_other_samples_are_told_what_to_type(way):
    with pytest.raises(ConfigError, match=r"Numbers gives each rank samples of its own.*\+data\.shard_by=itself"):
        read(Numbers(0, 2), Numbers(1, 2), way, None)
    assert read(Numbers(), Numbers(), way, None)
    assert read(Numbers(0, 2), Numbers(1, 2), way, "samples")


class Unknown:
    """Samples that can't be compared."""

    def __iter__(self):
        return ({"image": object(), "label": 0} for _ in range(9))

    def collate(self, samples):
        return len(samples)


@pytest.mark.parametrize(
    ("data", "others", "is_told"),
    [(Numbers(), Numbers(), True), (Numbers(0, 2), Numbers(1, 2), False), (Unknown(), Unknown(), False)],
)
def test_validation_data_that_do_not_share_themselves_as_the_training_data_do_are_told_once(data, others, is_told):
    firsts, said = [], []
    other = StreamLoader(others, CPU, way="itself", gather=lambda first: firsts.append(first) or [first])
    list(other.each_once(4, 1, 2))
    loader = StreamLoader(data, CPU, way="itself", gather=lambda first: [first, *firsts], warn=said.append)
    for _ in range(2):
        list(loader.each_once(4, 0, 2))
    assert len(firsts) == 1
    assert [one.startswith(f"{type(data).__name__} gives all ranks the same first") for one in said] == [True] * is_told


def test_the_length_that_each_rank_counts_for_itself():
    class Sized(Numbers):
        def __len__(self):
            return 21

    cfg = config(max_steps=9)
    assert build_data._length_of_all(cfg, Sized(), ALONE) == 21
    two = SimpleNamespace(gather_objects=lambda length: [length, 19])
    with pytest.raises(ConfigError, match=r"Sized has 21, 19 samples on the ranks: .* type \+data\.shard_by=itself"):
        build_data._length_of_all(cfg, Sized(), two)
    cfg.data.shard_by = "itself"
    assert build_data._length_of_all(cfg, Sized(), two) == 40
