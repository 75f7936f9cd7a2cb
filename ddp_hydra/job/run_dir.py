"""A run directory belongs to one run, and one process at a time writes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.storage.manifest import FOLDER, newest_first, read_manifest

LOCK = ".lock"
SUMMARY = "summary.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TAIL_BYTES = 2**16


class RunDirCallback(Callback):
    """Refuses a run directory before Hydra writes its `.hydra` there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Look whether a job may have its run directory."""
        run_dir = Path(str(config.hydra.run.dir))
        # Hydra writes nothing for torchrun's other ranks, whose folder is the one that all were typed in.
        if config.get("dry_run") or config.hydra.output_subdir is None or not run_dir.is_dir():
            return
        try:
            with locked(run_dir):
                refuse_another(run_dir, config.get("resume"))
        except ConfigError as error:  # Hydra makes a warning of any exception, and goes on
            raise SystemExit(f"ddp_hydra: {error}") from None


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes from writing a run directory inside the block; one that dies lets go of it.

    A disk that knows no locks is used without.

    Args:
        run_dir: made if it is missing.

    Raises:
        ConfigError: somebody writes it, or nobody can.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = _open_locked(run_dir / LOCK)
    except BlockingIOError:
        raise ConfigError(
            f"{run_dir} is being written by {_holder(run_dir / LOCK)}: give another folder with "
            f"hydra.run.dir=<folder>, or, once that has ended, go on with resume={run_dir}"
        ) from None
    except OSError as error:
        raise cannot_be_written(run_dir, error) from error
    try:
        with contextlib.suppress(OSError):  # a full disk; it is for a message only
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (run_dir / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _open_locked(path: Path) -> int:
    """Return a descriptor that holds the lock. Whoever had it takes the file away, perhaps after we opened it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with _tolerated():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    os.ftruncate(handle, 0)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def _tolerated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "another process"
    except OSError:
        return "another process"


def refuse_another(run_dir: Path, resume: str | None) -> None:
    """Keep two runs from getting into one folder. One that has saved nothing may begin again in its own.

    Args:
        run_dir: of the run that is to begin.
        resume: what it goes on from.

    Raises:
        ConfigError: another run lies there.
    """
    there = sorted((run_dir / FOLDER).glob("*.pt"))
    done = read_summary(run_dir).get("status") == "done"
    if (there or done) and not is_resumed(run_dir, resume):
        raise ConfigError(
            f"{run_dir} holds another run, and its results would be mixed with this one's: give another folder with "
            f"hydra.run.dir=<folder>, or go on with that run by resume={run_dir}"
        )


def is_resumed(run_dir: Path, resume: str | None) -> bool:
    """Whether a run goes on with what lies in its own run directory."""
    if not resume or "://" in resume:
        return False
    given, own = Path(resume).resolve(), run_dir.resolve()
    return given == own or own in given.parents


def next_attempt(run_dir: Path) -> int:
    """Return the number of the first attempt to come: they go on where those of an earlier process ended."""
    known = [entry.get("attempt") for entry in read_summary(run_dir).get("attempts") or () if isinstance(entry, dict)]
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                known.append(json.loads(line).get("attempt"))
    return max((number for number in known if isinstance(number, int)), default=-1) + 1


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return what summary.json says; nothing where there is none."""
    try:
        found = json.loads((run_dir / SUMMARY).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = run_dir / f".{SUMMARY}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(summary, indent=2, allow_nan=False, default=str) + "\n")
        draft.replace(run_dir / SUMMARY)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise cannot_be_written(run_dir, error) from error


def cannot_be_written(run_dir: Path, error: OSError) -> ConfigError:
    """Return a sentence with what to type."""
    advice = "free some space there" if is_full(error) else "give another with hydra.run.dir=<folder>"
    return ConfigError(f"the run directory {run_dir} can't be written ({error.strerror}): {advice}")


def is_full(error: BaseException) -> bool:
    """Whether it was a full disk that kept a file from being written."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def saved_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint, None where there is none."""
    try:
        entries = read_manifest(run_dir / FOLDER)
    except CheckpointError:
        return None
    return next((int(entries[name].get("step") or 0) for name in newest_first(entries)), None)


def once_there_is_room(run_dir: Path, where: str) -> str:
    """Say what is safe, how full the disk is, and what to type.

    Args:
        run_dir: on the full disk.
        where: the run's results are, as its user would type it.
    """
    step = saved_step(run_dir)
    saved = "nothing was saved before" if step is None else f"step {step} is saved"
    again = "start it again" if step is None else f"go on with resume={where}"
    free = shutil.disk_usage(run_dir).free
    return f"{saved}; {free:,} bytes are free in {run_dir}: free some space there, then {again}"
