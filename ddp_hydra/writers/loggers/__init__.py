"""Sends a job's records to tracking services: MLflow, W&B, Aim, ClearML, or a writer of one's own.

    process    gives each record to the logger, and repeats what a service did not take
    services   MLflow, W&B, Aim, ClearML, imported only in the logger's process

`job/loggers.py` starts a process for each logger. These libraries take up to 9 s of CPU and 230 MiB to import, register
six exit handlers or more, start threads and processes, and set `sys.excepthook` (W&B, ClearML) or signal handlers
(ClearML). One that blocks can be ended with its process; a thread cannot.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from ddp_hydra.record import Checkpoint, File, Image, Metrics, Record, Text

FINISHED, FAILED, KILLED = "finished", "failed", "killed"
"""How a run ends; killed: it was interrupted, or its command was killed."""
PROJECT = "ddp_hydra"
"""The project, or experiment, at the service if none is given."""


@dataclass(frozen=True)
class RunInfo:
    """Describes a job to a logger.

    Args:
        name: of the run, after its run directory: "2026-08-01/12-00-00-123456".
        run_dir: the run directory, where a logger may keep files in a folder of its own.
        tags: the config's `tags`.
        sweep: name of the sweep that the job belongs to; "" for none.
        params: the config without the cluster and without secrets, flattened: {"optimizer.lr": 0.1}.
        earlier: id at the service of the run that this job continues; "" for a new run.
    """

    name: str
    run_dir: Path
    tags: list[str] = field(default_factory=list)
    sweep: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    earlier: str = ""

    @property
    def labels(self) -> list[str]:
        """The tags of a run at a service that has no sweeps: the sweep is one of them."""
        return [*self.tags, *([f"sweep {self.sweep}"] if self.sweep else [])]


@dataclass(frozen=True)
class ServiceRun:
    """Identifies a run at its service.

    Args:
        id: by which a resumed job continues it.
        url: where to look at it, without credentials; "" if there is no page.
        note: a sentence for the user.
    """

    id: str
    url: str = ""
    note: str = ""


@dataclass(frozen=True)
class Order:
    """What a logger's process begins with: the logger's config, its job, layers of the project space if it is in it.

    It may go on for `timeout_s` after the job's process has died.
    """

    node: Mapping[str, Any]
    job: RunInfo
    roots: tuple[Path, ...]
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """What a logger's process tells the job's process.

    Args:
        kind: "run", it has begun; "away", the service does not answer; "back", it does again; "warning", a record was
            refused; "error", it gets no records.
        message: why.
        advice: what to type.
        run: with "run".
    """

    kind: str
    message: str = ""
    advice: str = ""
    run: ServiceRun | None = None


class Refusal(Exception):
    """The service, or the logger's settings, refuse what was sent: to repeat it is no use."""


@dataclass(eq=False, repr=False)
class Logger:
    """Sends records to one service. An error of a method is repeated until it succeeds, unless it is `Refusal`.

    Args:
        checkpoints: which checkpoints are uploaded: None, "best" or "all".
    """

    advice: ClassVar[str] = "look at its log"
    """What to type if the service does not answer."""

    checkpoints: str | None = None
    run_dir: Path = field(init=False, default=Path())
    uploaded: tuple[int, int, Path] | None = field(init=False, default=None)

    def begin(self, job: RunInfo) -> ServiceRun:
        """Open the run at the service, or continue the earlier one."""
        raise NotImplementedError

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Take the metrics of a step; without requests, which belong to `flush`. Values may be NaN or infinite."""

    def flush(self) -> None:
        """Send what `metrics` has collected. It is called about once a second."""

    def text(self, name: str, text: str, step: int) -> None:
        """Show a text."""

    def image(self, name: str, png: bytes, step: int) -> None:
        """Show an image."""

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        """Upload a checkpoint, a file or a folder."""

    def end(self, status: str) -> None:
        """Close the run; `status` is `FINISHED`, `FAILED` or `KILLED`."""

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error of a method is as a `Refusal`."""
        return False

    def write(self, record: Record) -> None:
        step = record.step or 0
        match record.data:
            case Metrics(metrics, epoch, samples) if record.rank == 0:
                context = {"epoch": epoch, "samples": samples}
                self.metrics(metrics | {name: float(x) for name, x in context.items() if x is not None}, record)
            case Text(name, text):
                self.text(name, text, step)
            case Image(name, png):
                self.image(name, base64.b64decode(png), step)
            case File(path, checkpoint=Checkpoint() as saved):
                # The run directory keeps only the newest: one that is gone had its turn too late. One of several parts
                # gets its name with the last of them.
                found = self.run_dir.joinpath(*PurePosixPath(path).parts[:2])
                is_wanted = self.checkpoints == "all" or (self.checkpoints == "best" and saved.best)
                if is_wanted and found.exists() and self.uploaded != (record.attempt, saved.number, found):
                    self.uploaded = (record.attempt, saved.number, found)
                    self.checkpoint(found, step or saved.step, saved.best)


def picture(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))
