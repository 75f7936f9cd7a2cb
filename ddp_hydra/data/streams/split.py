"""Decides how the ranks share an iterable data set, and how it resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ddp_hydra.data.streams.part import Part, plain
from ddp_hydra.data.thread_safe import is_thread_safe
from ddp_hydra.data.wrappers import name_of, unwrapped
from ddp_hydra.errors import ConfigError

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
    """Return a rank's part of an iterable data set.

    In this order: as `way` says; by the data set's method `of_rank`; as its library splits it; else all ranks read all
    samples, and each takes its share.

    Args:
        dataset: the data set.
        rank: this rank.
        world_size: number of ranks.
        way: "samples": each rank reads all samples and takes its share; "itself": the data set gives each rank samples
            of its own; None: as the data set can.
        progress: called after each sample that is read.
        seed: see `Part`, and so is training.

    Raises:
        ConfigError: `way` is none of these, or the data set refuses to be split.
    """
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
    """Return an iterable data set as one part with all samples, which each rank reads.

    Args:
        dataset: the data set.
        world_size: number of ranks.
        way: see `split`.
        progress: called after each sample that is read.
        seed: see `Part`.

    Raises:
        ConfigError: the data set looks itself at which rank reads it.
    """
    if world_size > 1 and (way == "itself" or "split_by_node" in _webdataset_stages(dataset)):
        raise ConfigError(
            f"{name_of(dataset)} gives each rank samples of its own, so they have no common order: take "
            "one rank (dispatch.ranks=1 or cluster=inline), or a data set that gives each rank all samples "
            "(nodesplitter=None of a webdataset pipeline)"
        )
    seeded = None if is_thread_safe(dataset) else seed
    return Part(dataset, how="all samples", progress=progress, seed=seeded, training=False)


def _by_kind(dataset: Any, rank: int, world_size: int) -> tuple[Iterable[Any], bool, bool, str]:
    """Return what gives the samples, `dealt` and `is_global` of the part, and how it is split, for a person."""
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
                "this webdataset pipeline does not say how ranks share its shards: give it "
                "nodesplitter=webdataset.split_by_node, or nodesplitter=None to have each rank read all of them and "
                "take its share of the samples"
            )
    return dataset, True, True, "each rank reads all samples and takes its share"


def _keeps_its_place(dataset: Any) -> bool:
    """Return whether the state of a data set brings it back to where it was."""
    if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
        return False
    if isinstance(dataset, HuggingFacePart) and dataset.has_buffer:
        return False
    with contextlib.suppress(TypeError):
        plain(dataset.state_dict())
        return True
    return False


class HuggingFacePart:
    """A rank's part of a streaming data set of Hugging Face.

    Args:
        dataset: a `datasets.IterableDataset`.
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        has_buffer: it is shuffled in a buffer, whose content its state does not hold.
    """

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
        """Choose the epoch."""
        self.epoch = epoch

    def state_dict(self) -> Any:
        """Return the place in the data set."""
        return self.part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Begin the next pass at a place."""
        self.start = state


def _stages(stage: Any) -> Iterator[Any]:
    """Yield the parts of a pipeline of Hugging Face."""
    yield stage
    for part in (getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())):
        if part is not None:
            yield from _stages(part)


def _webdataset_stages(dataset: Any) -> list[str]:
    """Return the names of the functions in a pipeline of webdataset; an empty list for other data sets."""
    dataset = unwrapped(dataset)
    if not any(base.__module__ == "webdataset.pipeline" for base in type(dataset).__mro__):
        return []
    stages = [stage.func if isinstance(stage, partial) else stage for stage in dataset.pipeline]
    return [getattr(stage, "__name__", type(stage).__name__) for stage in stages]
