"""Makes the batches of an iterable data set: ahead of the loop in a thread, if the data set is thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from typing import Any

from ddp_hydra.data import draws
from ddp_hydra.data.batch import alike, collated
from ddp_hydra.data.loader import Loader, MicroBatch, split
from ddp_hydra.data.streams.part import Part
from ddp_hydra.data.streams.part import split as split_stream
from ddp_hydra.data.streams.sampler import Numbers, StreamSampler
from ddp_hydra.data.threads import Lookahead
from ddp_hydra.data.wrappers import name_of
from ddp_hydra.errors import ConfigError


@dataclass(frozen=True)
class StepBatches:
    """The batches of one step, not yet on the device.

    Args:
        batches: the micro-batches.
        numbers: of the samples in each, or anything of that length.
        state: of the data set behind them.
    """

    batches: list[Any]
    numbers: list[list[Any]]
    state: Any = None


@dataclass(eq=False)
class StreamLoader(Loader):
    """Turns the samples of an iterable data set into batches on a device.

    Args:
        dataset: the iterable data set; it and the others are arguments of `Loader`.
        way: how the ranks share the data set, see `split`.
        gather: gathers a value from all ranks; None for a single rank.
    """

    way: str | None = None
    gather: Callable[[Any], list[Any]] | None = None

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
                yield self._micro_batches(made)
        sampler.refuse_empty(batches.position)

    def each_once(self, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[Any, list[int]]]:
        part = split_stream(self.dataset, rank, world_size, self.way, self.progress, self.seed, training=False)
        return self.in_order(part, batch_size, lambda start: True)

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
        if self.gather is None or not part.dealt or self.way is not None:
            return
        self.wait(lambda: ahead.wait_for(1))
        firsts, self.gather = self.gather(list(part.first)), None
        if any(not all(map(alike, firsts[0], other)) for other in firsts[1:]):
            name = name_of(self.dataset)
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

    def _micro_batches(self, made: StepBatches) -> Iterator[MicroBatch]:
        total = sum(map(len, made.numbers))
        for number, (batch, samples) in enumerate(zip(made.batches, made.numbers, strict=True), start=1):
            share, last = len(samples) / total, number == len(made.batches)
            yield MicroBatch(self.placed(batch), len(samples), share, last)
