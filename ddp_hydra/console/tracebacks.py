"""Errors as the user of a project reads them: their own files, by the paths they know, before those of libraries."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

from ddp_hydra.console.text import message_of

_PACKED = re.compile(r".*[/\\]project-[0-9a-f]{16}[/\\](.*)")
"""A file of a packed project space, unpacked on a worker; see `project.Project.unpack`."""
_LIBRARY = re.compile(r"<|.*[/\\](site|dist)-packages[/\\]")
_LIBRARY_FOLDERS = (sysconfig.get_path("stdlib") + os.sep, str(Path(__file__).parents[1]) + os.sep)
_DETERMINISTIC = (
    ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError, ModuleNotFoundError, NameError,
    NotImplementedError, RuntimeError, SyntaxError, TypeError, UnboundLocalError, ValueError, ZeroDivisionError,
)  # fmt: skip
_PASSING = re.compile(r"CUDA|cu[A-Z]{3,}|NCCL|gloo|HIP|memory|connection|socket|time(d )?out", re.IGNORECASE)
"""A RuntimeError of torch with such a word may have come from outside of the code."""


def user_path(file: str) -> str | None:
    """Return the path of a source file as its user knows it, None for one that is not theirs."""
    if match := _PACKED.fullmatch(file):
        return match[1]
    if file.startswith(_LIBRARY_FOLDERS) or _LIBRARY.match(file):
        return None
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def place(error: BaseException) -> str:
    """Say where in the user's files an error was raised: "models/mine.py, line 12, in forward"; "" where in none."""
    if isinstance(error, SyntaxError) and error.filename and (path := user_path(error.filename)):
        return f"{path}, line {error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if path := user_path(frame.filename):
            return f"{path}, line {frame.lineno}, in {frame.name}"
    return ""


def is_deterministic(error: BaseException) -> bool:
    """Whether code of the project space would raise this again, given the same: not what a disk or a network may."""
    if type(error) not in _DETERMINISTIC or (type(error) is RuntimeError and _PASSING.search(message_of(error))):
        return False
    return any(_PACKED.fullmatch(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def shortened(error: BaseException) -> str:
    """Format an error with the user's own frames and the one that raised it; all frames where none is the user's."""
    if not place(error):
        return "".join(traceback.format_exception(error))
    told = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    left_out = 0
    part: traceback.TracebackException | None = told
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        left_out += _shorten(part)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    more = f"\n({left_out} frames of libraries are left out: they are in the rank's log)" if left_out else ""
    return "".join(told.format()).rstrip() + more


def _shorten(part: traceback.TracebackException) -> int:
    """Leave out the frames of libraries but the last, and tell files by the user's paths; returns how many."""
    kept = [frame for frame in part.stack if user_path(frame.filename)]
    if part.stack and part.stack[-1] not in kept:
        kept.append(part.stack[-1])
    left_out = len(part.stack) - len(kept)
    for frame in kept:
        frame.filename = user_path(frame.filename) or frame.filename
    part.stack[:] = kept
    if getattr(part, "filename", None):  # of a SyntaxError
        part.filename = user_path(part.filename) or part.filename
    return left_out
