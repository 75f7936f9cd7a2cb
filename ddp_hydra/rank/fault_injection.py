"""Injects faults on purpose, so that you can test on your own cluster what happens then.

    ddp-hydra +fault=kill,rank=1,step=20
    ddp-hydra +fault=hang,rank=0,step=5,at=load +fault=worker,rank=1,step=30,attempt=1
    ddp-hydra debug=faults

A fault is triggered on one rank, in one step, in one phase, in one attempt. Faults of the network are not supported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated

import msgspec
from msgspec import Meta

from ddp_hydra import heartbeat
from ddp_hydra.checked import Count, prepare
from ddp_hydra.errors import ConfigError
from ddp_hydra.heartbeat import PHASES
from ddp_hydra.record import Metrics, Record

KINDS = (
    "raise", "exit", "kill", "segv", "hang", "stop", "slow", "nan", "worker", "nanny", "term", "interrupt",
)  # fmt: skip
"""What they do: docs/failures.md. `interrupt` is for the command, which gets Ctrl-C when it hears of the step."""
_NANNY = ("the nanny of a Dask worker", "the fault worker with cluster=local, or cluster=remote")
STRUCK = {"worker": ("a Dask worker", "cluster=local"), "nanny": _NANNY, "term": _NANNY}
"""Faults that need a worker that is a process of its own: what they strike, and where there is one."""
PLACES = (*PHASES[2:-1], "write")
"""Places where a fault can be triggered; `write` is in the middle of a checkpoint's file, on a rank that writes one."""


class InjectedFault(RuntimeError):
    """Is raised by the fault `raise`; a RuntimeError itself would count as one that comes again in each attempt."""


@dataclass(frozen=True)
class Fault:
    """A fault, and when it is triggered.

    Args:
        kind: one of `KINDS`.
        rank: on which it is triggered.
        step: in which it is triggered, counted from 1; 0 for the first time that the rank is at the place.
        at: one of `PLACES`.
        attempt: in which it is triggered; -1 for every attempt.
        seconds: how long the kind slow lasts.
    """

    kind: str
    rank: Count = 0
    step: Count = 0
    at: str = "forward"
    attempt: Annotated[int, Meta(ge=-1)] = 0
    seconds: Annotated[float, Meta(ge=0, le=1e9)] = 5.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read "kill,rank=1,step=20".

        Raises:
            ConfigError: the text is not a fault; says what is allowed.
        """
        kind, *settings = [word.strip() for word in str(text).split(",")]
        given = {"kind": kind} | {name: value for name, _, value in (setting.partition("=") for setting in settings)}
        with contextlib.suppress(msgspec.ValidationError):
            fault = msgspec.convert(given, cls, strict=False)
            if fault.kind in KINDS and fault.at in PLACES and given.keys() <= {one.name for one in fields(cls)}:
                return fault
        raise ConfigError(
            f"fault={text!r} is not a fault: give <kind>,rank=<n>,step=<n>,at=<place>,attempt=<n> (all but the kind "
            f"may be left out), with a kind of {', '.join(KINDS)} and a place of {', '.join(PLACES)}"
        )


@dataclass
class FaultInjector:
    """Triggers the faults of this rank; `pids` are of its "worker" and "nanny"."""

    rank: int = 0
    attempt: int = 0
    pids: Mapping[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def __call__(self, place: str, step: int) -> None:
        for fault in self.due(place, step):
            print(f"fault on purpose: {fault}", flush=True)  # noqa: T201
            self.trigger(fault)

    def due(self, place: str, step: int) -> list[Fault]:
        due = [fault for fault in self.here(step) if fault.at == place and fault.kind not in ("nan", "interrupt")]
        self.faults = [fault for fault in self.faults if fault not in due]
        return due

    def trigger(self, fault: Fault) -> None:
        match fault.kind:
            case "raise":
                raise InjectedFault("a fault on purpose")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                ctypes.string_at(0)
            case "hang":
                time.sleep(1e9)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(fault.seconds)
            case "worker":
                self._signal("worker", signal.SIGKILL)
                # This rank is stopped when that is noticed; on a loaded machine, it would meanwhile pass the next
                # fault's step.
                time.sleep(10)
            case "nanny":
                self._signal("nanny", signal.SIGKILL)
            case "term":
                self._signal("nanny", signal.SIGTERM)

    def _signal(self, who: str, number: int) -> None:
        pid = self.pids.get(who, 0)
        if pid <= 1:
            print(f"there is no {who} for this fault", file=sys.stderr, flush=True)  # noqa: T201
            return
        os.kill(pid, number)

    def corrupts(self, step: int) -> bool:
        """Return whether this rank's loss of a step becomes NaN; also when the step is repeated."""
        return any(fault.kind == "nan" for fault in self.here(step))

    def here(self, step: int) -> list[Fault]:
        own = [fault for fault in self.faults if fault.rank == self.rank and fault.attempt in (self.attempt, -1)]
        return [fault for fault in own if fault.step in (step, 0)]


prepare(Fault)


def parse(texts: Iterable[str]) -> list[Fault]:
    return [Fault.parse(text) for text in texts]


def check(texts: Iterable[str], ranks: int, without: Collection[str] = ()) -> None:
    """Refuse faults of ranks that a gang of `ranks` does not have, and kinds `without` anything to strike."""
    for text in texts:
        fault = Fault.parse(text)
        if fault.kind in without:
            what, where = STRUCK[fault.kind]
            raise ConfigError(f"fault={text!r} strikes {what}, and this job has none: give {where}")
        if fault.rank >= ranks and fault.kind != "interrupt":
            there = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"
            raise ConfigError(f"fault={text!r} has no effect: this job has {there}")


_here = FaultInjector()


def install(rank: int, attempt: int, pids: Mapping[str, int]) -> None:
    """Set which rank this process is; call this before `activate`."""
    global _here
    _here = FaultInjector(rank, attempt, pids)


def activate(texts: Iterable[str]) -> FaultInjector:
    _here.faults = parse(texts)
    if _here.faults:
        heartbeat.on_phase(_here)
    return _here


def write(step: int) -> None:
    _here("write", step)


class InterruptWriter:
    """Gives this process a Ctrl-C on purpose, when the metrics of a step arrive: `+fault=interrupt,step=20`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.pending = list(faults)

    def write(self, record: Record) -> None:
        for fault in self.pending:
            is_its_attempt = fault.attempt in (record.attempt, -1)
            if isinstance(record.data, Metrics) and is_its_attempt and (record.step or 0) >= fault.step:
                self.pending.remove(fault)
                print(f"fault on purpose: {fault}", flush=True)  # noqa: T201
                os.kill(os.getpid(), signal.SIGINT)
                return

    def close(self) -> None:
        self.pending = []
