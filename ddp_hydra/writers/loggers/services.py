"""Logs a job to a tracking service: MLflow, Weights & Biases, Aim, ClearML; each is imported where it is used."""

from __future__ import annotations

import hashlib
import html
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hydra.record import Record
from ddp_hydra.storage.files import flocked, user_cache
from ddp_hydra.writers.loggers import FAILED, FINISHED, PROJECT, Logger, Refusal, RunInfo, ServiceRun, picture

MAX_METRICS, MAX_PARAMS, MAX_KEY = 1000, 100, 250
"""MLflow's limits for one request, and for a name."""
SQLITE = "sqlite:///"
TEMPORARY = {
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED",
    "TEMPORARILY_UNAVAILABLE",
}  # fmt: skip


@dataclass(eq=False, repr=False)
class MlflowLogger(Logger):
    """Logs to an MLflow server, or to a local store of MLflow.

    The sweep of a job is the tag `sweep`, by which MLflow's page groups runs.
    """

    advice = "Start its server, or give results.mlflow.tracking_uri=<address or sqlite:///file>, or results.loggers=[]"

    tracking_uri: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    tags: Mapping[str, str] | None = None
    id: str = field(init=False, default="")
    client: Any = field(init=False, default=None)
    _metrics: list[Any] = field(init=False, default_factory=list)

    def begin(self, job: RunInfo) -> ServiceRun:
        # MLflow itself would try for minutes before it says anything; what fails is repeated here.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.setdefault("MLFLOW_TRUNCATE_LONG_VALUES", "true")
        from mlflow import MlflowClient, get_tracking_uri

        uri = self.tracking_uri or get_tracking_uri()
        with one_at_a_time(uri):
            self.client = self.client or MlflowClient(tracking_uri=self.tracking_uri)
            # Kept before the parameters are logged, so that a repeated call goes on with the same run.
            run = self._existing(self.id or job.earlier) or self._create(job)
        self.id = run.info.run_id
        self._log_params(job.params, run.data.params)
        host = str(self.client.tracking_uri).rstrip("/")
        page = f"{host}/#/experiments/{run.info.experiment_id}/runs/{self.id}" if host.startswith("http") else ""
        return ServiceRun(self.id, page)

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Collect the metrics of a step; MLflow stores NaN, and infinity as the largest number."""
        from mlflow.entities import Metric

        time_ms, step = int(record.time_s * 1000), record.step or 0
        self._metrics += [Metric(allowed_name(name), value, time_ms, step) for name, value in values.items()]

    def flush(self) -> None:
        while batch := self._metrics[:MAX_METRICS]:
            try:
                self.client.log_batch(self.id, metrics=batch, synchronous=True)
            except Exception as error:
                if self.is_refusal(error):
                    del self._metrics[: len(batch)]
                raise
            del self._metrics[: len(batch)]

    def text(self, name: str, text: str, step: int) -> None:
        self.client.log_text(self.id, text, f"texts/{allowed_name(name)}/step-{step:06d}.md")

    def image(self, name: str, png: bytes, step: int) -> None:
        """Store an image, which MLflow's page shows with a slider for the step."""
        self.client.log_image(self.id, picture(png), key=allowed_name(name), step=step, synchronous=True)

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        self.client.log_artifact(self.id, str(path), "checkpoints")
        if is_best:
            self.client.set_tag(self.id, "best_checkpoint", f"checkpoints/{path.name}")

    def end(self, status: str) -> None:
        self.client.set_terminated(self.id, status.upper())

    def is_refusal(self, error: Exception) -> bool:
        code = getattr(error, "error_code", None)
        return isinstance(error, ImportError) or (isinstance(code, str) and code not in TEMPORARY)

    def _existing(self, run_id: str) -> Any:
        """Return a run, running again; None if the server has no such run."""
        from mlflow.exceptions import MlflowException

        if not run_id:
            return None
        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage != "active":
            return None
        self.client.update_run(run_id, status="RUNNING")
        return run

    def _create(self, job: RunInfo) -> Any:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        tags = {"run_dir": job.name, **{str(key): str(value) for key, value in (self.tags or {}).items()}}
        if job.sweep:
            tags["sweep"] = job.sweep
        if job.tags:
            tags["tags"] = ", ".join(job.tags)
        return self.client.create_run(self._experiment_id(name), tags=tags, run_name=self.run_name or job.name)

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if found := self.client.get_experiment_by_name(name):
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return str(self.client.get_experiment_by_name(name).experiment_id)  # another job was quicker

    def _log_params(self, params: Mapping[str, Any], logged: Mapping[str, str]) -> None:
        """Log the parameters. MLflow keeps the first value, so one that a resumed job has changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        texts = {allowed_name(key): "null" if value is None else str(value) for key, value in params.items()}
        new = [Param(key, value) for key, value in texts.items() if key not in logged]
        changed = [RunTag(f"changed.{key}", value) for key, value in texts.items() if logged.get(key, value) != value]
        for items, kind in ((new, "params"), (changed, "tags")):
            for start in range(0, len(items), MAX_PARAMS):
                self.client.log_batch(self.id, **{kind: items[start : start + MAX_PARAMS]}, synchronous=True)


@contextmanager
def one_at_a_time(uri: str) -> Iterator[None]:
    """Keep other processes out of a local database: two of them that make its tables at once break it for good."""
    with ExitStack() as stack:
        if uri.startswith(SQLITE):
            file = str(Path(uri.removeprefix(SQLITE)).absolute())
            with suppress(OSError):  # no folder for caches
                folder = user_cache() / "mlflow"
                folder.mkdir(parents=True, exist_ok=True)
                lock = folder / f"{hashlib.sha256(file.encode()).hexdigest()[:16]}.lock"
                stack.enter_context(flocked(lock, os.O_RDWR | os.O_CREAT))
        yield


def allowed_name(name: str) -> str:
    return re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)[:MAX_KEY].strip("/. ") or "_"


STEP = "trainer/global_step"
"""The x-axis. W&B's own step may never go back, but a restarted job's step does."""


@dataclass(eq=False, repr=False)
class WandbLogger(Logger):
    """Logs to W&B, or offline into the run directory. The sweep of a job is its W&B group."""

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
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path), name=path.name)
        self.run.log_artifact(artifact, aliases=["latest", f"step-{step}", *(["best"] if is_best else [])])

    def end(self, status: str) -> None:
        self.run.summary["ddp_hydra/status"] = status
        self.run.finish(exit_code=0 if status == FINISHED else 1)


@dataclass(eq=False, repr=False)
class AimLogger(Logger):
    """Logs to a repository of Aim, or to its server. The sweep of a job is a tag of its run, "sweep <name>".

    Aim keeps no files, so checkpoints are not uploaded.
    """

    advice = "Start `aim server`, or give a folder with results.aim.repo=..., or leave it out with results.loggers=[]"

    repo: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    tags: Sequence[str] = ()
    run: Any = field(init=False, default=None)

    def begin(self, job: RunInfo) -> ServiceRun:
        """Open a run, or the earlier one. Aim adds neither output nor hardware by itself."""
        if self.checkpoints is not None:
            raise Refusal(f"results.aim.checkpoints={self.checkpoints}: Aim keeps no files: give null")
        os.environ.setdefault("AIM_UI_TELEMETRY_ENABLED", "0")  # it would tell its makers of each use
        import aim

        self.run = aim.Run(
            run_hash=job.earlier or None,
            repo=self.repo or ".",
            experiment=self.experiment or PROJECT,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        self.run.name = self.run_name or job.name
        for tag in dict.fromkeys([*(self.tags or ()), *job.labels]):
            if tag not in self.run.tags:
                self.run.add_tag(tag)
        self.run["hparams"] = dict(job.params)
        return ServiceRun(self.run.hash, note=f"look at it with: aim up --repo {self.repo or '.'}")

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Track the metrics of a step; "train/loss" is the metric "loss" of the subset "train"."""
        step, epoch = record.step or 0, values.get("epoch")
        for name, value in values.items():
            subset, _, metric = name.rpartition("/")
            self.run.track(
                value,
                name=metric,
                step=step,
                epoch=None if epoch is None else int(epoch),
                context={"subset": subset} if subset else None,
            )

    def text(self, name: str, text: str, step: int) -> None:
        from aim import Text

        self.run.track(Text(text), name=name, step=step)

    def image(self, name: str, png: bytes, step: int) -> None:
        from aim import Image

        self.run.track(Image(picture(png)), name=name, step=step)

    def end(self, status: str) -> None:
        self.run["status"] = status
        self.run.close()


@dataclass(eq=False, repr=False)
class ClearmlLogger(Logger):
    """Logs to ClearML, or offline into ClearML's cache. The sweep of a job is a tag of its task, "sweep <name>"."""

    advice = "Type `clearml-init`, or set CLEARML_OFFLINE_MODE=1, or leave it out with results.loggers=[]"

    project: str | None = None
    run_name: str | None = None
    tags: Sequence[str] = ()
    task: Any = field(init=False, default=None)

    def begin(self, job: RunInfo) -> ServiceRun:
        """Open a task, or the earlier one. ClearML adds neither output nor hardware by itself."""
        from clearml import Task
        from clearml.backend_api.session.defs import MissingConfigError

        try:
            self.task = Task.init(
                project_name=self.project or os.environ.get("CLEARML_PROJECT") or PROJECT,
                task_name=self.run_name or os.environ.get("CLEARML_TASK") or job.name,
                tags=[*(self.tags or ()), *job.labels],
                reuse_last_task_id=False,
                continue_last_task=job.earlier if job.earlier and not Task.is_offline() else False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=False,
                auto_connect_streams=False,
                auto_resource_monitoring=False,
            )
        except (MissingConfigError, ValueError) as error:
            raise Refusal(str(error)) from error
        self.task.set_initial_iteration(0)  # our steps go on by themselves
        self.task.connect(dict(job.params), name="config")
        return ServiceRun(str(self.task.id), "" if Task.is_offline() else self.task.get_output_log_web_page() or "")

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Report the metrics of a step; ClearML would draw a value that is not finite as 0, so a text names it."""
        logger, step = self.task.get_logger(), record.step or 0
        for name, value in values.items():
            title, _, series = name.rpartition("/")
            if math.isfinite(value):
                logger.report_scalar(title or name, series, value, iteration=step)
            else:
                logger.report_text(f"step {step}: {name} is {value}", print_console=False)

    def text(self, name: str, text: str, step: int) -> None:
        self.task.get_logger().report_text(f"{name}, step {step}:\n{text}", print_console=False)

    def image(self, name: str, png: bytes, step: int) -> None:
        title, _, series = name.rpartition("/")
        self.task.get_logger().report_image(title or name, series, iteration=step, image=picture(png))

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        self.task.upload_artifact(f"{path.stem}{'-best' if is_best else ''}", artifact_object=str(path))

    def end(self, status: str) -> None:
        """Close the task; ClearML calls a killed one stopped."""
        if status == FAILED:
            self.task.mark_failed(force=True, status_message=status)
        elif status != FINISHED:
            self.task.mark_stopped(force=True, status_message=status)
        self.task.flush(wait_for_uploads=True)
        self.task.close()
