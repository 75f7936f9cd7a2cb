"""Logs a job as a run of Weights & Biases."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hydra.record import Record
from ddp_hydra.writers.loggers.base import FINISHED, PROJECT, Logger, Refusal, RunInfo, ServiceRun, picture

STEP = "trainer/global_step"
"""The x-axis. W&B's own step may never go back, but a restarted job's step does."""


@dataclass(eq=False, repr=False)
class WandbLogger(Logger):
    """Logs to W&B, or offline into the run directory. The sweep of a job is its W&B group.

    Args:
        project: None: WANDB_PROJECT, else "ddp_hydra".
        entity: None: WANDB_ENTITY, else the user's own.
        run_name: None: WANDB_NAME, else the name of the run directory.
        group: None: the sweep, else WANDB_RUN_GROUP.
        mode: "online", "offline" or None: WANDB_MODE.
        tags: further tags of the run.
        checkpoints: see `Logger`.
    """

    advice = "Type `wandb login`, or set WANDB_MODE=offline, or leave it out with results.loggers=[]"

    project: str | None = None
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()
    run: Any = field(init=False, default=None)

    def begin(self, job: RunInfo) -> ServiceRun:
        """Open the run; W&B's own process keeps its records on the disk and sends them."""
        import wandb

        settings: dict[str, Any] = {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": True,
        }
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = 30
        try:
            self.run = self._init(job, settings, self.mode)
            note = f"send it with: wandb sync {self._folder()}" if self.run.offline else ""
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise Refusal(str(error)) from error
        except wandb.errors.CommError:
            self.run = self._init(job, settings, "offline")
            note = f"the service does not answer, so the run is kept here; send it with: wandb sync {self._folder()}"
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)
        return ServiceRun(self.run.id, "" if self.run.offline else self.run.url or "", note)

    def _folder(self) -> str:
        return str(Path(self.run.dir).parent)

    def _init(self, job: RunInfo, settings: dict[str, Any], mode: Any) -> Any:
        import wandb

        return wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=self.entity,
            name=self.run_name or os.environ.get("WANDB_NAME") or job.name,
            group=self.group or job.sweep or None,
            tags=[*(self.tags or ()), *job.tags] or None,
            config=dict(job.params),
            allow_val_change=True,
            dir=str(job.run_dir),
            id=job.earlier or None,
            resume="allow",
            mode=mode,
            settings=wandb.Settings(**settings),
        )

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Log the metrics of a step; W&B takes NaN and infinity."""
        self.run.log({**values, STEP: record.step or 0})

    def text(self, name: str, text: str, step: int) -> None:
        import wandb

        page = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self.run.log({name: page, STEP: step})

    def image(self, name: str, png: bytes, step: int) -> None:
        import wandb

        self.run.log({name: wandb.Image(picture(png)), STEP: step})

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        import wandb

        artifact = wandb.Artifact(f"checkpoints-{self.run.id}", type="model", metadata={"step": step})
        artifact.add_file(str(path), name=path.name)
        self.run.log_artifact(artifact, aliases=["latest", f"step-{step}", *(["best"] if is_best else [])])

    def end(self, status: str) -> None:
        """End the run; W&B knows finished and failed runs."""
        self.run.summary["ddp_hydra/status"] = status
        self.run.finish(exit_code=0 if status == FINISHED else 1)
