"""Locks a run directory for the one process that writes it, and keeps its summary.json."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hydra.console.text import message_of, traceback_of, typed
from ddp_hydra.errors import ConfigError, DdpHydraError, RankFailed, RunFailed
from ddp_hydra.run_state import FailureEntry, Summary, decode, encode
from ddp_hydra.storage.files import replacing

LOCK = ".lock"
SUMMARY = "summary.json"
_ELSEWHERE = "give another with hydra.run.dir=<folder>"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TAIL_BYTES = 2**16
_LOOKS = 5
_LOOK_S = 0.02
"""How often a lock is tried, and the seconds between: `is_locked` holds it for an instant."""


@contextmanager
def locked(run_dir: Path, instead: str = "") -> Iterator[None]:
    """Keep other processes from writing a run directory inside the block.

    The lock ends with the process that holds it. A file system without locks is used without one. `instead`: what to
    type if another process writes it; "": the keys of a job.
    """
    elsewhere = "choose a folder that you may write" if instead else _ELSEWHERE
    instead = instead or (
        "give another folder with hydra.run.dir=<folder>, or, once that has ended, go on with "
        + typed("resume", run_dir)
    )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = _open_locked(run_dir / LOCK)
    except BlockingIOError:
        raise ConfigError(f"{run_dir} is being written by {_holder(run_dir / LOCK)}: {instead}") from None
    except OSError as error:
        raise cannot_be_written(run_dir, error, elsewhere) from error
    try:
        with contextlib.suppress(OSError):  # the text is for a message only, so a full disk does not matter
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (run_dir / LOCK).unlink(missing_ok=True)
        os.close(handle)


def is_locked(run_dir: Path) -> bool | None:
    """Return whether a process writes a run directory; None if its file system can't tell."""
    return is_held(run_dir / LOCK)


def is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file or folder, which is not a link; None if that can't be told."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def _open_locked(path: Path) -> int:
    """Return a descriptor that holds the lock.

    A process that releases the lock removes the file, possibly after we opened it: then open the new one.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _lock(handle)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    os.ftruncate(handle, 0)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int) -> None:
    for look in range(_LOOKS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if look == _LOOKS - 1:
                raise
            time.sleep(_LOOK_S)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            raise


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "another process"
    except OSError:
        return "another process"


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next attempt, counted on from earlier processes in this run directory."""
    summary = read_summary(run_dir) or Summary(status="failed")
    known: list[Any] = [entry.attempt for entry in summary.attempts]
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        known += [json_object(line).get("attempt") for line in file.read().splitlines()]
    return max((number for number in known if isinstance(number, int)), default=-1) + 1


def read_summary(run_dir: Path) -> Summary | None:
    try:
        content = (run_dir / SUMMARY).read_bytes()
    except OSError:
        return None
    return decode(content, Summary, run_dir / SUMMARY)


def json_object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_summary(run_dir: Path, summary: Summary) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with replacing(run_dir / SUMMARY) as part:
            part.write_bytes(encode(summary, indent=2))
    except OSError as error:
        raise cannot_be_written(run_dir, error) from error


def cannot_be_written(run_dir: Path, error: OSError, elsewhere: str = _ELSEWHERE) -> ConfigError:
    advice = "free some space there" if is_full(error) else elsewhere
    return ConfigError(f"the folder {run_dir} can't be written ({error.strerror}): {advice}")


def is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def add_error(summary: Summary, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        summary.status = "interrupted"
    elif isinstance(error, RunFailed):  # the run failed on another host; the summary there has the failure
        pass
    elif isinstance(error, RankFailed):
        summary.failure = FailureEntry(**error.failure.as_dict())
    elif isinstance(error, Exception):
        trace = "" if isinstance(error, DdpHydraError) else traceback_of(error)
        summary.failure = FailureEntry(kind=type(error).__name__, message=message_of(error), traceback=trace)
