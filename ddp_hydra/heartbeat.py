"""Shares a rank's progress with its worker's task, which can read it in any state of the rank.

Both have one page of memory in common. The rank writes its step and phase there at the cost of an assignment: no
message, no thread, no lock. The worker's task reads them while the rank computes, hangs or is stopped, and after it was
killed. In the other direction, the worker's task writes its requests, and the rank looks at them once per step.

Everything that may take long calls `progress` from time to time, so that only a rank without any progress looks hung.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

Phase = Literal["join", "run", "start", "load", "forward", "backward", "update", "log", "validate", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order of a step. `join` is the rendezvous; `run` is a user's function that does not report its phase."""
UNREADY = ("join", "run", "start")
"""Phases in which the rank does not look at requests and has nothing to save."""
DONE = ("log", "validate", "save", "end")
"""Phases after the optimizer's step."""
REASONS = ("", "interrupt", "time_limit", "preemption", "callback", "pause", "done", "leave")
"""Reasons why a rank finishes early. The page holds the index of one that it is asked for; a pause needs no asking.

With `done`, a callback ends the run as if at its last step: the run is not interrupted. With `leave`, the ranks leave
their world after the step and keep the run, for another world.
"""

_STATE = struct.Struct("<QqBB")  # ticks, step, phase, first
_TICKS, _PLACE = struct.Struct("<Q"), struct.Struct("<qBB")
_FINISH, _DIE, _SAVING, _LEAVE, _DONE, _SIZE = 64, 65, 66, 67, 72, 128
SAVE_S = 30.0
"""Longest wait for a checkpoint that is being saved when the gang has failed."""


class Place(NamedTuple):
    """A rank's step, counted from 1 (0 before the first), and its phase.

    Args:
        ticks: a counter that grows with everything the rank does.
        first: whether the rank is in this phase for the first time, when things are set up and compiled.
    """

    ticks: int
    step: int
    phase: Phase
    first: bool


def file_in_memory(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedStatus:
    """Reads and writes the page of memory that a rank and its worker's task share: at least `_SIZE` bytes."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.ticks, self.step, self.phase, self.first = 0, 0, 0, True
        self.visited: set[int] = set()

    @classmethod
    def create(cls) -> tuple[SharedStatus, int]:
        """Create a page; return it with a file descriptor by which another process can map it."""
        fd = file_in_memory("ddp_hydra-heartbeat")
        try:
            os.ftruncate(fd, _SIZE)
            shared_status = cls(mmap.mmap(fd, _SIZE))
        except OSError:
            os.close(fd)
            raise
        _STATE.pack_into(shared_status.memory, 0, 0, 0, 0, True)  # until the rank writes
        return shared_status, fd

    @classmethod
    def of(cls, fd: int) -> SharedStatus:
        shared_status = cls(mmap.mmap(fd, _SIZE))
        os.close(fd)
        return shared_status

    # -- the rank's side -----------------------------------------------------------------------------------

    def enter(self, phase: str, step: int) -> None:
        number = PHASES.index(phase)
        self.first = number not in self.visited or (self.first and number == self.phase and step == self.step)
        self.visited.add(number)
        self.step, self.phase = step, number
        _PLACE.pack_into(self.memory, _TICKS.size, step, number, self.first)
        self.progress()

    def progress(self) -> None:
        self.ticks += 1
        _TICKS.pack_into(self.memory, 0, self.ticks)

    @property
    def finish(self) -> int:
        """Return the index in `REASONS` of the reason to finish; 0 while nobody asks for it."""
        return self.memory[_FINISH]

    @property
    def die(self) -> bool:
        return bool(self.memory[_DIE])

    @property
    def leave(self) -> bool:
        """Return whether the rank is asked to leave its world; it does so between two steps, with all others."""
        return bool(self.memory[_LEAVE])

    def stay(self) -> None:
        self.memory[_LEAVE] = 0

    def commit(self, steps: int) -> None:
        """Set how many steps are done: their exchange, vote and update have returned."""
        _TICKS.pack_into(self.memory, _DONE, steps)

    @property
    def saving(self) -> bool:
        return bool(self.memory[_SAVING])

    @saving.setter
    def saving(self, is_saving: bool) -> None:
        self.memory[_SAVING] = is_saving

    # -- the side of the worker's task ---------------------------------------------------------------------

    def read(self) -> Place:
        ticks, step, phase, first = _STATE.unpack_from(self.memory, 0)
        return Place(ticks, step, PHASES[min(phase, len(PHASES) - 1)], bool(first))

    def ask_to_finish(self, reason: int) -> None:
        self.memory[_FINISH] = self.memory[_FINISH] or reason

    @property
    def steps_done(self) -> int:
        done: int = _TICKS.unpack_from(self.memory, _DONE)[0]
        return done

    def ask_to_leave(self) -> None:
        self.memory[_LEAVE] = 1

    def ask_to_die(self) -> None:
        self.memory[_DIE] = 1

    def close(self) -> None:
        self.memory.close()


_here = SharedStatus(bytearray(_SIZE))
_hooks: list[Callable[[str, int], None]] = []


def connect(shared_status: SharedStatus | None) -> None:
    """Make `at` and `progress` of this process write to `shared_status`; None: to a page that nobody reads."""
    global _here
    _here = shared_status or SharedStatus(bytearray(_SIZE))
    _hooks.clear()


def here() -> SharedStatus:
    return _here


def on_phase(hook: Callable[[str, int], None]) -> None:
    """Call `hook(phase, step)` when this process enters a phase, until the next `connect`."""
    _hooks.append(hook)


def at(phase: str, step: int) -> None:
    """Set this rank's phase, one of `PHASES`, and the step that it works on, counted from 1."""
    _here.enter(phase, step)
    for hook in _hooks:
        hook(phase, step)


def await_saved() -> None:
    until = time.monotonic() + SAVE_S
    while _here.saving and time.monotonic() < until:
        time.sleep(0.02)


def progress() -> None:
    _here.progress()
