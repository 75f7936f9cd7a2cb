"""Locks a run directory for the one process that writes it, and keeps its summary.json and status.json."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from msgspec.structs import replace

import ddp_hydra
from ddp_hydra.console.text import duration, is_chosen, message_of, printable, traceback_of, typed
from ddp_hydra.errors import ConfigError, DdpHydraError, RankFailed, RecordError, RunFailed
from ddp_hydra.record import Metrics, Record, RolledBack, Start, Text, Up
from ddp_hydra.results import finite
from ddp_hydra.run_state import FailureEntry, Status, Summary, decode, encode
from ddp_hydra.storage.files import passing, replacing, write_atomic
from ddp_hydra.storage.retry import FULL

LOCK = ".lock"
SUMMARY = "summary.json"
_ELSEWHERE = "give another with hydra.run.dir=<folder>"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TAIL_BYTES = 2**16
_LINES_BYTES = 2**20
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
    try:
        return decode(content, Summary, run_dir / SUMMARY)
    except ConfigError as error:
        raise ConfigError(f"{error}; to go on without it, move it away") from None


FIELDS = frozenset(("time", "attempt", "step", "epoch", "samples", "rank"))
"""What a line of metrics.jsonl holds beside metrics."""
_OWN = "metrics/"
"""Comes before the name of a metric that is called as such a field."""


def name_in_line(metric: str) -> str:
    return f"{_OWN}{metric}" if metric in FIELDS else metric


def metric_of_line(name: str) -> str:
    own = name.removeprefix(_OWN)
    return own if own in FIELDS else name


def last_metrics(run_dir: Path, until: int) -> dict[str, float | None]:
    """Return the last value that rank 0 has logged of each metric up to a step, as the end of metrics.jsonl tells.

    A long run has gigabytes of lines, so few before the step are read.
    """
    found: dict[str, float | None] = {}
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        left = _LINES_BYTES
        for content in lines_from_end(file):
            line = json_object(content)
            if isinstance(step := line.get("step"), int) and step > until:
                continue
            for name in () if line.get("rank") else line.keys() - FIELDS:
                if (value := line[name]) is None or isinstance(value, int | float):
                    found.setdefault(metric_of_line(name), value)
            left -= len(content)
            if left < 0:
                break
    return found


def lines_from_end(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    begin, rest = file.seek(0, os.SEEK_END), b""
    while begin:
        end, begin = begin, max(0, begin - _TAIL_BYTES)
        file.seek(begin)
        rest, *lines = (file.read(end - begin) + rest).split(b"\n")
        yield from reversed(lines)
    yield rest


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
    cause = passing(error)
    return cause is not None and cause.errno in FULL


@contextmanager
def summary_written(
    run_dir: Path, summary: Summary, keeps_earlier: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Write summary.json at the end of the block, also when the block fails; not if `keeps_earlier` then says so."""
    begin, failure = time.time(), None
    try:
        yield
    except BaseException as error:
        failure = error
        _add_error(summary, error)
        raise
    finally:
        summary.update({"started": begin, "wall_s": time.time() - begin, "ddp_hydra": ddp_hydra.__version__})
        try:
            if not keeps_earlier():
                write_summary(run_dir, summary)
        except ConfigError as unwritten:
            if failure is None:
                raise
            if not is_full(failure):
                failure.add_note(str(unwritten))


def _add_error(summary: Summary, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        summary.status, summary.interrupted = "interrupted", summary.interrupted or "interrupt"
    elif isinstance(error, RunFailed):  # the run failed on another host; the summary there has the failure
        pass
    elif isinstance(error, RankFailed):
        summary.failure = FailureEntry(**error.failure.as_dict())
    elif isinstance(error, Exception):
        trace = "" if isinstance(error, DdpHydraError) else traceback_of(error)
        summary.failure = FailureEntry(kind=type(error).__name__, message=message_of(error), traceback=trace)


EPOCH = "train_epoch/"
"""The names of means over an epoch begin with it."""


STATUS = "status.json"
INTERVAL_S = 0.5
STOPPED_EARLY = "stopped early"
"""The name of the text in which rank 0 says why the run is done before its last step."""


class JobStatus:
    """Collects from the records of rank 0 what the display and status.json show.

    Attributes:
        now: the fields of status.json; its state is starting, then running; a remote job's driver sets further ones.
            Its metrics are those of the summary when the newest attempt began.
        start: the start record of the newest attempt.
        metrics: the last value of each metric that this attempt has logged.
        epoch_means: "train/loss" and so on as means over the last epoch that has ended.
    """

    def __init__(self, base: Status | None = None) -> None:
        self.now = base or Status()
        self.now.host, self.now.pid, self.now.stopped_early = socket.gethostname(), os.getpid(), ""
        self.start: Record | None = None
        self.metrics: dict[str, float] = {}
        self.epoch_means: dict[str, float] = {}
        self._first: tuple[float, int] = (time.monotonic(), 0)

    def update(self, record: Record) -> bool:
        data, now = record.data, self.now
        if record.rank != 0:
            return False
        if isinstance(data, Text) and data.name == STOPPED_EARLY:
            now.stopped_early = data.text
            return True
        if isinstance(data, Up):  # an attempt of a user's function, which sends no start record
            now.attempt, now.step = record.attempt, None
            now.metrics, self.metrics, self.epoch_means = self.content().metrics, {}, {}
            return True
        if isinstance(data, Start):
            self.start, self.metrics, self.epoch_means = record, {}, {}
            now.attempt, now.step, now.epoch = record.attempt, record.step or 0, None
            now.world_size = data.world_size or now.world_size
            now.total_steps, now.epochs = data.total_steps, data.epochs
            self._first = (time.monotonic(), record.step or 0)
        elif isinstance(data, Metrics):
            now.epoch = self.epoch_of(data)
            if now.epochs is not None and now.epoch is not None and now.epoch > now.epochs:
                now.epochs = None  # a stream has fewer samples than it says, and the run more epochs
            for name, value in data.metrics.items():
                if name.startswith(EPOCH):
                    self.epoch_means[name.replace(EPOCH, "train/", 1)] = value
                else:
                    self.metrics[name] = value
            if record.attempt > now.attempt:
                now.attempt, now.step = record.attempt, 0
            now.step = max(now.step or 0, record.step or 0)  # a number may be logged for an earlier step
        elif isinstance(data, RolledBack):
            now.step = record.step
        else:
            return False
        now.state = "running"
        began, first = self._first
        step, total = now.step or 0, now.total_steps or 0
        now.eta_s = (time.monotonic() - began) / (step - first) * (total - step) if first < step < total else None
        return True

    def content(self) -> Status:
        earlier = self.now.metrics
        means = {name.replace(EPOCH, "train/", 1): earlier[name] for name in earlier if name.startswith(EPOCH)}
        earlier = {name: value for name, value in earlier.items() if not name.startswith(EPOCH)}
        metrics = {**earlier, **finite(self.metrics), **means, **finite(self.epoch_means)}
        return replace(self.now, metrics=metrics)

    def epoch_of(self, logged: Metrics) -> float | None:
        """Return the epoch that metrics belong to, counted from 1; without one, the epoch of the metrics before."""
        return self.now.epoch if logged.epoch is None else logged.epoch

    def mark(self) -> float | None:
        """Return the epoch, or the step if there are no epochs, that a permanent line stands for."""
        return self.now.step if self.now.epoch is None else self.now.epoch

    def where(self) -> str:
        """Return for example 'epoch 3/5  step 120/500'."""
        step = f"step {_of(self.now.step or 0, self.now.total_steps)}"
        return step if self.now.epoch is None else f"{self.epoch_text()}  {step}"

    def epoch_text(self) -> str:
        """Return for example 'epoch 3/5', or the step if there are no epochs."""
        if self.now.epoch is None:
            return self.where()
        return f"epoch {_of(self.now.epoch, self.now.epochs)}"

    def numbers(self, validation: bool = False, epoch: bool = False) -> str:
        return "  ".join(self.shown(validation, epoch))

    def shown(self, validation: bool = False, epoch: bool = False) -> list[str]:
        """Return losses and accuracies, of the last validation or as means over the epoch, and samples/s."""
        metrics = {**self.metrics, **self.epoch_means} if epoch else self.metrics
        show = self.start.data.show if self.start is not None and isinstance(self.start.data, Start) else None
        shown = [
            f"{printable(name)} {value:.4g}"
            for name, value in sorted(metrics.items(), key=_rank_of_name)
            if (validation or not name.startswith("val/"))
            and is_chosen([name], ["train/*", "val/*"] if show is None else show)
        ]
        speed = self.metrics.get("samples_per_s")
        if speed is not None:
            shown.append(f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.3g} samples/s")
        return shown

    def eta(self) -> str:
        """Return for example "ETA 1:32 min", or "" while it is not known."""
        return "" if self.now.eta_s is None else f"ETA {duration(self.now.eta_s)}"


def _rank_of_name(item: tuple[str, float]) -> tuple[bool, bool, str]:
    name = item[0]
    return not name.startswith("train/"), not name.endswith("/loss"), name


def _of(value: float, total: float | None) -> str:
    return f"{value:g}" if total is None else f"{value:g}/{total:g}"


def encode_status(content: Status) -> bytes:
    return encode(replace(content, time=time.time()))


class StatusWriter:
    """Writes status.json into the run directory while the job runs, and removes it at the end.

    `summary.json` then says how the job ended. A write that fails is left out, because no job depends on it. `base` is
    what is known of the job apart from its records; others may change it.
    """

    def __init__(self, run_dir: Path, base: Status | None = None) -> None:
        self._path = run_dir / STATUS
        self._status = JobStatus(base)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None  # writes what has come too soon after the last write
        self._save()
        self._written = -INTERVAL_S

    def write(self, record: Record) -> None:
        with self._lock:
            if not self._status.update(record):
                return
            wait_s = self._written + INTERVAL_S - time.monotonic() if isinstance(record.data, Metrics) else 0.0
            if wait_s <= 0:
                self._save()
            elif self._timer is None:
                timer = threading.Timer(wait_s, self._save_later)
                timer.daemon = True
                with contextlib.suppress(RuntimeError):  # there are no threads any more
                    timer.start()
                    self._timer = timer

    def close(self) -> None:
        with self._lock:
            timer = self._end_timer()
        if timer is not None:
            timer.join()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _save_later(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():  # else it was ended meanwhile
                self._save()

    def _save(self) -> None:
        self._end_timer()
        self._written = time.monotonic()
        with contextlib.suppress(RecordError):
            write_atomic(self._path, encode_status(self._status.content()), durable=False)

    def _end_timer(self) -> threading.Timer | None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return timer
