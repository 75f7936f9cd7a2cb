"""Counts the steps of an iterable data set, and lets all ranks end its epochs in the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from ddp_hydra.data.streams.part import Part
from ddp_hydra.data.threads import Lookahead
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

    Attributes:
        wait: calls a function that waits for data; the loader measures how long.
        ahead: the steps that are read ahead; None between epochs.
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
        self.wait: Callable[[Callable[[], Any]], Any] = lambda waiting: waiting()
        self.ahead: Lookahead[Any] | None = None
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
        if position == 0 and self.end == 0 and self.epoch:
            raise DataError(
                f"no full batch in epoch {self.epoch + 1}, and some before: let __iter__ begin a new pass each time"
            )
        if position == 0 and self.end == 0:
            raise DataError(
                f"the data set ends before all {self.part.world_size} ranks have data.batch_size={self.batch_size} "
                f"samples, so no step is left ({self.part.how.partition(';')[0]}): give a smaller data.batch_size, "
                "fewer ranks, or data.shard_by=samples"
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

    Args:
        sampler: of the samples.
        epoch: the epoch.
        position: samples of the epoch that all ranks have read before.
    """

    sampler: StreamSampler
    epoch: int
    position: int

    def __iter__(self) -> Iterator[list[int]]:
        part, n = self.sampler.part, self.sampler.batch_size
        first = self.position * part.shares // part.world_size + part.share * n
        for start in count(first, part.shares * n):
            yield list(range(start, start + n))
