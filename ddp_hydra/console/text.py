"""Writes texts for a terminal: ranks' texts and errors made safe, numbers with their nouns, and durations.

Errors are shown with the user's own files, by the paths that the user knows, instead of the paths of libraries.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import shlex
import socket
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

MESSAGE_CHARS = 4_000
TRACE_CHARS = 32_000
"""Longest message and traceback of an error."""

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # operating system commands: titles, links, the clipboard
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # colors, cursor moves
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_CONTROLS_OF_OUTPUT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str, is_output: bool = False) -> str:
    """Drop escape sequences and control characters, but tabs, newlines, and in output what begins a line again."""
    return (_CONTROLS_OF_OUTPUT if is_output else _CONTROLS).sub("", _ESCAPES.sub("", text))


def encodable(text: str) -> str:
    r"""Return a text with `\udce9` for such a byte of a file name that is not UTF-8: no file and no record takes it."""
    return text.encode(errors="backslashreplace").decode()


def one_line(text: str, most: int = 0) -> str:
    """Return a text as one line that does nothing in a terminal, of `most` letters if that is not 0."""
    line = " ".join(printable(text).split())
    return f"{line[: most - 1]}…" if most and len(line) > most else line


def shorten(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out here …\n{text[-half:]}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0-3, 7" for {0, 1, 2, 3, 7}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def message_of(error: object) -> str:
    try:
        return shorten(str(error), MESSAGE_CHARS)
    except Exception as failed:
        return f"(its message is not available: {type(error).__name__}.__str__ raised {type(failed).__name__})"


def traceback_of(error: BaseException) -> str:
    return shorten("".join(traceback.format_exception(error)), TRACE_CHARS)


def counted(number: float, noun: str) -> str:
    """Return for example "1 thread" or "1,442 samples"."""
    if round(number) == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,.0f} {noun[:-1]}ies"
    return f"{number:,.0f} {noun}{'es' if noun.endswith(('tch', 'nch', 'ss')) else 's'}"


def size_text(count: float) -> str:
    """Return for example "12.3 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def listed(names: str | Iterable[str] | None) -> list[str]:
    """Return names, of which one may be given as a text; [] for None."""
    return [names] if isinstance(names, str) else list(names or ())


def is_chosen(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether the last pattern that fits one of the names is without "!"."""
    chosen = False
    for pattern in patterns:
        if any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            chosen = not pattern.startswith("!")
    return chosen


def duration(seconds: float | None) -> str:
    """Return for example "12.3 s", "4:05 min" or "3:04:05 h"; "" where it is unknown or no length of time."""
    if seconds is None or not 0 <= seconds < math.inf:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def unknown(key: str, known: Iterable[str], more: str = "") -> str:
    group, _, name = key.rpartition(".")
    names = [one for one in known if not one.startswith("_") and one != "hydra"]
    there = f"the keys{f' of {group}' if group else ''} are {', '.join(names)}" if names else f"{group} has none"
    return f"{key}: there is no such key{after(meant(name, names, f'{group}.' if group else ''), there)}{more}"


def after(hint: str, said: str) -> str:
    """Return a sentence after a hint that ends with a question mark, or after a semicolon if there is no hint."""
    return f"{hint} {said[0].upper()}{said[1:]}" if hint else f"; {said}"


def meant(word: str, words: Iterable[str], prefix: str = "", cutoff: float = 0.7) -> str:
    """Return ": did you mean …?" if a word is a misspelling or the initials of one of `words`, or the reverse."""
    names = list(words)
    short = [name for name in names if name == _initials(word) or _initials(name) == word]
    near = difflib.get_close_matches(word, names, 1, cutoff) or (short if len(word) > 1 else [])
    return f": did you mean {prefix}{near[0]}?" if near else ""


def _initials(name: str) -> str:
    return "".join(part[0] for part in name.split("_") if part)


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder for its `~`; `~name` stays where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path raises then)


def meant_path(path: str | Path) -> str:
    """Return ": did you mean …?" if the first missing part of a path is a misspelt name in its folder."""
    given = expanded(path)
    there = next((folder for folder in given.parents if folder.is_dir()), Path())
    first, *rest = given.relative_to(there).parts or ("",)
    try:
        names = [entry.name for entry in there.iterdir() if entry.name != first]  # that is a link to nothing
    except OSError:
        return ""
    found = difflib.get_close_matches(first, names, 1, 0.7)
    return f": did you mean {there.joinpath(found[0], *rest)}?" if found else ""


_PACKED = re.compile(r".*[/\\]project-[0-9a-f]{16}[/\\](.*)")
"""Matches a file of a project space that was unpacked on a worker; see `project.Project.unpack`."""
_STARTER = re.compile(r".*[/\\](ddp_hydra[/\\]starter[/\\].*)")
"""Matches a file of the starter that is installed with the package."""
_LIBRARY = re.compile(r"<|.*[/\\](site|dist)-packages[/\\]")
_OF_HYDRA = re.compile(r".*[/\\](site|dist)-packages[/\\](hydra|omegaconf)[/\\]")
_LIBRARY_FOLDERS = (sysconfig.get_path("stdlib") + os.sep, str(Path(__file__).parents[1]) + os.sep)
_DETERMINISTIC = (
    ArithmeticError, AssertionError, AttributeError, FileNotFoundError, ImportError, IndexError, IsADirectoryError,
    KeyError, ModuleNotFoundError, NameError, NotADirectoryError, NotImplementedError, RecursionError, RuntimeError,
    SyntaxError, TypeError, UnboundLocalError, ValueError, ZeroDivisionError,
)  # fmt: skip
_OF_THE_HOST = re.compile(r"thread|process|worker|mmap|shared|file|disk|resource", re.IGNORECASE)
"""The same for one that no code of the project has raised."""
_PASSING = {
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "EINTR", "EIO", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ENOSPC", "EDQUOT", "ESTALE",
        "EADDRINUSE", "EADDRNOTAVAIL", "ECOMM", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH",
        "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EPIPE", "ETIMEDOUT", "ENOLCK", "ENOLINK", "ENOTCONN", "EPROTO",
        "EREMOTEIO",
    )
    if hasattr(errno, name)
}  # fmt: skip
"""Numbers of errors of a disk, a host or a network that may be gone the next time."""
_TEMPORARY = re.compile(r"CUDA|cu[A-Z]{3,}|NCCL|gloo|HIP|memory|connection|socket|time(d )?out", re.IGNORECASE)
"""Matches a RuntimeError of torch that may come from outside of the project's code."""


def typed(key: str, value: str | Path) -> str:
    """Return "key=value" as it can be pasted into a shell for Hydra, whatever is in the value."""
    word = f"{key}={quoted(str(value))}"
    return word if word == f"{key}={value}" else shlex.quote(word)


def quoted(value: str) -> str:
    """Quote a value for Hydra, where a shell or Hydra would take something in it for more than a character."""
    if re.fullmatch(r"[\w./:@%+-]+", value, re.ASCII):
        return value
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(value.replace("${", r"\${"), Quote.double).with_quotes()


def user_path(file: str) -> str | None:
    if match := _PACKED.fullmatch(file) or _STARTER.fullmatch(file):
        return match[1]
    if file.startswith(_LIBRARY_FOLDERS) or _LIBRARY.match(file):
        return None
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def user_location(error: BaseException) -> str:
    """Return where in the user's files an error was raised: "models/mine.py, line 12, in forward"; "" if in none."""
    if isinstance(error, SyntaxError) and error.filename and (path := user_path(error.filename)):
        return f"{path}, line {error.lineno}"
    frame = user_frame(error)
    return f"{user_path(frame.filename)}, line {frame.lineno}, in {frame.name}" if frame else ""


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if user_path(frame.filename)), None)


def is_ours(error: BaseException) -> bool:
    """Return whether code of ddp_hydra or of Hydra has raised an error, or has called what raised it in Python."""
    stdlib, package = _LIBRARY_FOLDERS
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.filename[0] != "<"]
    last = next((file for file in reversed(files) if _LIBRARY.match(file) or not file.startswith(stdlib)), "")
    return last.startswith(package) or bool(_OF_HYDRA.match(last))


def raised_at(error: BaseException) -> str:
    """Return place, type, message and source line of an error in the user's files; "" if no frame is in one."""
    if (frame := user_frame(error)) is None:
        return ""
    source = f"\n    {frame.line.strip()}" if frame.line else ""
    return f"{user_location(error)}: {type(error).__name__}: {message_of(error)}{source}"


def is_deterministic(error: BaseException) -> bool:
    """Tell whether the same code would raise this again with the same data, unlike an error of a disk or a network."""
    if type(error) is not RuntimeError:
        return type(error) in _DETERMINISTIC
    is_projects = any(_PACKED.fullmatch(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    message = message_of(error)
    return not _TEMPORARY.search(message) and (is_projects or not _OF_THE_HOST.search(message))


def may_pass(error: BaseException) -> bool:
    """Tell whether an OSError is one of a network or a disk, or was raised because of one, as those of requests."""
    cause: BaseException | None = error if isinstance(error, OSError) else None
    while cause is not None:
        if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def shortened(error: BaseException, others: str = "they are in the rank's log") -> str:
    """Format an error with the user's own frames and the one that raised it; with the last two if none is theirs."""
    formatted = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    left_out = 0
    part: traceback.TracebackException | None = formatted
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        left_out += _shorten(part)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    more = f"\n({left_out} frames of libraries are left out: {others})" if left_out else ""
    return "".join(formatted.format()).rstrip() + more


def _shorten(part: traceback.TracebackException) -> int:
    """Remove the frames of libraries except the last, and show the user's paths; return how many were removed."""
    kept = [frame for frame in part.stack if user_path(frame.filename)] or list(part.stack[-2:])
    if part.stack and part.stack[-1] not in kept:
        kept.append(part.stack[-1])
    left_out = len(part.stack) - len(kept)
    for frame in kept:
        frame.filename = user_path(frame.filename) or frame.filename
    part.stack[:] = kept
    if getattr(part, "filename", None):  # a SyntaxError has one
        part.filename = user_path(part.filename) or part.filename
    return left_out
