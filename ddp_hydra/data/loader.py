"""Makes the batches of a data set: ahead of the loop in threads or workers, or in the thread that trains.

Reading from an object store and decoding release the interpreter lock. On CPUs, threads are enough for a data set
that is thread-safe; on GPUs, workers make its batches, see `ddp_hydra/data/workers/`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, tee
from typing import Any

import torch

from ddp_hydra.data import draws
from ddp_hydra.data.batch import laid_out, make_batch, n_bytes, pin, to_device
from ddp_hydra.data.draws import Indices
from ddp_hydra.data.threads import Lookahead, is_thread_safe
from ddp_hydra.data.workers import InWorkers, UnpicklableInWorker, Workers
from ddp_hydra.data.wrappers import name_of
from ddp_hydra.errors import ConfigError, DataError

log = logging.getLogger(__name__)
QUICK_S = 0.001
"""A batch that is made in less time is made by the loop itself: handing it over from a thread would take longer."""
PROBES = 2
"""Batches that are made here before workers start, unless the config says how many: the first one may be slow."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples that a rank computes at once: a step's batch, or a part of it."""

    batch: Any  # as the data set makes it, on the device
    size: int  # samples
    last: bool  # it is the step's last micro-batch


@dataclass(eq=False)
class Loader:
    """Turns batches of indices of a map-style data set into batches on a device."""

    dataset: Any
    device: torch.device
    channels_last: bool = False  # memory layout of 4-d tensors
    prefetch: int = 3  # batches made in threads while the model trains; 0: each is made when it is asked for
    memory_mb: float = 256  # MiB that batches made ahead may take; one is made ahead in any case
    progress: Callable[[], None] = lambda: None  # called after each sample and each batch, from any thread
    seed: int = 0  # of what the data set draws from the global generators
    warn: Callable[[str], None] = print  # gets a sentence if workers can't make the batches

    def __post_init__(self) -> None:
        # Any other data set is read by the thread that trains; each of its samples has the global generators seeded.
        self.in_threads = is_thread_safe(self.dataset)
        self.uses_workers = isinstance(self.dataset, InWorkers)
        self.source = self.dataset.dataset if self.uses_workers else self.dataset
        self.workers: Workers | None = None
        self.prepare = getattr(self.dataset, "prepare", lambda batch: batch)
        self.n_samples, self.has_grown = self._length(), False
        self.waited_s = 0.0  # that the loop has waited for batches
        self._made_in_s = self._quickest_s = math.inf
        self.probes = 0

    def begin_epoch(self, epoch: int) -> None:
        draws.tell_epoch(self.dataset, epoch, self.seed)
        self.check_length(f" in epoch {epoch + 1}")

    def check_length(self, when: str = "") -> None:
        n = self._length()
        if n > self.n_samples and not self.has_grown:
            self.has_grown = True
            log.warning(
                "%s had %s samples when the run began, and has %s%s: the run goes on with the first ones",
                name_of(self.source), f"{self.n_samples:,}", f"{n:,}", when,
            )  # fmt: skip
        if n < self.n_samples:
            raise DataError(
                f"{name_of(self.source)} had {self.n_samples:,} samples when the run began, and has {n:,}{when}: the "
                "steps, the schedule and an exact resume need one length. Let __len__ return the same number in all "
                "epochs, and let set_epoch choose which samples they are; or make it an IterableDataset, with "
                "+data.n_samples=<their number>"
            )

    def _length(self) -> int:
        return len(self.dataset)

    def load(self, batches: Iterable[list[int]]) -> Iterator[Any]:
        wanted: Iterable[Indices] = (draws.placed(indices, self.seed) for indices in batches)
        if self.uses_workers:
            yield from map(self.placed, self.by_workers(wanted))
            return
        if hasattr(self.dataset, "expect"):
            wanted = list(wanted)
            self.dataset.expect(list(chain.from_iterable(wanted)))
        calls = (partial(self.make, indices) for indices in wanted)
        threads = self.prefetch if self.in_threads else 0
        with Lookahead(calls, threads, depth_of=self.affordable, here=lambda: self._made_in_s < QUICK_S) as made:
            while self.wait(partial(made.wait_for, 1)):
                yield self.placed(made.take())

    def placed(self, batch: Any) -> Any:
        return laid_out(self.prepare(to_device(batch, self.device)), self.channels_last)

    def each_once(
        self, batch_size: int, rank: int, world_size: int, indices: Sequence[int] | None = None
    ) -> Iterator[tuple[Any, list[int]]]:
        # Ranks may have different numbers of batches. indices: of the samples; None: all.
        self.check_length()
        own = (range(self.n_samples) if indices is None else indices)[rank::world_size]
        batches = [list(own[start : start + batch_size]) for start in range(0, len(own), batch_size)]
        yield from zip(self.load(batches), batches, strict=True)

    def spare(self) -> Any:
        # A batch for a rank that has none of its own.
        return self.placed(self.make(draws.placed([0], self.seed)))

    def steps(self, batches: Iterable[list[int]], micro_batches: int) -> Iterator[Iterator[MicroBatch]]:
        cut, ahead = tee(split(batch, micro_batches) for batch in batches)
        loaded = self.load(chain.from_iterable(cut))
        for pieces in ahead:
            yield micro_batches_of(pieces, loaded)
        next(loaded, None)  # at its end it closes the threads

    def by_workers(self, batches: Iterable[Indices]) -> Iterator[Any]:
        # Have workers make the batches. The first ones are made here: they say how large and how quick they are.
        assert isinstance(self.dataset, InWorkers)
        rest, pending = iter(batches), deque[Indices]()
        while self.workers is None and self.uses_workers:
            if (indices := next(rest, None)) is None:
                return
            yield (batch := self.wait(partial(self.make, indices)))
            self.probes += 1
            self._quickest_s = min(self._quickest_s, self._made_in_s)
            if self.dataset.asked or self.probes >= PROBES:
                self.uses_workers = self.dataset.asked or self._quickest_s >= QUICK_S
                if self.uses_workers:
                    self.workers = self.dataset.start(n_bytes(batch), self.memory_mb, self.device.type == "cuda")
        if self.workers is not None:
            loaded = self.workers.load(rest, pending)
            try:
                while (batch := self.wait(partial(next, loaded, loaded))) is not loaded:
                    self.progress()
                    yield batch
                return
            except UnpicklableInWorker as refused:
                self.uses_workers, self.workers = False, None
                self.warn(
                    f"{name_of(self.source)} can't be unpickled in a worker, so the thread that trains "
                    f"makes its batches: {refused}"
                )
        yield from (self.wait(partial(self.make, indices)) for indices in chain(pending, rest))

    def wait(self, batch: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = batch()
        self.waited_s += time.perf_counter() - begin
        return made

    def affordable(self, batch: Any) -> int:
        affordable = self.memory_mb * 2**20 // max(1, n_bytes(batch))
        return int(min(self.prefetch, max(1, affordable)))

    def make(self, indices: Indices) -> Any:
        begin = time.perf_counter()
        with self.state_guard():
            batch = self.pinned(make_batch(self.source, indices, not self.in_threads, self.progress))
        self._made_in_s = time.perf_counter() - begin
        return batch

    def state_guard(self) -> Any:
        return nullcontext() if self.in_threads else draws.StateGuard()

    def pinned(self, batch: Any) -> Any:
        return pin(batch) if self.device.type == "cuda" else batch


def micro_batches_of(pieces: Sequence[Sequence[Any]], loaded: Iterable[Any]) -> Iterator[MicroBatch]:
    # loaded: the batches of the pieces, and maybe others behind them, which are not taken.
    for number, (piece, batch) in enumerate(zip(pieces, loaded, strict=False), start=1):
        yield MicroBatch(batch, len(piece), last=number == len(pieces))


def split(batch: list[int], parts: int) -> list[list[int]]:
    if not len(batch):
        raise ConfigError("the sampler gave an empty batch: let its batches() yield batch_size indices each time")
    parts = min(parts, len(batch))
    ends = [len(batch) * number // parts for number in range(parts + 1)]
    if isinstance(batch, Indices):
        return [batch.part(begin, end) for begin, end in pairwise(ends)]
    return [batch[begin:end] for begin, end in pairwise(ends)]
