"""What an iterable data set needs of the config, and what it is told where that is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

from ddp_hydra import results
from ddp_hydra.data import draws
from ddp_hydra.data.samplers import Distributed
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.data.workers import InWorkers
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.rank.world import ALONE
from ddp_hydra.training import build_data, setup
from ddp_hydra.training.inference import check_labels
from ddp_hydra.training.lr_schedules import ScheduleProgress
from ddp_hydra.training.setup import steps_left
from ddp_hydra.training.state import Position
from tests.ddp_hydra.training.loop_runs import config
from tests.docs.blocks import blocks


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


class Sized(Endless):
    def __len__(self) -> int:
        return 30


class Unlabelled:
    labelled = False


def built(data: Any, *words: str, **trainer: Any) -> tuple[Any, StreamSampler]:
    cfg = OmegaConf.merge(config(**trainer), OmegaConf.from_dotlist(list(words)))
    return cfg, build_data.sampler(cfg, data, ALONE, ranks=2)


@pytest.mark.parametrize(
    ("data", "words", "planned"),
    [
        (Endless(), ["trainer.max_steps=9"], float("inf")),
        (Endless(), ["data.n_samples=50"], 12),
        (Sized(), [], 7),
        (Sized(), ["data.n_samples=50"], 12),
        (Endless(), ["data.n_samples=50", "trainer.gradient_accumulation_steps=2"], 6),
        (ChainDataset([Endless(), Sized()]), ["trainer.max_steps=9"], float("inf")),
        (ChainDataset([Sized(), Sized()]), [], 15),
        (DataLoader(Endless(), batch_size=None), ["trainer.max_steps=9"], float("inf")),
    ],
)
def test_how_many_steps_are_planned(data, words, planned):
    _, sampler = built(data, *words)
    assert sampler.planned() == planned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], r"Endless does not know how many samples .* for trainer\.epochs=2 without trainer\.max_steps: give "
         r"trainer\.max_steps=<optimizer steps>"),
        (["trainer.max_steps=9", "scheduler.warmup_epochs=1", "scheduler.by=epoch"],
         r"for scheduler\.warmup_epochs=1, scheduler\.by=epoch: give .*data\.n_samples=<their number>"),
        (["trainer.max_steps=9", "scheduler.critic.warmup_epochs=1", "scheduler.critic.by=epoch"],
         r"for scheduler\.critic\.warmup_epochs=1, scheduler\.critic\.by=epoch: give "),
        (["trainer.max_steps=9", "sampler._target_=ddp_hydra.data.samplers.Weighted"],
         r"Weighted needs a data set with a length and __getitem__, and Endless is iterable"),
        (["trainer.max_steps=9", "sampler.drop_last=false"], r"sampler\.drop_last=false needs a data set with"),
        (["trainer.max_steps=9", "data.shard_by=luck"], r"data\.shard_by=luck: give samples, itself or null"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it(words, said):
    with pytest.raises(ConfigError, match=said):
        built(Endless(), *words)


def test_only_an_iterable_set_of_the_training_refuses_workers():
    cfg = config()
    cfg.data.workers = 2
    cfg.data.train = cfg.data.val = {"_target_": f"{__name__}.Sized"}
    with build_data.opened(cfg, "val") as val_set:
        assert isinstance(val_set, Sized)
    with (
        pytest.raises(ConfigError, match=r"data\.workers=2 needs .* and Sized is iterable"),
        build_data.opened(cfg, "train"),
    ):
        pass


def test_the_length_of_a_run():
    position = Position(step=3, epoch=0, samples=12, offset=12)
    cfg, sampler = built(Endless(), max_steps=9, epochs=2)
    assert steps_left(cfg.trainer, sampler, position) == 6
    assert steps_left(cfg.trainer, sampler, Position(step=5, epoch=2, samples=20)) == 0  # all epochs are done
    cfg, sampler = built(Endless(), "data.n_samples=30", epochs=2)
    assert steps_left(cfg.trainer, sampler, position) == 4 + 7


def test_a_schedule_goes_by_max_steps_while_nobody_knows_the_length():
    _, sampler = built(Endless(), max_steps=9, epochs=2)
    position = Position()
    progress = ScheduleProgress(2, 9, sampler, position)
    assert (progress.total, progress.done) == (9, 0)
    position.advance(4)
    assert progress.done == 1
    later = ScheduleProgress(2, None, built(Sized())[1], position)
    later.load_state_dict(progress.state_dict())
    assert (later.total, later.epoch_steps) == (14, 7)


def test_a_run_repeats_its_first_batches():
    _, sampler = built(Endless(), max_steps=9, overfit_batches=2)
    sampler.part.open(0)
    first = [sampler.part.take(2) for _ in range(4)]
    assert first == [[0, 1], [4, 5], [0, 1], [4, 5]]


class OfTorch(Sampler):
    def __init__(self, n_samples: int, batch_size: int, **_: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.utils.data.RandomSampler", "takes no n_samples, batch_size, rank, world_size"),
        ("torch.utils.data.DistributedSampler", "takes no n_samples, batch_size, world_size"),
        (f"{__name__}.OfTorch", "has no global_batch, steps, batches"),
    ],
)
def test_a_sampler_that_is_not_one_of_ours_is_told_what_to_be(target, said):
    advice = (
        r"a sampler is given n_samples, batch_size, rank and world_size, .* subclass of ddp_hydra\.data\.samplers\.D"
    )
    with pytest.raises(ConfigError, match=rf"^sampler\._target_={target} {said}: {advice}"):
        built(TensorDataset(torch.zeros(8)), f"sampler._target_={target}")


@pytest.mark.parametrize("targets", [None, [[1], [1, 2]] * 4])
@pytest.mark.parametrize("wrap", [lambda data: Subset(data, range(8)), lambda data: ConcatDataset([data, data])])
def test_targets_that_are_no_classes_matter_to_the_weighted_sampler_only(targets, wrap):
    data = TensorDataset(torch.zeros(8))
    data.targets = targets
    wrapped = look_into(wrap(data))
    assert len(built(wrapped)[1]) == len(wrapped) // 4
    if targets is None:
        with pytest.raises(ConfigError, match=r"one class for each of its .* it has none"):
            built(wrapped, "sampler._target_=ddp_hydra.data.samplers.Weighted")


class WithState(Distributed):
    def state_dict(self) -> dict[str, int]:
        return {}

    load_state_dict = vars


class RowsWithState(TensorDataset):
    state_dict, load_state_dict = WithState.state_dict, vars


class ModuleSet(nn.Module, RowsWithState):
    def __init__(self) -> None:
        super().__init__()
        self.tensors = (torch.zeros(40),)


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: InWorkers(data, 1, asked=True)])
def test_a_state_that_is_not_saved_is_told(wrap, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(results, "warn", said.append)
    data = wrap(RowsWithState(torch.zeros(40)))
    setup.build_sampler(built(data, f"sampler._target_={__name__}.WithState")[0], data, ALONE)
    assert [text.partition(" is not saved")[0] for text in said] == [
        "the state_dict() of WithState",
        "the state_dict() of RowsWithState",
    ]
    for other in (TensorDataset(torch.zeros(40)), ModuleSet()):
        setup.build_sampler(built(data)[0], other, ALONE)
    assert len(said) == 2


def test_the_sampler_of_the_docs(monkeypatch):
    (block,) = (block for block in blocks() if block.page == "docs/data.md" and "(Distributed)" in block.text)
    module = ModuleType("own_sampler")
    exec(block.text, vars(module))
    monkeypatch.setitem(sys.modules, "own_sampler", module)
    _, sampler = built(TensorDataset(torch.zeros(40)), "sampler._target_=own_sampler.EasyFirst", "sampler.seed=3")
    order = sampler.order(1)
    assert sorted(order[:20]) == list(range(20))
    assert sorted(order) == list(range(40))
    assert [index for batch in sampler.batches(1) for index in batch] == order.reshape(-1, 2, 2)[:, 0].ravel().tolist()
    assert list(order) != list(sampler.order(0))


def test_messages_name_the_class_of_the_data_set_itself():
    data = Unlabelled()
    with pytest.raises(ConfigError, match="and Unlabelled has no `classes`"):
        build_data.fill_num_classes(OmegaConf.create({"num_classes": None}), data, "model")
    with pytest.raises(ConfigError, match=r"^Unlabelled has no labels here"):
        check_labels(data)


def points() -> TensorDataset:
    return TensorDataset(torch.ones(6, 2), torch.ones(6))


class Lengthless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


class Given(Lengthless):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> Any:
        return self.length


class GivenStream(Given, Endless):
    pass


class Holder(Given):
    def __len__(self) -> int:
        return len(self.length)


def two() -> Any:
    return random_split(points(), [4, 2])


def none() -> TensorDataset:
    return TensorDataset(torch.ones(0, 2))


def batches() -> Any:
    return DataLoader(points(), batch_size=2)


def batches_of_a_sampler() -> Any:
    return DataLoader(points(), batch_size=None, sampler=BatchSampler(SequentialSampler(points()), 2, drop_last=False))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (two, r"2 data sets were built, as by random_split: let _target_ return one of them"),
        (batches, r"the DataLoader makes batches: give it batch_size=None and no BatchSampler, or give its data set"),
        (batches_of_a_sampler, r"the DataLoader makes batches: give it batch_size=None and no BatchSampler, or give"),
        (Lengthless, "Lengthless has no length: give it __len__"),
        (none, r"TensorDataset \(data.val\) has no samples: check its arguments, or type data.val=null"),
    ],
)
def test_what_makes_no_samples_is_refused(target, said):
    with pytest.raises(ConfigError, match=said):
        build_data.dataset(OmegaConf.create({"_target_": f"{__name__}.{target.__name__}"}), 0, "data.val")


def test_a_training_set_without_samples_can_not_be_left_out():
    with pytest.raises(ConfigError, match=r"\(data\.train\) has no samples: check its arguments$"):
        build_data.dataset(OmegaConf.create({"_target_": f"{__name__}.none"}), 0, "data.train")


@pytest.mark.parametrize(
    ("target", "length", "said"),
    [
        (Given, 2.0, r"Given\.__len__ returns 2\.0, a float: let it return a whole number from 0 on, as by int\(\)"),
        (Given, -1, r"Given\.__len__ returns -1, a int"),
        (Given, "2", r"Given\.__len__ returns '2', a str"),
        (Given, None, r"Given\.__len__ returns None, a NoneType"),
        (Given, 2**70, r"Given\.__len__ returns 1180591620717411303424, a int"),
        (GivenStream, 2.0, r"GivenStream\.__len__ returns 2\.0, a float"),
        (Holder, None, r"Holder\.__len__ raises TypeError: object of type 'NoneType' has no len\(\)"),
    ],
)
def test_a_length_that_is_none_is_refused_as_it_was_given(target, length, said):
    node = {"_target_": f"{__name__}.{target.__name__}", "length": length}
    with pytest.raises(ConfigError, match=said):
        build_data.dataset(OmegaConf.create(node), 0, "data.val")


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, torch.tensor])
def test_a_sampler_may_give_its_batches_as_any_sequence_or_iterator(kind):
    made = draws.numbered(map(kind, ([3, 1], [2, 0])), epoch=1, position=8, global_batch=4, rank=1)
    (first, second) = made
    assert (first, second) == ([3, 1], [2, 0])
    assert (list(first.positions), list(second.positions)) == ([10, 11], [14, 15])


def test_an_iterator_that_is_used_up_is_told():
    _, sampler = built(Endless(), max_steps=9)
    sampler.epoch, sampler.end = 1, 0
    with pytest.raises(DataError, match=r"no full batch in epoch 2, .* let __iter__ begin a new pass"):
        sampler.refuse_empty(0)
