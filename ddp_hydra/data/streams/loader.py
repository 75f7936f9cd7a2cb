"""Makes the batches of an iterable data set: ahead of the loop in a thread, if the data set is thread-safe.

Its sampler counts the steps, and lets all ranks end an epoch in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, islice, repeat
from typing import Any

from ddp_hydra.data import draws
from ddp_hydra.data.batch import alike, collated
from ddp_hydra.data.loader import Loader, MicroBatch, micro_batches_of, split
from ddp_hydra.data.streams.part import Part
from ddp_hydra.data.streams.part import split as split_stream
from ddp_hydra.data.threads import Lookahead
from ddp_hydra.data.wrappers import name_of
from ddp_hydra.errors import ConfigError, DataError

NEVER = 2**62
"""A position that no epoch reaches."""


class StreamSampler:
    """Has the methods of a sampler, but the data set says which samples come, and when there are no more.

    Each rank knows how far it has read ahead. These counts travel with the votes that the ranks cast in each step
    anyway; a step is taken when all ranks have its samples. So no rank waits in a step that another does not take.

    Args:
        part: of this rank.
        batch_size: samples per rank and step.
        n_samples: samples of all ranks in an epoch: it ends there at the latest; None: where the data ends.
        agree: exchanges the counts of all ranks now; a collective. None: there is one rank.
    """

    def __init__(
        self, part: Part, batch_size: int, n_samples: int | None = None, agree: Callable[[], Any] | None = None
    ) -> None:
        self.part, self.batch_size, self.n_samples = part, batch_size, n_samples
        self.global_batch = batch_size * part.world_size
        if n_samples is not None and n_samples < self.global_batch:
            raise ConfigError(
                f"data.n_samples={n_samples} is less than a global batch of {self.global_batch}: lower data.batch_size"
            )
        self.agree = agree or (lambda: self.heard(self.counts()))
        self.wait: Callable[[Callable[[], Any]], Any] = lambda waiting: waiting()  # the loader measures how long
        self.ahead: Lookahead[Any] | None = None  # None between epochs
        self.epoch = 0
        self.reached = self.known = 0  # the steps up to here are taken up; all ranks have those up to here
        self.end: int | None = None
        self.state: Any = None
        self.saved: Mapping[str, Any] = {}

    def __len__(self) -> int:
        assert self.n_samples is not None
        return self.n_samples // self.global_batch

    def planned(self, position: int = 0) -> float:
        return math.inf if self.n_samples is None else max(0, self.n_samples - position) // self.global_batch

    def batches(self, epoch: int, position: int = 0) -> Numbers:
        return Numbers(self, epoch, position)

    def steps(self, position: int = 0) -> int:
        if self.end is None and self.ahead is not None and self.known < position + self.global_batch:
            n = (position - self.reached) // self.global_batch + 1
            self.wait(partial(self.ahead.wait_for, n))
            self.agree()
        if self.end is None and self.ahead is None:
            return 1
        return max(0, min(self.known, NEVER if self.end is None else self.end) - position) // self.global_batch

    # -- an epoch ----------------------------------------------------------------------------------------------

    def begin(self, numbers: Numbers) -> None:
        self.epoch, self.reached, self.known = numbers.epoch, numbers.position, numbers.position
        self.end, self.state = None, None
        self.part.open(numbers.epoch, numbers.position, self.saved_state(numbers.epoch, numbers.position))

    def samples(self) -> Iterator[tuple[list[Any], Any]]:
        position = self.reached
        while self.n_samples is None or position + self.global_batch <= self.n_samples:
            samples = self.part.take(self.batch_size)
            if samples is None:
                return
            yield samples, self.part.state()
            position += self.global_batch

    def take_up(self, state: Any) -> None:
        self.reached += self.global_batch
        self.state = state

    def close(self) -> None:
        if self.ahead is not None:
            ahead, self.ahead = self.ahead, None
            ahead.close()

    def refuse_empty(self, position: int) -> None:
        # Refuse an epoch that ends where it begins: the next one would, too.
        if position or self.end != 0:
            return
        if self.epoch:
            raise DataError(
                f"no full batch in epoch {self.epoch + 1}, and some before: let __iter__ begin a new pass each time"
            )
        raise DataError(
            f"the data set ends before all {self.part.world_size} ranks have data.batch_size={self.batch_size} "
            f"samples, so no step is left ({self.part.how.partition(';')[0]}): give a smaller data.batch_size, fewer "
            "ranks, or data.shard_by=samples"
        )

    # -- the other ranks ---------------------------------------------------------------------------------------

    def counts(self) -> list[int]:
        if self.ahead is None:
            return [self.known, NEVER]
        held, has_ended = self.ahead.counts()
        ready = self.reached + held * self.global_batch
        return [ready, ready if has_ended else NEVER]

    def heard(self, counts: Sequence[int]) -> None:
        if self.ahead is None:
            return
        ready, end = counts
        self.known = max(self.known, ready)
        if ready >= end:
            self.end = end

    # -- checkpoints -------------------------------------------------------------------------------------------

    def gather(self, gather_objects: Callable[[Any], list[Any]]) -> None:
        states = gather_objects(self.state) if self.part.by_state else []
        self.saved = {
            "epoch": self.epoch,
            "position": self.reached,
            "end": self.end if self.end == self.reached else None,  # before, it hangs on how far ranks have read ahead
            "states": states,
            "world_size": self.part.world_size,
            "is_global": self.part.is_global,
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.saved = dict(state)
        self.epoch, self.reached, self.known = state["epoch"], state["position"], state["position"]
        self.end = state["end"]

    def resumed(self, position: int) -> str:
        # Return what does not hold after a resume, for a person; "" if it is exact.
        before = self.saved.get("world_size", self.part.world_size)
        is_global = self.part.is_global and self.saved.get("is_global", True)
        if before == self.part.world_size or is_global or not position:
            return ""
        return (
            f"; each rank's part is another than with {before} ranks: in this epoch some samples come twice, some never"
        )

    def saved_state(self, epoch: int, position: int) -> Any:
        if not self.part.by_state or (epoch, position) != (self.saved.get("epoch"), self.saved.get("position")):
            return None
        states = self.saved["states"]
        if self.part.dealt:
            return states[0] if states else None
        return states[self.part.rank] if len(states) == self.part.world_size else None


@dataclass(frozen=True)
class Numbers:
    """The numbers of a rank's samples in each step, from a position on; they have no end.

    They number the global sequence if the samples are dealt to the ranks, else the rank's own part.
    """

    sampler: StreamSampler
    epoch: int
    position: int

    def __iter__(self) -> Iterator[list[int]]:
        part, n = self.sampler.part, self.sampler.batch_size
        first = self.position * part.shares // part.world_size + part.share * n
        for start in count(first, part.shares * n):
            yield list(range(start, start + n))


@dataclass(frozen=True)
class StepBatches:
    """The batches of one step, not yet on the device."""

    batches: list[Any]
    numbers: list[list[Any]]
    state: Any = None


@dataclass(eq=False)
class StreamLoader(Loader):
    """Turns the samples of an iterable data set into batches on a device."""

    way: str | None = None  # how the ranks share the data set, see `split`
    gather: Callable[[Any], list[Any]] | None = None  # gathers a value from all ranks; None: there is one

    def _length(self) -> int:
        return 0  # a stream ends where it ends

    def steps(self, batches: Any, micro_batches: int) -> Iterator[Iterator[MicroBatch]]:
        if not isinstance(batches, Numbers):
            return
        sampler, position = batches.sampler, batches.position
        sampler.wait = self.wait
        with self.state_guard():
            sampler.begin(batches)
        sampler.ahead = self._ahead(self._made(sampler, micro_batches), sampler.part, micro_batches)
        with closing(sampler):
            self._compare(sampler.ahead, sampler.part)
            while sampler.steps(position):
                made = self.wait(sampler.ahead.take)
                sampler.take_up(made.state)
                position += sampler.global_batch
                yield micro_batches_of(made.numbers, map(self.placed, made.batches))
        sampler.refuse_empty(batches.position)

    def each_once(
        self, batch_size: int, rank: int, world_size: int, indices: Sequence[int] | None = None
    ) -> Iterator[tuple[Any, list[int]]]:
        part = split_stream(self.dataset, rank, world_size, self.way, self.progress, self.seed, training=False)
        return self.in_order(part, batch_size, lambda start: True)

    def spare(self) -> Any:
        part = split_stream(self.dataset, 0, 1, self.way, self.progress, self.seed, training=False)
        part.open(0)
        with self.state_guard():
            found = [sample for _, sample in islice(part.once(), 1)]
            return self.placed(self.made(found, draws.EVALUATION, 0)) if found else None

    def in_order(self, part: Part, batch_size: int, wanted: Callable[[int], bool]) -> Iterator[tuple[Any, list[int]]]:
        # wanted: number of a batch's first sample -> whether to make the batch.
        def batches() -> Iterator[StepBatches]:
            part.open(0)
            samples = part.once()
            while taken := list(islice(samples, batch_size)):
                numbers = [number for number, _ in taken]
                if wanted(numbers[0]):
                    batch = self.made([sample for _, sample in taken], draws.EVALUATION, numbers[0])
                    yield StepBatches([batch], [numbers])

        with self._ahead(batches(), part, 1) as ahead:
            self._compare(ahead, part)
            while self.wait(lambda: ahead.wait_for(1)):
                made = ahead.take()
                yield self.placed(made.batches[0]), made.numbers[0]

    def made(self, samples: list[Any], epoch: int, position: int) -> Any:
        if not self.in_threads and hasattr(self.dataset, "collate"):
            draws.placed(draws.Indices([], epoch, [position]), self.seed).seed_batch()
        return self.pinned(collated(self.dataset, samples, self.progress))

    def _made(self, sampler: StreamSampler, micro_batches: int) -> Iterator[StepBatches]:
        position = sampler.reached + sampler.part.rank * sampler.batch_size
        for samples, state in sampler.samples():
            parts = split(samples, micro_batches)
            starts = accumulate(map(len, parts), initial=position)
            batches = [self.made(part, sampler.epoch, start) for part, start in zip(parts, starts, strict=False)]
            yield StepBatches(batches, parts, state)
            position += sampler.global_batch

    def _compare(self, ahead: Lookahead[StepBatches], part: Part) -> None:
        is_shared = self.way == "itself" and not part.training
        if self.gather is None or not (is_shared or (part.dealt and self.way is None)):
            return
        self.wait(lambda: ahead.wait_for(1))
        firsts, self.gather = self.gather(list(part.first)), None
        name = name_of(self.dataset)
        if is_shared:
            if part.rank == 0 and part.first and _is_whole(firsts) and all(first == firsts[0] for first in firsts):
                self.warn(
                    f"{name} gives all ranks the same first samples, and data.shard_by=itself holds for data.val, too: "
                    f"if they go on alike, each sample counts {len(firsts)} times in the validation. Let it look at "
                    "RANK and WORLD_SIZE as data.train does, or define of_rank(rank, world_size) in place of the key"
                )
        elif any(not all(map(alike, firsts[0], other)) for other in firsts[1:]):
            raise ConfigError(
                f"{name} gives each rank samples of its own: type +data.shard_by=itself, predict on one rank. If "
                "only the order of the samples differs, and that is meant, type +data.shard_by=samples"
            )

    def _ahead(self, steps: Iterator[StepBatches], part: Part, micro_batches: int) -> Lookahead[StepBatches]:
        def depth(made: StepBatches) -> int:
            return max(1, self.affordable(made.batches) // micro_batches)

        def make() -> Any:
            with self.state_guard():
                return next(steps, Lookahead.END)

        is_ahead = bool(self.prefetch and self.in_threads)
        return Lookahead(repeat(make), int(is_ahead), depth_of=depth, stop=part.stop)


def _is_whole(summary: Any) -> bool:
    # Return whether all of a sample can be compared, see `alike`.
    return all(map(_is_whole, summary)) if isinstance(summary, list) else summary is not None
