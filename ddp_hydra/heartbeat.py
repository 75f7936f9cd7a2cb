"""What a rank is doing, readable from outside whatever state it is in.

A page of memory that a rank shares with its relay. The rank writes where it is, at the price of an assignment: no
message, no thread, no lock. The relay reads it while the rank computes, hangs or is stopped, and after it was killed.
The other way, the relay writes what is asked of the rank, which looks there once a step.

Everything that may take long calls `progress` now and then, so that only what makes no progress at all looks hung.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PHASES = ("join", "run", "start", "load", "forward", "backward", "update", "log", "validate", "save", "end")
"""In the order of a step. `join` is the rendezvous, `run` a function that says nothing of itself."""
UNREADY = ("join", "run", "start")
"""Phases in which nobody looks at what is asked of the rank, and nothing is there to be saved."""
DONE = ("log", "validate", "save", "end")
"""Phases in which the step is done already."""
REASONS = ("", "interrupt", "time_limit", "preemption")
"""Why a rank is asked to finish; by number on the page."""

_STATE = struct.Struct("<QqBB")  # ticks, step, phase, first
_TICKS, _PLACE = struct.Struct("<Q"), struct.Struct("<qBB")
_FINISH, _DIE, _SAVING, _SIZE = 64, 65, 66, 128
SAVE_S = 30.0
"""How long a checkpoint under way may take to be complete, when its gang has failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Args:
        ticks: counts up with everything it does.
        step: the step it works on, counted from 1; 0 before the first.
        phase: one of `PHASES`.
        first: it is in this phase for the first time, when things are set up and compiled.
    """

    ticks: int = 0
    step: int = 0
    phase: str = "join"
    first: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """Who is further: ranks pass the same places in the same order."""
        return self.step, PHASES.index(self.phase)

    @property
    def steps_done(self) -> int:
        """Optimizer steps behind it."""
        return self.step if self.phase in DONE else max(0, self.step - 1)


class SharedStatus:
    """The page that a rank and its relay share.

    Args:
        memory: of at least `_SIZE` bytes.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.ticks, self.step, self.phase, self.first = 0, 0, 0, True
        self.visited: set[int] = set()

    @classmethod
    def create(cls) -> tuple[SharedStatus, int]:
        """Make a page, and a descriptor by which another process can have it."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("ddp_hydra-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, _SIZE)
            shared_status = cls(mmap.mmap(fd, _SIZE))
        except OSError:
            os.close(fd)
            raise
        _STATE.pack_into(shared_status.memory, 0, 0, 0, 0, True)  # until there is a rank to say more
        return shared_status, fd

    @classmethod
    def of(cls, fd: int) -> SharedStatus:
        """Take the page of a descriptor, and close that."""
        shared_status = cls(mmap.mmap(fd, _SIZE))
        os.close(fd)
        return shared_status

    # -- the rank's side -----------------------------------------------------------------------------------

    def enter(self, phase: str, step: int) -> None:
        """Say where the rank is now."""
        number = PHASES.index(phase)
        self.first = number not in self.visited or (self.first and number == self.phase and step == self.step)
        self.visited.add(number)
        self.step, self.phase = step, number
        _PLACE.pack_into(self.memory, _TICKS.size, step, number, self.first)
        self.progress()

    def progress(self) -> None:
        """Say that something was done; from any thread, so it leaves the place alone."""
        self.ticks += 1
        _TICKS.pack_into(self.memory, 0, self.ticks)

    @property
    def finish(self) -> int:
        """Number of the reason for which the rank is asked to finish; 0 while it is not."""
        return self.memory[_FINISH]

    @property
    def die(self) -> bool:
        """Whether the rank is to end at once."""
        return bool(self.memory[_DIE])

    @property
    def saving(self) -> bool:
        """Whether a checkpoint of this rank is under way."""
        return bool(self.memory[_SAVING])

    @saving.setter
    def saving(self, under_way: bool) -> None:
        self.memory[_SAVING] = under_way

    # -- the relay's side ----------------------------------------------------------------------------------

    def read(self) -> Place:
        """Where the rank is."""
        ticks, step, phase, first = _STATE.unpack_from(self.memory, 0)
        return Place(ticks, step, PHASES[min(phase, len(PHASES) - 1)], bool(first))

    def ask_to_finish(self, reason: int) -> None:
        """Have the rank make a checkpoint at its next step, and end."""
        self.memory[_FINISH] = self.memory[_FINISH] or reason

    def ask_to_die(self) -> None:
        """Have the rank end as soon as it is told to by a signal."""
        self.memory[_DIE] = 1

    def close(self) -> None:
        """Give the page back."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.close()


_here = SharedStatus(bytearray(_SIZE))
_hooks: list[Callable[[str, int], None]] = []


def connect(shared_status: SharedStatus | None) -> None:
    """Make `at` and `progress` of this process write on `shared_status`; None for nobody's."""
    global _here
    _here = shared_status or SharedStatus(bytearray(_SIZE))
    _hooks.clear()


def here() -> SharedStatus:
    """The shared_status of this process."""
    return _here


def on_phase(hook: Callable[[str, int], None]) -> None:
    """Call `hook(phase, step)` at each phase of this process, until the next `connect`."""
    _hooks.append(hook)


def at(phase: str, step: int) -> None:
    """Say where this rank is.

    Args:
        phase: one of `PHASES`.
        step: the step it works on, counted from 1.
    """
    _here.enter(phase, step)
    for hook in _hooks:
        hook(phase, step)


def await_saved() -> None:
    """Wait until this process has no checkpoint under way, but not for ever."""
    until = time.monotonic() + SAVE_S
    while _here.saving and time.monotonic() < until:
        time.sleep(0.02)


def progress() -> None:
    """Say that this rank has done something, in whatever it is busy with."""
    _here.progress()
