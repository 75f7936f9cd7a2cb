"""A data set whose batches other processes make."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ddp_hydra.data.batch import make_batch
from ddp_hydra.data.cores import cores_per_rank
from ddp_hydra.data.processes.remote import Remote
from ddp_hydra.data.streams.split import is_stream
from ddp_hydra.errors import ConfigError

CORES = 4
"""Cores that a process has for its threads. On a host of 16 cores, one process alone made 2,000 crops of photos a
second, and kept 4 of them busy."""
MOST = 4
"""Processes that a rank has at most, unless the config says a number."""


@dataclass(frozen=True)
class Processes:
    """Says how many processes make the batches of a data set, for each rank.

    Args:
        number: so many; 0: threads of the rank make them; None: one for every 4 cores of the rank, 4 at most, if
            batches go to a GPU and the data set says that it is worth it, by its attribute `read_apart`; else 0.
        to_gpu: batches go to a GPU.
        seed: of the random generators of these processes, which a data set may use.

    Raises:
        ConfigError: it is not a number of processes.
    """

    number: int | None = 0
    to_gpu: bool = False
    seed: str = "0"

    def __post_init__(self) -> None:
        if self.number is not None and (not isinstance(self.number, int) or self.number < 0):
            raise ConfigError(
                f"data.processes is {self.number}, and must be a whole number from 0 on, or null: type data.processes=1"
            )

    def of(self, dataset: Any) -> int:
        """Return how many processes make the batches of this data set.

        Raises:
            ConfigError: it is iterable, and a number of processes was asked for.
        """
        if is_stream(dataset):
            if self.number:
                raise ConfigError(
                    f"data.processes={self.number} needs a data set with a length and __getitem__, and "
                    f"{type(dataset).__name__} is iterable: leave data.processes out"
                )
            return 0
        if self.number is not None:
            return self.number
        if not self.to_gpu or not getattr(dataset, "read_apart", False):
            return 0
        return min(MOST, max(1, cores_per_rank() // CORES))


def made_by(processes: Processes, dataset: Any) -> Any:
    """Return a data set whose batches these processes make; the data set itself where there are none.

    Raises:
        ConfigError: processes were asked for, and the data set is iterable.
    """
    return InProcesses(dataset, processes) if dataset is not None and processes.of(dataset) else dataset


OF_ALL = ("set_epoch", "expect", "stats", "bad", "bad_counts", "error_of")
"""What concerns the processes, too; only if the data set itself has it."""


class InProcesses:
    """Has processes make the batches of a data set. All else is the data set's own.

    The processes start with the first epoch. Until they are ready, threads of this process make the batches; a data set
    that wants to know what will be read (`expect`) waits for them.

    Args:
        dataset: a map-style data set.
        processes: how many, and where the batches go.

    Attributes:
        count: how many processes there are.
        progress: called while a batch is being made; may be set.
    """

    def __init__(self, dataset: Any, processes: Processes) -> None:
        self.dataset = dataset
        self.count = processes.of(dataset)
        self.progress: Callable[[], None] = lambda: None
        self._processes = processes
        self._remotes: list[Remote] = []
        self._started = False
        self._lock = threading.Lock()
        self._reports: dict[int, Mapping[str, float]] = {}
        self._found_bad: dict[str, str] = {}
        self._counts_bad: dict[str, int] = {}
        self._errors: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is copied
            raise AttributeError(name)
        found = getattr(self.dataset, name)
        return getattr(self, f"_{name}") if name in OF_ALL else found

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a whole batch.

        Raises:
            ConfigError: processes were asked for, and can't make batches of this data set.
            ConnectionError: a process has ended.
            Exception: what the data set raises.
        """
        wanted = list(indices)
        with self._lock:
            remote = self._remote()
            batch = remote.ask(wanted) if remote else None
            if hasattr(self.dataset, "read_elsewhere"):
                for other in self._remotes:
                    if other is not remote:
                        other.tell(elsewhere=wanted)
        return batch() if batch else make_batch(self.dataset, wanted, self.progress)

    def collate(self, batch: Any) -> Any:
        """Return what `__getitems__` has made, as it is a batch already."""
        return batch

    def _remote(self) -> Remote | None:
        """Return the process with the least to do; None if none is ready."""
        self._start()
        if hasattr(self.dataset, "expect"):
            for one in self._remotes:
                one.begun.wait()
        ready = [one for one in self._remotes if one.begun.is_set()]
        if refused := next((one.refused for one in ready if one.refused), ""):
            self._do_without(f"it can't be unpickled in another process: {refused}")
            return None
        return min(ready, key=lambda one: one.pending, default=None)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        try:
            pickled = cloudpickle.dumps(self.dataset)
        except Exception as error:
            self._do_without(f"it can't be pickled: {type(error).__name__}: {error}")
            return
        for number in range(self.count):
            seed = random.Random(f"{self._processes.seed}/{number}").getrandbits(32)  # noqa: S311
            heard = partial(self._hear, number)
            self._remotes.append(Remote(pickled, seed, self.count, self._own, heard, lambda: self.progress()))

    def _do_without(self, why: str) -> None:
        """Let this process make the batches."""
        self._end()
        name = type(self.dataset).__name__
        if self._processes.number:
            raise ConfigError(
                f"data.processes={self._processes.number} can't make batches of {name}: {why}. Type data.processes=0"
            )
        print(f"threads of this process make the batches of {name}: {why}")  # noqa: T201

    def _own(self, tensor: Tensor) -> Tensor:
        """Copy a tensor; for a GPU, to pinned memory."""
        size, stride = tensor.size(), tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, pin_memory=self._processes.to_gpu).copy_(tensor)

    def _hear(self, number: int, report: Mapping[str, Any]) -> None:
        """Take what a process says beside a batch."""
        self._reports[number] = report.get("stats", {})
        self._counts_bad.update(report.get("bad_counts", {}))  # first, as who finds a name bad asks for its count
        self._found_bad.update(report.get("bad", {}))
        self._errors.update(report.get("errors", {}))

    # For the training loop; see OF_ALL

    def _set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the random transforms."""
        self.dataset.set_epoch(epoch)
        with self._lock:
            self._start()
            for remote in self._remotes:
                remote.tell(epoch=epoch)

    def _expect(self, indices: Sequence[int]) -> None:
        """Say which samples will be read."""
        with self._lock:
            self._start()
            for remote in self._remotes:
                remote.tell(expect=list(indices))
            if not self._remotes:
                self.dataset.expect(indices)

    def _stats(self) -> dict[str, float]:
        """Return what reading has cost, here and in all processes."""
        totals: defaultdict[str, float] = defaultdict(float)
        for part in (self.dataset.stats(), *self._reports.values()):
            for name, value in part.items():
                totals[name] += value
        if "bad_samples" in totals and hasattr(self.dataset, "bad"):  # each process finds the same ones bad
            counts = getattr(self, "bad_counts", {})
            totals["bad_samples"] = sum(counts.get(name, 1) for name in self.bad)
        return dict(totals)

    @property
    def _bad(self) -> dict[str, str]:
        return {**self.dataset.bad, **self._found_bad}

    @property
    def _bad_counts(self) -> dict[str, int]:
        return {**self.dataset.bad_counts, **self._counts_bad}

    def _error_of(self, index: int) -> str:
        """Return why a sample that was read is replaced by another; "" if it is not."""
        return self._errors.get(index) or str(self.dataset.error_of(index))

    def close(self) -> None:
        """End the processes, and close the data set."""
        with self._lock:
            self._started = True
            self._end()
        if hasattr(self.dataset, "close"):
            self.dataset.close()

    def _end(self) -> None:
        remotes, self._remotes = self._remotes, []
        for remote in remotes:
            remote.tell(end=True)
        for remote in remotes:
            remote.close()
