"""torch's DataLoader over a data set, with workers that a helper forks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_hydra import results
from ddp_hydra.data import wrappers
from ddp_hydra.data.draws import Indices
from ddp_hydra.data.threads import cores_per_rank, is_thread_safe
from ddp_hydra.data.workers import helper, mapped
from ddp_hydra.data.workers.context import HELPER_LOST, HelperContext
from ddp_hydra.data.workers.worker import Request, Result, WorkerSet, begin
from ddp_hydra.errors import ConfigError

CORES = 4
"""Cores that a worker has for its threads, if its data set has any."""
MOST_WITH_THREADS, MOST = 4, 8
"""Workers that a rank has at most, unless the config says a number."""
AHEAD = 4
"""Batches that a worker makes ahead at most."""


def number_of(workers: Any, data: Any, to_gpu: bool) -> int:
    # workers: `data.workers`; None: as many as suit the rank's cores where batches go to a GPU, else 0.
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise ConfigError(f"data.workers={workers}: give a whole number from 0 on, or null")
    if workers is not None or not to_gpu:
        return int(workers or 0)
    most, cores = (MOST_WITH_THREADS, CORES) if hasattr(data, "share") else (MOST, 2)
    return min(most, max(1, cores_per_rank() // cores))


class InWorkers:
    """A data set whose batches workers make: it knows what their copies learn. All else is the data set's own.

    Args:
        data: a map-style data set.
        number: of workers.
        asked: the config says the number; else a data set whose batches take no time has none.
        files: descriptors of files that the data set has open; its copies have them under the same numbers.
    """

    def __init__(self, data: Any, number: int, asked: bool, files: Collection[int] = ()) -> None:
        self.dataset, self.number, self.asked, self.files = data, number, asked, sorted(files)
        if len(files) > helper.MOST_FILES:
            raise ValueError(f"it has {len(files)} files open, and a worker takes {helper.MOST_FILES}")
        self.thread_safe = is_thread_safe(data)
        self.pickled = mapped.pickled(data)
        self._workers: list[Workers] = []
        self._stats: dict[int, Mapping[str, float]] = {}
        self._bad: dict[str, str] = {}
        self._bad_counts: dict[str, int] = {}
        self._errors: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is copied
            raise AttributeError(name)
        found = getattr(self.dataset, name)
        if name == "stats":
            return self._totals
        if name == "error_of":
            return lambda index: self._errors.get(index) or found(index)
        if name in ("bad", "bad_counts"):
            return {**found, **getattr(self, f"_{name}")}
        return found

    def hear(self, result: Result) -> None:
        self._stats[result.worker] = result.report.get("stats", {})
        self._bad_counts.update(result.report.get("bad_counts", {}))
        self._bad.update(result.report.get("bad", {}))
        self._errors.update(result.report.get("errors", {}))
        results.add_means(result.report.get("logged", {}))

    def _totals(self) -> dict[str, float]:
        totals: Any = Counter()
        for part in (self.dataset.stats(), *self._stats.values()):
            totals.update(part)
        if "bad_samples" in totals and hasattr(self.dataset, "bad"):  # each worker finds the same ones bad
            counts = getattr(self, "bad_counts", {})
            totals["bad_samples"] = sum(counts.get(name, 1) for name in self.bad)
        return dict(totals)

    def start(self, batch_bytes: int, memory_mb: float, to_gpu: bool) -> Workers:
        self._workers.append(Workers(self, batch_bytes, memory_mb, to_gpu))
        return self._workers[-1]

    def close(self) -> None:
        while self._workers:
            self._workers.pop().close()
        if hasattr(self.dataset, "close"):
            self.dataset.close()


class UnpicklableInWorker(Exception):
    """A worker can't unpickle the data set."""


class Workers:
    """The DataLoader of a data set. Its workers live until it is closed."""

    def __init__(self, data: InWorkers, batch_bytes: int, memory_mb: float, to_gpu: bool) -> None:
        # memory_mb: MiB that batches made ahead may take; one is made ahead in any case.
        affordable = max(1, int(memory_mb * 2**20 // max(1, batch_bytes)))
        self.data, self.number = data, min(data.number, affordable)
        self.context = HelperContext(helper.current(), data.files)
        self.requests = _Requests()
        dataset: Any = WorkerSet(data.pickled, not data.thread_safe, self.number)
        requests: Any = self.requests
        self.loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            num_workers=self.number,
            prefetch_factor=min(AHEAD, affordable // self.number),
            pin_memory=to_gpu,
            multiprocessing_context=self.context,
            worker_init_fn=begin,
            persistent_workers=True,
            generator=torch.Generator(),  # what it draws would move the global one
        )

    def load(self, batches: Iterable[Indices], pending: deque[Indices]) -> Iterator[Any]:
        self.requests.batches = self._asked_for(batches, pending)
        try:
            assert self.loader is not None
            results: Iterator[Result] = iter(self.loader)
            while (result := next(results, None)) is not None:
                if result.refused:
                    raise UnpicklableInWorker(result.refused)
                self.data.hear(result)
                batch = result.opened()
                pending.popleft()
                yield batch
        except RuntimeError as error:
            if codes := self.context.exit_codes():
                raise _gone(codes[0]) from None
            raise error

    def _asked_for(self, batches: Iterable[Indices], pending: deque[Indices]) -> Iterator[Request]:
        expected: list[Indices] = []
        if hasattr(self.data.dataset, "expect"):
            batches = expected = list(batches)
        for number, indices in enumerate(batches):
            pending.append(indices)
            own = expected[number :: self.number] if number < self.number else []  # of a worker that gets its first one
            yield Request(indices, list(chain.from_iterable(own)) if own else None)

    def close(self) -> None:
        if self.loader is None:
            return
        iterator: Any = self.loader._iterator
        self.loader = None
        if iterator is not None:
            iterator._shutdown_workers()


class _Requests:
    """The sampler of the DataLoader: each pass asks for other batches."""

    batches: Iterator[Request]

    def __iter__(self) -> Iterator[Request]:
        return self.batches


def _gone(code: int) -> ConnectionError:
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    advice = "what it printed stands above, in the output of this rank"
    if code == HELPER_LOST:
        how, advice = "with the process that starts them", "somebody has killed that, or it was out of memory"
    elif code == -9:
        advice = "if that was for want of memory, type a smaller data.workers or data.memory_mb"
    return ConnectionError(f"a worker that makes batches for this rank (data.workers) has ended {how}; {advice}")


def with_workers(
    workers: Any, data: Any, to_gpu: bool, warn: Callable[[str], None], files: Collection[int] = ()
) -> Any:
    if not (number := number_of(workers, data, to_gpu)):
        return data
    try:
        return InWorkers(data, number, asked=workers is not None, files=files)
    except Exception as error:
        name = wrappers.name_of(data)
        warn(f"{name} can't be pickled, so the thread that trains makes its batches: {type(error).__name__}: {error}")
        return data
