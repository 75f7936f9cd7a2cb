"""Keep a run directory for one run, written by one process at a time."""

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
    """Refuse a run directory that holds another run, before Hydra writes its `.hydra` there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Check that the job may use its run directory."""
        run_dir = Path(str(config.hydra.run.dir))
        # torchrun's other ranks write no `.hydra`; their run directory is the one of rank 0.
        if config.get("dry_run") or config.hydra.output_subdir is None or not run_dir.is_dir():
            return
        try:
            with locked(run_dir):
                refuse_other_run(run_dir, config.get("resume"))
        except ConfigError as error:  # Hydra turns exceptions of callbacks into warnings
            raise SystemExit(f"ddp_hydra: {error}") from None


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes from writing a run directory inside the block.

    The lock ends with the process that holds it. A file system without locks is used without one.

    Args:
        run_dir: made if it is missing.

    Raises:
        ConfigError: another process writes it, or it cannot be written.
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
        with contextlib.suppress(OSError):  # the text is for a message only, so a full disk does not matter
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (run_dir / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _open_locked(path: Path) -> int:
    """Return a descriptor that holds the lock.

    A process that releases the lock removes the file, possibly after we opened it: then open the new one.
    """
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


def refuse_other_run(run_dir: Path, resume: str | None) -> None:
    """Refuse a run directory that holds the results of another run.

    A run that ended before it saved a checkpoint may start again in its folder.

    Args:
        run_dir: of the run that starts.
        resume: the run or checkpoint that it resumes, if any.

    Raises:
        ConfigError: there is another run.
    """
    checkpoints = sorted((run_dir / FOLDER).glob("*.pt"))
    is_done = read_summary(run_dir).get("status") == "done"
    if (checkpoints or is_done) and not is_resumed(run_dir, resume):
        raise ConfigError(
            f"{run_dir} holds another run, and its results would be mixed with this one's: give another folder with "
            f"hydra.run.dir=<folder>, or go on with that run by resume={run_dir}"
        )


def is_resumed(run_dir: Path, resume: str | None) -> bool:
    """Return whether a run resumes from its own run directory."""
    if not resume or "://" in resume:
        return False
    given, own = Path(resume).resolve(), run_dir.resolve()
    return given == own or own in given.parents


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next attempt, counted on from those of earlier processes in this run directory."""
    known = [entry.get("attempt") for entry in read_summary(run_dir).get("attempts") or () if isinstance(entry, dict)]
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                known.append(json.loads(line).get("attempt"))
    return max((number for number in known if isinstance(number, int)), default=-1) + 1


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of summary.json; {} if there is none or it is no JSON object."""
    try:
        found = json.loads((run_dir / SUMMARY).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json atomically.

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
    """Return the error for a run directory that cannot be written, with what to type."""
    advice = "free some space there" if is_full(error) else "give another with hydra.run.dir=<folder>"
    return ConfigError(f"the run directory {run_dir} can't be written ({error.strerror}): {advice}")


def is_full(error: BaseException) -> bool:
    """Return whether a full disk is the cause of an error."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def saved_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint, None if there is none."""
    try:
        entries = read_manifest(run_dir / FOLDER)
    except CheckpointError:
        return None
    return next((int(entries[name].get("step") or 0) for name in newest_first(entries)), None)


def full_disk_advice(run_dir: Path, shown_dir: str) -> str:
    """Return which step is saved, how much space is free, and what to type.

    Args:
        run_dir: on the full disk.
        shown_dir: the run directory or its URL, as the user would type it.
    """
    step = saved_step(run_dir)
    saved = "nothing was saved before" if step is None else f"step {step} is saved"
    again = "start it again" if step is None else f"go on with resume={shown_dir}"
    free = shutil.disk_usage(run_dir).free
    return f"{saved}; {free:,} bytes are free in {run_dir}: free some space there, then {again}"
