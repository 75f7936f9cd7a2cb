"""Reads the samples of an iterable data set that belong to one rank, from any position on.

It decides how the ranks share a data set, and how it resumes. It seeds the generators that torch's loaders and
webdataset's stages have of their own by the run's seed and the epoch: they would go on from epoch to epoch, or begin by
the time, so a new process would read an epoch in another order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from ddp_hydra.data import draws, wrappers
from ddp_hydra.data.batch import no_sample, summary
from ddp_hydra.data.threads import is_thread_safe
from ddp_hydra.data.wrappers import name_of, unwrapped
from ddp_hydra.errors import ConfigError

PLAIN = (type(None), bool, int, float, str, bytes)
"""Values that a checkpoint can hold, as well as tensors."""
COMPARED = 4
"""Samples by which ranks tell whether they read the same ones."""
_FIRST_SEEDS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""What the user seeded a generator by."""
MOST_STAGES = 1000
"""A longer list has no stages but samples, or their names."""
_SHUFFLE_ARGUMENTS = ("bufsize", "initial", "rng", "seed", "handler")


@dataclass
class Part:
    """One rank's part of an iterable data set."""

    dataset: Iterable[Any]
    rank: int = 0
    world_size: int = 1
    dealt: bool = True  # the data set gives the samples of all ranks, and each takes its share; else this rank's only
    is_global: bool = True  # all ranks together read one sequence, whatever their number
    by_state: bool = False  # resume by the data set's `state_dict`; else read again what was read before
    how: str = ""  # how it is split and resumed, for a person to read
    progress: Callable[[], None] = lambda: None  # called after each sample that is read
    seed: int | None = None  # the global generators are seeded by it and the number of each sample; None: they are not
    training: bool = True  # the epochs draw differently; else each pass draws the same

    def __post_init__(self) -> None:
        self.stopped = False
        self.n_read = 0  # samples that were read since `open`, also those that were left out
        self.first: list[Any] = []  # summaries of the first of them
        # Number of shares that `dataset` gives, and the index of this rank's.
        self.shares, self.share = (self.world_size, self.rank) if self.dealt else (1, 0)
        self.samples: Iterator[Any] = iter(())
        self.inner = [] if self.seed is None else _inner_of(self.dataset)

    def open(self, epoch: int, position: int = 0, state: Any = None) -> None:
        # state: of the data set at this position; None to read again what lies before it.
        self.stopped, self.n_read, self.first = False, 0, []
        for data in (self.dataset, *wrappers.inner_sets(wrappers.unwrapped(self.dataset))):
            draws.tell_epoch(data, epoch, self.seed)
        if self.seed is not None:
            _seed_inner(self.inner, epoch, self.seed)
        if state is not None:
            self.dataset.load_state_dict(state)  # type: ignore[attr-defined]
        key = epoch if self.training else draws.EVALUATION
        read_before = position * self.shares // self.world_size
        self.samples = self._watched(key, read_before if state is not None else 0)
        if state is None:
            self._leave_out(read_before)

    def take(self, n: int) -> list[Any] | None:
        # Return this rank's samples of the next global batch; None if there is no full one.
        if not self._leave_out(self.share * n):
            return None
        own = list(islice(self.samples, n))
        is_full = self._leave_out((self.shares - 1 - self.share) * n)
        return own if is_full and len(own) == n else None

    def once(self) -> Iterator[tuple[int, Any]]:
        for number, sample in enumerate(self.samples):
            if number % self.shares == self.share:
                yield (number if self.dealt else number * self.world_size + self.rank), sample

    def state(self) -> Any:
        # Return the state of the data set as plain values; None if it has none, or one that has others.
        if not self.by_state:
            return None
        try:
            return plain(self.dataset.state_dict())  # type: ignore[attr-defined]
        except TypeError:
            return None

    def stop(self) -> None:
        self.stopped = True

    def _watched(self, key: int, number: int) -> Iterator[Any]:
        if self.seed is not None:
            draws.seed_by(self.seed, key)  # alike on all ranks, as they may share an order that is drawn here
        # The iterator begins here, as the generators are seeded only while samples are read: `__iter__` and the first
        # `__next__` may both draw the order, as in a DataLoader.
        try:
            for sample in _new_pass(self.dataset):
                if self.stopped:
                    return
                self.progress()
                self.n_read += 1
                if len(self.first) < COMPARED:
                    self.first.append(summary(sample))
                yield sample
                number += 1
                if self.seed is not None:  # for the next sample; the first one may still draw the order
                    draws.seed_by(self.seed, key, number if self.dealt else number * self.world_size + self.rank)
        except SystemExit as error:
            raise no_sample(self.dataset, f"sample {number}", error) from error

    def _leave_out(self, n: int) -> bool:
        return sum(1 for _ in islice(self.samples, n)) == n


@dataclass
class RepeatedPart(Part):
    """Repeats the first steps of the first epoch: a correct model can memorise them."""

    part: Part = field(kw_only=True)
    steps: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.position, self.kept = 0, list[list[Any]]()

    def open(self, epoch: int, position: int = 0, state: Any = None) -> None:
        self.position = position
        if not self.kept:
            self.part.open(0)
            self.first = self.part.first

    def take(self, n: int) -> list[Any] | None:
        number = self.position // (n * self.world_size) % self.steps
        self.position += n * self.world_size
        while len(self.kept) <= number and (samples := self.part.take(n)) is not None:
            self.kept.append(samples)
        return self.kept[number % len(self.kept)] if self.kept else None


def plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is Tensor:
        return value.detach().clone()  # the data set goes on, ahead of the step in which its state is saved
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)
    raise TypeError(f"a checkpoint can't hold a {type(value).__name__}")


WAYS = ("samples", "itself")
"""The values of `data.shard_by`, besides null."""


def split(
    dataset: Any,
    rank: int,
    world_size: int,
    way: str | None = None,
    progress: Callable[[], None] = lambda: None,
    seed: int | None = None,
    training: bool = True,
) -> Part:
    # In this order: as `way` says; by the data set's method `of_rank`; as its library splits it; else all ranks read
    # all samples, and each takes its share.
    # way: "samples": each rank reads all samples and takes its share; "itself": the data set gives each rank samples
    # of its own; None: as the data set can.
    if way not in (None, *WAYS):
        raise ConfigError(f"data.shard_by={way}: give {', '.join(WAYS)} or null")
    if way is not None:
        dealt = is_global = way == "samples"
        found, how = dataset, f"split by data.shard_by={way}"
    else:
        found, dealt, is_global, how = _by_kind(dataset, rank, world_size)
    if world_size == 1:
        how = "one rank reads all samples"
    by_state = _keeps_its_place(found)
    resumed = "by its state_dict" if by_state else "by counting: it reads again what was read before"
    how = f"{how}; resumes {resumed}"
    seed = None if is_thread_safe(dataset) else seed
    return Part(found, rank, world_size, dealt, is_global, by_state, how, progress, seed, training)


def whole(
    dataset: Any, world_size: int, way: str | None = None, progress: Callable[[], None] = lambda: None, seed: int = 0
) -> Part:
    if world_size > 1 and (way == "itself" or "split_by_node" in _webdataset_stages(dataset)):
        raise ConfigError(
            f"{name_of(dataset)} gives each rank samples of its own, without a common order: type dispatch.ranks=1"
        )
    seeded = None if is_thread_safe(dataset) else seed
    return Part(dataset, how="all samples", progress=progress, seed=seeded, training=False)


def _by_kind(dataset: Any, rank: int, world_size: int) -> tuple[Iterable[Any], bool, bool, str]:
    if hasattr(dataset, "of_rank"):
        own = dataset.of_rank(rank, world_size)
        if own is not None:
            return own, False, False, "each rank reads its own part"
    elif type(unwrapped(dataset)).__module__ == "datasets.iterable_dataset":
        found = HuggingFacePart(dataset, rank, world_size)
        n = dataset.num_shards
        if n % world_size == 0:
            return found, False, False, f"each rank reads {n // world_size} of {n} files"
        how = f"each rank reads all samples and takes its share, as {n} files do not divide by the ranks"
        return found, False, True, how
    elif stages := _webdataset_stages(dataset):
        if "split_by_node" in stages:
            return dataset, False, False, "each rank reads its own shards"
        if "single_node_only" in stages and world_size > 1:
            raise ConfigError(
                "ranks can't share this webdataset pipeline: give nodesplitter=webdataset.split_by_node, or None"
            )
    return dataset, True, True, "each rank reads all samples and takes its share"


def _keeps_its_place(dataset: Any) -> bool:
    if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
        return False
    if isinstance(dataset, HuggingFacePart) and dataset.has_buffer:
        return False
    loader = unwrapped(dataset)
    if isinstance(loader, DataLoader) or type(loader).__module__.startswith("torchdata."):
        return True  # to ask it now would begin a pass, which goes on in the first epoch
    with contextlib.suppress(TypeError):
        plain(dataset.state_dict())
        return True
    return False


class HuggingFacePart:
    """A rank's part of a streaming data set of Hugging Face. Its state doesn't hold the content of a shuffle buffer."""

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self.begin = partial(split_dataset_by_node, dataset, rank, world_size)
        self.part, self.epoch, self.start = self.begin(), 0, None
        self.has_buffer = any("BufferShuffled" in type(stage).__name__ for stage in _stages(dataset._ex_iterable))

    def __iter__(self) -> Iterator[Any]:
        self.part = self.begin()  # a data set would begin at the state that it once got, also in later passes
        self.part.set_epoch(self.epoch)
        if self.start is not None:
            self.part.load_state_dict(self.start)
            self.start = None
        return iter(self.part)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> Any:
        return self.part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.start = state


def _stages(stage: Any) -> Iterator[Any]:
    yield stage
    for part in (getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())):
        if part is not None:
            yield from _stages(part)


def _webdataset_stages(dataset: Any) -> list[str]:
    dataset = unwrapped(dataset)
    if not any(base.__module__ == "webdataset.pipeline" for base in type(dataset).__mro__):
        return []
    stages = [stage.func if isinstance(stage, partial) else stage for stage in dataset.pipeline]
    return [getattr(stage, "__name__", type(stage).__name__) for stage in stages]


# -- generators of loaders and stages ---------------------------------------------------------------------


def _inner_of(data: Any) -> list[Any]:
    # Return the data set, and the sets, loaders, samplers and stages inside.
    found: dict[int, Any] = {}
    pending = [unwrapped(data)]
    while pending:
        part = pending.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        values = list(getattr(part, "__dict__", {}).values())
        for value in tuple(values):
            values += value if isinstance(value, (list, tuple)) and len(value) <= MOST_STAGES else ()
        pending += [v for v in values if isinstance(v, (Dataset, DataLoader, Sampler)) or _is_stage(v)]
    parts = list(found.values())
    for part in parts:
        if isinstance(part, DataLoader):
            _refuse_other_orders(part, is_nested=part is not parts[0])
    return parts


def _seed_inner(inner: list[Any], epoch: int, seed: int) -> None:
    for part in inner:
        if isinstance(part, (DataLoader, Sampler)):
            _seed(getattr(part, "generator", None), epoch, seed)
        elif _is_stage(part):
            _seed_stage(part, epoch, seed)


def _new_pass(data: Any) -> Any:
    # Return what to iterate over. A DataLoader with persistent workers draws less in a second pass than in a first one,
    # and the generators of its workers go on; a copy has no workers yet.
    loader = unwrapped(data)
    return copy(loader) if type(loader) is DataLoader else data


def _is_stage(value: Any) -> bool:
    return type(value).__module__.startswith("webdataset.")


def _refuse_other_orders(loader: Any, is_nested: bool) -> None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ConfigError(
            "DataLoader(in_order=False) gives samples as its workers are ready, so the ranks would read other orders "
            "and a resume other samples: leave in_order out"
        )
    is_copied = type(loader) is DataLoader and not is_nested
    # A loader of an IterableDataset takes the samples as they come.
    if isinstance(loader.dataset, IterableDataset) or isinstance(getattr(loader, "sampler", None), SequentialSampler):
        return
    if loader.num_workers and loader.persistent_workers and not is_copied and not hasattr(loader, "load_state_dict"):
        raise ConfigError(
            f"persistent_workers=True of a {type(loader).__name__} draws another order in the process that began with "
            "an epoch than in one that resumes there: give persistent_workers=False"
        )


def _seed(generator: Any, epoch: int, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        first = _FIRST_SEEDS.setdefault(generator, generator.initial_seed())
        generator.manual_seed(draws.mixed(first, seed, epoch))
    elif isinstance(generator, random.Random):
        first = _FIRST_SEEDS.setdefault(generator, hash(generator.getstate()[1]))
        generator.seed(draws.mixed(first, seed, epoch))


def _seed_stage(stage: Any, epoch: int, seed: int) -> None:
    function = getattr(getattr(stage, "f", None), "__name__", "")
    if function == "_shuffle":
        given = dict(zip(_SHUFFLE_ARGUMENTS, stage.args, strict=False)) | stage.kw
        if given.get("seed") is None and given.get("rng") is None:  # it would seed itself by the time
            given["rng"] = random.Random(0)  # noqa: S311
            stage.args, stage.kw = (), given
        _seed(given.get("rng"), epoch, seed)
    if hasattr(stage, "set_epoch"):
        draws.tell_epoch(stage, epoch, seed)
    elif isinstance(getattr(stage, "epoch", None), int):  # detshuffle and ResampledShards count their passes
        stage.epoch = epoch - 1
    elif isinstance(getattr(stage, "seed", None), float):  # SimpleShardList(seed=True) has taken the time
        stage.seed = draws.mixed(0, seed)
    if getattr(stage, "deterministic", True) is False:  # ResampledShards would seed itself by the time
        stage.deterministic, stage.seed = True, draws.mixed(stage.seed, seed)
