"""Logs a job as a run of MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hydra.record import Record
from ddp_hydra.writers.loggers.base import PROJECT, Logger, Refusal, RunInfo, ServiceRun, picture

MAX_METRICS, MAX_PARAMS, MAX_KEY = 1000, 100, 250
"""MLflow's limits for one request, and for a name."""
TEMPORARY = {
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED",
    "TEMPORARILY_UNAVAILABLE",
}  # fmt: skip


@dataclass(eq=False, repr=False)
class MlflowLogger(Logger):
    """Logs to an MLflow server, or to a local store of MLflow.

    The sweep of a job is the tag `sweep`, by which MLflow's page groups runs.

    Args:
        tracking_uri: None: MLflow's own choice, which is MLFLOW_TRACKING_URI or a file in this folder.
        experiment: None: MLFLOW_EXPERIMENT_NAME, else "ddp_hydra".
        run_name: None: the name of the run directory.
        tags: further tags of the run.
        checkpoints: see `Logger`.
    """

    advice = "Start its server, or give results.mlflow.tracking_uri=<address>, or leave it out with results.loggers=[]"

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
        with refusals():
            from mlflow import MlflowClient

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
                with refusals():
                    self.client.log_batch(self.id, metrics=batch, synchronous=True)
            except Refusal:
                del self._metrics[: len(batch)]
                raise
            del self._metrics[: len(batch)]

    def text(self, name: str, text: str, step: int) -> None:
        with refusals():
            self.client.log_text(self.id, text, f"texts/{allowed_name(name)}/step-{step:06d}.md")

    def image(self, name: str, png: bytes, step: int) -> None:
        """Store an image, which MLflow's page shows with a slider for the step."""
        with refusals():
            self.client.log_image(self.id, picture(png), key=allowed_name(name), step=step, synchronous=True)

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        with refusals():
            self.client.log_artifact(self.id, str(path), "checkpoints")
            if is_best:
                self.client.set_tag(self.id, "best_checkpoint", f"checkpoints/{path.name}")

    def end(self, status: str) -> None:
        """End the run; MLflow has the same words in capitals."""
        with refusals():
            self.client.set_terminated(self.id, status.upper())

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


def allowed_name(name: str) -> str:
    return re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)[:MAX_KEY].strip("/. ") or "_"


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        code = getattr(error, "error_code", None)
        if isinstance(error, ImportError) or (isinstance(code, str) and code not in TEMPORARY):
            raise Refusal(str(error)) from error
        raise
