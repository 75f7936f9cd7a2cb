"""Sends records from a rank: metrics, texts, images and files.

Code on a rank (the loop, a model, a user's own function) calls `log`, `text`, `image`, `histogram`, `submit` and
`checkpoint`. Each call makes one `Record` and sends it as one line of JSON; nothing here knows what reads it. A call
blocks while the reader is behind, so a slow reader slows the rank down instead of filling memory.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast

from ddp_hydra import heartbeat
from ddp_hydra.errors import RecordError
from ddp_hydra.record import (
    AnyData,
    Checkpoint,
    File,
    Histogram,
    Image,
    Metrics,
    Notice,
    Record,
    Text,
    check_path,
    check_submitted,
)
from ddp_hydra.storage import retry
from ddp_hydra.storage.files import NotingFile, cannot_write
from ddp_hydra.storage.manifest import FOLDER, step_name

T = TypeVar("T")
INLINE_BYTES = 32 * 1024
"""Larger data is sent as a file, not as a record, because the scheduler keeps records in memory for a while."""
MAX_FILES = 4
"""Number of files in a rank's outbox at which it waits for the client to fetch one."""


class Sender(Protocol):
    """Carries records away from a rank."""

    def send(self, record: Record) -> None:
        """Send one record; block while the reader is behind."""

    @property
    def outbox(self) -> Path:
        """Return the folder on the rank's host where files wait until the reader fetches them."""


class SocketSender:
    """Sends records to the worker's task by a socket, and files by a folder on this host that the client empties."""

    def __init__(self, control: socket.socket, outbox: Path) -> None:
        self.control = control
        self._outbox = outbox
        self.lock = threading.Lock()

    def send(self, record: Record) -> None:
        """Send one record; blocks while the reader is behind."""
        with self.lock:
            self.control.sendall(record.encode() + b"\n")

    @property
    def outbox(self) -> Path:
        """Return the outbox when there is room in it."""
        before: set[Path] = set()
        while len(files := set(self._outbox.iterdir())) >= MAX_FILES:
            if files != before:
                heartbeat.progress()
            before = files
            time.sleep(0.01)
        return self._outbox


@dataclass
class _Process:
    """Holds what `connect` has set for this process."""

    sender: Sender | None = None
    rank: int = 0
    attempt: int = 0
    retry_s: float = 0.0
    check_names: Callable[[Iterable[str]], None] | None = None
    means: dict[str, tuple[Any, int]] = field(default_factory=dict)
    log_of_callback: Callable[[Mapping[str, Any]], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_process = _Process()


def _begin_fork() -> None:
    # A thread that a fork does not copy may hold these.
    _process.lock = threading.Lock()
    if isinstance(_process.sender, SocketSender):
        _process.sender.lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_fork)


def connect(sender: Sender | None, rank: int = 0, attempt: int = 0, retry_s: float = 0.0) -> None:
    """Send this process's records through `sender`, None if nobody reads them.

    A full disk of the outbox is waited for as long as `retry_s`.
    """
    global _process
    _process = _Process(sender, rank, attempt, retry_s)


def reserve(check_names: Callable[[Iterable[str]], None]) -> None:
    """Let `log` refuse names by `check_names`, and `submit` the run's own files: this process trains a job."""
    _process.check_names = check_names


def emit(data: AnyData, step: int | None = None) -> None:
    """Send one record.

    Raises:
        RecordError: this process is not a rank, or the record has a name, a text or a step that can't be one.
    """
    sender = _sender()
    record = Record(data, _process.rank, None if step is None else _step(step), time.time(), _process.attempt)
    record.check()
    sender.send(record)


def _step(step: Any) -> int:
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        number = step.item() if hasattr(step, "item") else step
        if number == int(number) and 0 <= number < 2**63:
            return int(number)
    raise RecordError(f"step={step!r:.40}: give the number of optimizer steps done, a whole number of at least 0")


def _sender() -> Sender:
    if _process.sender is None:
        raise RecordError(
            "results.* was called outside a rank, where nobody receives records; call it in the function that "
            "dispatch.run or a job runs"
        )
    return _process.sender


def warn(sentence: str) -> None:
    """Send a warning to the user, and write it to this rank's log."""
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201
    emit(Notice(sentence))


def _wait(seconds: float) -> None:
    """Wait for disk space, and report progress, because waiting for a disk is not a hang."""
    heartbeat.progress()
    time.sleep(seconds)


def log(metrics: Mapping[str, Any], step: int, *, epoch: float | None = None, samples: float | None = None) -> None:
    """Log scalars: one line of metrics.jsonl, and one point on each TensorBoard curve.

    Args:
        metrics: name -> number (Python's, numpy's or a tensor of one element), e.g. {"train/loss": 0.3}.
        step: optimizer steps done.
        epoch, samples: other values for the x-axis.

    Raises:
        RecordError: a metric is not a number, or this process is not a rank.
        ConfigError: in a job, a name is one of the run's own metrics.
    """
    if _process.check_names is not None and hasattr(metrics, "items"):
        _process.check_names([name for name, _ in metrics.items()])
    send_metrics(metrics, step, epoch, samples)


def send_metrics(metrics: Mapping[str, Any], step: int, epoch: float | None, samples: float | None) -> dict[str, float]:
    """Send scalars of any name, and return them as numbers; see `log`."""
    numbers = _numbers("log", metrics)
    emit(Metrics(numbers, epoch, samples), step)
    return numbers


def log_mean(*unnamed: Any, **values: Any) -> None:
    """Log numbers from anywhere in a job: a model, a loss, a task, a data set or a callback.

    The metric is `train/<name>` in training and `val/<name>` in a validation: the mean over all calls on all ranks
    since the line before, or over the epoch or validation. Each call counts once. In a callback, it is `<name>`, and
    the value of rank 0 counts, as of `run.log`. Where nothing is trained or evaluated, nothing is logged.

    Args:
        values: name -> number (Python's, numpy's or a tensor of one element); no tensor is waited for.

    Raises:
        RecordError: a tensor has several elements, or a value is not a number, or has no name.
    """
    if unnamed:
        raise RecordError(f"ddp_hydra.log({unnamed[0]!r:.40}): give a name, ddp_hydra.log(name=value) or log(**values)")
    if _process.log_of_callback is not None:
        _process.log_of_callback(values)
        return
    add_means({name: (_scalar(name, value), 1) for name, value in values.items()})


def _scalar(name: str, value: Any) -> Any:
    if hasattr(value, "detach") and value.numel() == 1:
        return value.detach().double().reshape(())
    return _number(name, value)


def add_means(means: Mapping[str, tuple[Any, int]]) -> None:
    """Add sums of logged values, and how many there were."""
    with _process.lock:  # a data set may be read by several threads
        for name, (value, n) in means.items():
            total, before = _process.means.get(name, (0.0, 0))
            _process.means[name] = total + value, before + n


def take_means() -> dict[str, tuple[Any, int]]:
    """Return the sums of logged values, and how many there were, and forget them."""
    with _process.lock:
        found, _process.means = _process.means, {}
    return found


@contextmanager
def in_callback(log: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Let `log_mean` call `log`."""
    _process.log_of_callback = log
    try:
        yield
    finally:
        _process.log_of_callback = None


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise RecordError(
            f"metric {name!r} is {value!r:.80}; give a number: Python's, numpy's or a tensor of one element"
        ) from None


def _numbers(call: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    if not hasattr(metrics, "items"):  # a Series of pandas has them, too
        raise _wrong_type(f"{call}(metrics={metrics!r:.40})", "a dict, {'train/loss': 0.3}", metrics)
    return {name: _number(name, value) for name, value in metrics.items()}


def _wrong_type(call: str, wanted: str, given: Any) -> RecordError:
    return RecordError(f"{call} takes {wanted}, got {type(given).__name__}")


def text(name: str, text: str, step: int | None = None) -> None:
    """Show a text (Markdown) in TensorBoard.

    Args:
        name: TensorBoard's tag.
        text: the Markdown, at most 512 KiB.
        step: optimizer steps done.

    Raises:
        RecordError: it is larger, or no text.
    """
    if not isinstance(text, str):
        raise _wrong_type(f"text({name!r:.80}, …)", "a str", text)
    _check_size("text", name, len(text.encode(errors="replace")))
    emit(Text(name, text), step)


def image(name: str, png: bytes, step: int | None = None) -> None:
    """Show an image in TensorBoard.

    Args:
        name: TensorBoard's tag.
        png: the encoded PNG, at most 512 KiB.
        step: optimizer steps done.

    Raises:
        RecordError: it is larger, or not encoded.
    """
    if not isinstance(png, (bytes, bytearray, memoryview)):
        wanted = "the bytes of a PNG, as image.save(file, 'PNG') of Pillow and figure.savefig(file) of matplotlib write"
        raise _wrong_type(f"image({name!r:.80}, …)", f"{wanted} into io.BytesIO()", png)
    content = bytes(png)
    _check_size("image", name, len(content))
    emit(Image(name, base64.b64encode(content).decode()), step)


def _check_size(kind: str, name: str, size: int) -> None:
    if size > 512 * 1024:
        raise RecordError(f"{kind} {name!r} has {size} bytes; at most 512 KiB fit: submit() it as a file")


def histogram(name: str, edges: Sequence[float], counts: Sequence[float], step: int | None = None) -> None:
    """Show how values are distributed, in TensorBoard.

    Args:
        name: TensorBoard's tag.
        edges: of the bins, in rising order.
        counts: values in each bin, one fewer than edges, at most 1024.
        step: optimizer steps done.

    Raises:
        RecordError: the numbers of edges and counts do not fit together, there are too many, or they are no numbers.
    """
    numbers = []
    for what, values in (("edges", edges), ("counts", counts)):
        try:
            numbers.append([float(value) for value in values])
        except (TypeError, ValueError, RuntimeError):
            raise _wrong_type(f"histogram({name!r:.80}, {what}=…)", "numbers in one dimension", values) from None
    emit(Histogram(name, *numbers), step)


def submit(path: str, data: bytes | str) -> None:
    """Write a file into a folder of the run directory, from any rank.

    Args:
        path: relative to the run directory, e.g. "samples/epoch-3.txt".
        data: its content; str is written as UTF-8.

    Raises:
        RecordError: `path` is not a relative path inside the run directory, or in a job not in a folder of its own.
    """
    if _process.check_names is not None:
        check_submitted(path, _process.rank)
    if not isinstance(data, (str, bytes, bytearray, memoryview)):
        raise _wrong_type(f"submit({path!r}, …)", "bytes or str", data)
    content = data.encode() if isinstance(data, str) else bytes(data)
    emit(file_of(path, content))


def is_first_attempt() -> bool:
    """Return whether the gang of this process has not been started again."""
    return _process.attempt == 0


def outbox() -> Path:
    """Return the folder on this host where files of this process wait until they are fetched."""
    return _sender().outbox


def submit_file(
    path: str,
    write: Callable[[Path], Any],
    step: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Let `write` create a file in the outbox, and send it. The reader deletes it after fetching it.

    If `write` returns a NotingFile by which it has written all, the file is not read again for its sha256.

    Raises:
        RecordError: `path` is not a relative path inside the run directory, or `write` no function.
        DiskFull: the disk of the outbox stayed full.
    """
    if not callable(write):
        raise _wrong_type(f"submit_file({path!r}, …)", "a function that writes the file to a path", write)
    emit(_outbox_file(path, write, checkpoint), step)


def checkpoint(
    state: Mapping[str, Any],
    step: int,
    *,
    metrics: Mapping[str, Any] | None = None,
    epoch: float | None = None,
    samples: int | None = None,
    best: bool = False,
) -> None:
    """Save a checkpoint in checkpoints/ of the run directory: step-000100.pt, last.pt, and an entry in manifest.json.

    Args:
        state: tensors and plain values, e.g. {"model": model.state_dict()}; on the ranks, call it on one of them only.
        step: optimizer steps done.
        metrics: name -> number, for the manifest.
        epoch: epochs done, for the manifest.
        samples: samples seen, for the manifest.
        best: whether best.pt becomes this checkpoint.

    Raises:
        RecordError: `torch.load(..., weights_only=True)` would not read it.
        DiskFull: the disk of the outbox stayed full.
    """
    import torch  # the client imports this module, too, and needs no torch

    if not isinstance(state, Mapping):
        raise _wrong_type(f"checkpoint(…, step={step!r:.20})", "a dict, {'model': model.state_dict()}", state)

    def write(target: Path) -> NotingFile:
        try:
            with target.open("wb") as opened, NotingFile(opened).explained() as file:
                torch.save(dict(state), cast(IO[bytes], file))
            torch.load(target, map_location="cpu", weights_only=True, mmap=True)
            return file
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise RecordError(
                f"the checkpoint of step {step} holds more than tensors, numbers, texts and lists or dicts of them "
                f"({(str(error).splitlines() or [''])[0]}): give the state_dict() of each object"
            ) from None

    numbers = _numbers("checkpoint", {} if metrics is None else metrics)
    submit_file(f"{FOLDER}/{step_name(step)}", write, step, Checkpoint(step, epoch, samples, numbers, best))


def file_of(path: str, content: bytes) -> File:
    """Return a file to be sent: small content within its record, larger content by way of the outbox."""
    if len(content) > INLINE_BYTES:
        return _outbox_file(path, lambda target: target.write_bytes(content))
    digest = hashlib.sha256(content).hexdigest()
    return File(path, len(content), digest, inline=base64.b64encode(content).decode())


def _outbox_file(path: str, write: Callable[[Path], Any], checkpoint: Checkpoint | None = None) -> File:
    check_path(path)
    source = _sender().outbox / f"{threading.get_ident()}-{time.monotonic_ns()}"

    def attempt() -> Any:
        try:
            return write(source)
        except BaseException:
            source.unlink(missing_ok=True)  # nobody would delete it, e.g. after a full disk
            raise

    try:
        written = with_room(attempt)
    except OSError as error:
        if error.errno != errno.EFBIG:  # others may be gone at another attempt
            raise
        raise cannot_write(source, error) from error
    if isinstance(written, NotingFile):
        digest = written.sha256
    else:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    return File(path, source.stat().st_size, digest.hexdigest(), source=str(source), checkpoint=checkpoint)


def with_room(write: Callable[[], T]) -> T:
    """Write into the outbox or into its folder. While the disk is full, wait and try again, and say so.

    `write` leaves nothing behind if it fails. DiskFull: there was no space for it in the time that `connect` was given.
    """
    folder = _sender().outbox
    return retry.retry_while_full(write, lambda: retry.describe_full_folder(folder), _process.retry_s, warn, _wait)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinities by None, because JSON cannot hold them."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
