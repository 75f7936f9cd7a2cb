"""Faults on purpose: rehearse on your own cluster what happens when things go wrong.

    python -m ddp_hydra +fault=kill,rank=1,step=20
    python -m ddp_hydra +fault=hang,rank=0,step=5,at=load +fault=worker,rank=1,step=30,attempt=1
    python -m ddp_hydra debug=faults

A fault strikes one rank, in one step, in one phase, in one attempt; or the client, once the metrics of a step are
there. Networks are not ours to break.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ddp_hydra import heartbeat
from ddp_hydra.errors import ConfigError
from ddp_hydra.heartbeat import PHASES

KINDS = {
    "raise": "raises RuntimeError",
    "exit": "calls os._exit(3)",
    "kill": "is killed by SIGKILL, as by the out-of-memory killer",
    "segv": "reads address 0",
    "hang": "sleeps for ever",
    "stop": "is suspended by SIGSTOP",
    "slow": "sleeps for seconds=…",
    "nan": "has a loss of NaN",
    "worker": "its Dask worker is killed",
    "nanny": "its Dask worker's nanny is killed",
    "term": "its Dask worker gets SIGTERM, as in a preemption",
}
ON_CLIENT = {
    "interrupt": "Ctrl-C, from step=… on",
    "client": "the process of the command is killed",
    "scheduler": "the Dask scheduler ends (of a LocalCluster: with the client)",
    "disk": "writing results fails for seconds=…, as on a full disk",
    "damage": "the newest checkpoint is damaged, to be found out at the next restart",
}
"""Faults of the client's side; see `rehearsal.py`."""
PLACES = (*PHASES[2:-1], "write")
"""Where a fault can strike; `write` is in the middle of a checkpoint file, on rank 0."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: one of `KINDS` or `ON_CLIENT`.
        rank: who is struck.
        step: in which step, counted from 1; 0 for the first time that the place comes.
        at: one of `PLACES`.
        attempt: in which attempt; -1 for every.
        seconds: for slow and disk.
    """

    kind: str
    rank: int = 0
    step: int = 0
    at: str = "forward"
    attempt: int = 0
    seconds: float = 5.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read "kill,rank=1,step=20".

        Raises:
            ConfigError: it says what is allowed.
        """
        kind, *settings = [word.strip() for word in str(text).split(",")]
        types = {one.name: {"int": int, "float": float, "str": str}[str(one.type)] for one in fields(cls)}
        given: dict[str, Any] = {"kind": kind}
        for setting in settings:
            name, _, value = setting.partition("=")
            try:
                given[name] = types[name](value)
            except (KeyError, ValueError):
                raise cls.refused(text) from None
        fault = cls(**given)
        if fault.kind not in KINDS | ON_CLIENT or fault.at not in PLACES:
            raise cls.refused(text)
        if fault.rank < 0 or fault.step < 0 or fault.attempt < -1:
            raise cls.refused(text)
        return fault

    @classmethod
    def refused(cls, text: str) -> ConfigError:
        """Say what a fault looks like."""
        return ConfigError(
            f"fault {text!r} is none: give <kind>,rank=<n>,step=<n>,at=<place>,attempt=<n> (all but the kind may be "
            f"left out), with a kind of {', '.join(KINDS | ON_CLIENT)} and a place of {', '.join(PLACES)}"
        )


@dataclass
class Armed:
    """The faults that wait for this rank.

    Args:
        rank: this rank.
        attempt: this attempt.
        pids: process ids of this rank's "worker" and "nanny".
        faults: of the job.
    """

    rank: int = 0
    attempt: int = 0
    pids: Mapping[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def __call__(self, place: str, step: int) -> None:
        """Strike where it is time to."""
        for fault in self.due(place, step):
            print(f"fault on purpose: {fault}", flush=True)  # noqa: T201
            self.strike(fault)

    def due(self, place: str, step: int) -> list[Fault]:
        """The faults for here and now; each strikes once."""
        due = [
            fault
            for fault in self.faults
            if fault.rank == self.rank and fault.at == place and fault.attempt in (self.attempt, -1)
            and fault.step in (step, 0) and fault.kind != "nan" and fault.kind in KINDS
        ]  # fmt: skip
        self.faults = [fault for fault in self.faults if fault not in due]
        return due

    def strike(self, fault: Fault) -> None:
        """Do it."""
        actions: dict[str, Callable[[], Any]] = {
            "raise": _raise,
            "exit": lambda: os._exit(3),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "segv": lambda: ctypes.string_at(0),
            "hang": lambda: _sleep(1e9),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "slow": lambda: _sleep(fault.seconds),
            "worker": lambda: self._signal("worker", signal.SIGKILL),
            "nanny": lambda: self._signal("nanny", signal.SIGKILL),
            "term": lambda: self._signal("nanny", signal.SIGTERM),
        }
        actions[fault.kind]()

    def _signal(self, who: str, number: int) -> None:
        pid = self.pids.get(who, 0)
        if pid <= 1:
            print(f"there is no {who} to be struck", file=sys.stderr, flush=True)  # noqa: T201
            return
        os.kill(pid, number)

    def spoils(self, step: int) -> bool:
        """Whether this rank's loss of a step shall be NaN; so it is each time that the step comes."""
        return any(
            fault.kind == "nan" and fault.rank == self.rank and fault.step in (step, 0)
            and fault.attempt in (self.attempt, -1) for fault in self.faults
        )  # fmt: skip


def parse(texts: Iterable[str]) -> list[Fault]:
    """Read all faults of a config."""
    return [Fault.parse(text) for text in texts]


_here = Armed()


def arm(rank: int, attempt: int, pids: Mapping[str, int]) -> None:
    """Say who this process is, before `wait`."""
    global _here
    _here = Armed(rank, attempt, pids)


def wait(texts: Iterable[str]) -> Armed:
    """Let faults strike this process when their time has come."""
    _here.faults = parse(texts)
    if _here.faults:
        heartbeat.on_phase(_here)
    return _here


def write(step: int) -> None:
    """The place in the middle of a checkpoint file."""
    _here("write", step)


def _raise() -> None:
    raise RuntimeError("a fault on purpose")


def _sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 3600))
