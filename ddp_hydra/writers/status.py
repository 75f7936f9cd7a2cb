"""Follows the progress of a running job, and keeps status.json up to date, which shows it to other processes."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ddp_hydra import run_state
from ddp_hydra.console.text import duration, is_chosen, printable
from ddp_hydra.errors import RecordError
from ddp_hydra.record import Metrics, Record, Start, Text
from ddp_hydra.results import finite
from ddp_hydra.run_state import Status
from ddp_hydra.storage.files import write_atomic

EPOCH = "train_epoch/"
"""The names of means over an epoch begin with it."""


NAME = "status.json"
INTERVAL_S = 0.5
STOPPED_EARLY = "stopped early"
"""The name of the text in which rank 0 says why the run is done before its last step."""


class JobStatus:
    """Collects from the records of rank 0 what the display and status.json show.

    Args:
        clock: a monotonic clock, in seconds.
        base: what is known of the job before it begins.

    Attributes:
        now: the fields of status.json; its state is starting, then running; a remote job's driver sets further ones.
        start: the start record of the newest attempt.
        metrics: the last value of each metric.
        epoch_means: "train/loss" and so on as means over the last epoch that has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, base: Status | None = None) -> None:
        self._clock = clock
        self.now = base or Status()
        self.now.host, self.now.pid, self.now.stopped_early = socket.gethostname(), os.getpid(), ""
        self.start: Record | None = None
        self.metrics: dict[str, float] = {}
        self.epoch_means: dict[str, float] = {}
        self._first: tuple[float, int] = (clock(), 0)

    def update(self, record: Record) -> bool:
        data, now = record.data, self.now
        if record.rank != 0:
            return False
        if isinstance(data, Text) and data.name == STOPPED_EARLY:
            now.stopped_early = data.text
            return True
        if isinstance(data, Start):
            self.start, self.metrics, self.epoch_means = record, {}, {}
            now.attempt, now.world_size, now.step, now.epoch = record.attempt, data.world_size, None, None
            now.total_steps, now.epochs = data.total_steps, data.epochs
            self._first = (self._clock(), record.step or 0)
        elif isinstance(data, Metrics):
            now.epoch = self.epoch_of(data)
            if now.epochs is not None and now.epoch is not None and now.epoch > now.epochs:
                now.epochs = None  # a stream has fewer samples than it says, and the run more epochs
            for name, value in data.metrics.items():
                if name.startswith(EPOCH):
                    self.epoch_means[name.replace(EPOCH, "train/", 1)] = value
                else:
                    self.metrics[name] = value
            now.step = record.step if record.step is not None else now.step or 0
        else:
            return False
        now.state = "running"
        began, first = self._first
        step, total = now.step or 0, now.total_steps or 0
        now.eta_s = (self._clock() - began) / (step - first) * (total - step) if first < step < total else None
        return True

    def content(self) -> Status:
        return replace(self.now, metrics=finite({**self.metrics, **self.epoch_means}))

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
        return "  ".join(shown)

    def eta(self) -> str:
        """Return for example "ETA 1:32 min", or "" while it is not known."""
        return "" if self.now.eta_s is None else f"ETA {duration(self.now.eta_s)}"


def _rank_of_name(item: tuple[str, float]) -> tuple[bool, bool, str]:
    name = item[0]
    return not name.startswith("train/"), not name.endswith("/loss"), name


def _of(value: float, total: float | None) -> str:
    return f"{value:g}" if total is None else f"{value:g}/{total:g}"


def encode(content: Status) -> bytes:
    return run_state.encode(replace(content, time=time.time()))


class StatusWriter:
    """Writes status.json into the run directory while the job runs, and removes it at the end.

    `summary.json` then says how the job ended. A write that fails is left out, because no job depends on it.

    Args:
        run_dir: the job's run directory.
        clock: a monotonic clock, in seconds.
        base: what is known of the job apart from its records; others may change it.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic, base: Status | None = None) -> None:
        self._path = run_dir / NAME
        self._clock = clock
        self._status = JobStatus(clock, base)
        self._written = -INTERVAL_S
        self._save()

    def write(self, record: Record) -> None:
        if not self._status.update(record):
            return
        if not isinstance(record.data, Metrics) or self._clock() - self._written >= INTERVAL_S:
            self._written = self._clock()
            self._save()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        with contextlib.suppress(RecordError):
            write_atomic(self._path, encode(self._status.content()), durable=False)
