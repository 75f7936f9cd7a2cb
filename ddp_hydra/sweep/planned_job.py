"""Describes a job of a sweep before it runs: its config, its folder, and what it needs of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_hydra.cluster.connect import is_inline
from ddp_hydra.config import redact
from ddp_hydra.errors import ConfigError, SweepFailed
from ddp_hydra.sweep.job_returns import first_line
from ddp_hydra.sweep.rows import Row, State, typed


@dataclass(frozen=True)
class Need:
    """States the cluster and the workers that a job needs.

    Args:
        cluster: the cluster's config, as canonical YAML; "" for a job that is one process on this machine.
        workers: how many; None for all of the cluster.
    """

    cluster: str = ""
    workers: int | None = None


@dataclass
class PlannedJob:
    """Holds a job of the sweep.

    Args:
        row: its row in the table of jobs.
        overrides: all overrides of the job, including those of Hydra's own part.
        earlier: its row in an earlier run of the sweep, if it was there.
        config: its config with Hydra's own part; empty until it is composed.
        need: the cluster and the ranks that it needs.
        folder: its run directory.
        is_ours: whether its config is one of ours, so that the task dispatches a gang itself.
        result: the result for Hydra's sweeper; None until it has ended.
        spent_s: duration of the earlier runs that it resumes, in seconds.
        priority: jobs with a higher one start first.
    """

    row: Row
    overrides: Sequence[str] = ()
    earlier: Row | None = None
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    need: Need = Need()
    folder: Path = Path()
    is_ours: bool = False
    result: JobReturn | None = None
    spent_s: float = 0.0
    priority: int = 0

    @property
    def is_composed(self) -> bool:
        """Return whether its config is composed."""
        return "hydra" in self.config

    @property
    def is_dry(self) -> bool:
        """Return whether it is a dry run."""
        return self.is_ours and bool(self.config.get("dry_run"))

    @property
    def task_config(self) -> DictConfig | None:
        """Return its config without Hydra's own part."""
        if not self.is_composed:
            return None
        return OmegaConf.masked_copy(self.config, [str(key) for key in self.config if key != "hydra"])

    def fail(self, error: Exception) -> None:
        """Let it fail before it starts."""
        self.row.state, self.row.message = State.failed, first_line(str(error))
        self.result = self.failed_return(error)

    def failed_return(self, error: Exception) -> JobReturn:
        """Return the result of a job that failed outside its own process; reading its value raises the error."""
        return self._return(JobStatus.FAILED, error)

    def value_return(self) -> JobReturn:
        """Return the result of a job whose value is in its row; a stopped one has at least NaN."""
        value = math.nan if self.row.value is None and self.row.state == State.stopped else self.row.value
        return self._return(JobStatus.COMPLETED, value)

    def earlier_return(self) -> JobReturn:
        """Return the result that the job had in an earlier run of the sweep."""
        if self.row.state in (State.done, State.paused, State.stopped):
            return self.value_return()
        reason = f"job {self.row.number} failed before ({self.row.message})"
        return self.failed_return(SweepFailed(f"{reason}: run it again with hydra.launcher.retry_failed=true"))

    def _return(self, status: JobStatus, value: object) -> JobReturn:
        result = JobReturn(self.row.overrides, self.task_config, working_dir=str(self.folder), status=status)
        result._return_value = value
        return result


def without_hydras(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that are not of Hydra's own part; jobs with the same ones are the same job."""
    return [override for override in overrides if not override.lstrip("+~").startswith(("hydra.", "hydra/"))]


@contextmanager
def hydra_config_of(config: DictConfig) -> Iterator[None]:
    """Resolve `${hydra:…}` by a job's config inside the block."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = cast(Any, config)  # `set_config` would copy Hydra's part
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def is_ours(config: DictConfig) -> bool:
    """Return whether a config is one of ours, so that its task dispatches a gang itself."""
    target = OmegaConf.select(config, "cluster._target_", throw_on_missing=False)
    return target is not None and "dispatch" in config and "trainer" in config


def need_of(config: DictConfig) -> Need:
    """Return what a job of ours needs."""
    if config.get("dry_run") or is_inline(config.cluster):
        return Need()
    ranks, each = config.dispatch.ranks, config.dispatch.ranks_per_worker
    workers = ranks and -(-ranks // (each if isinstance(each, int) else 1))
    return Need(OmegaConf.to_yaml(config.cluster, resolve=True, sort_keys=True), workers)


def is_paused(row: Row) -> bool:
    """Return whether a job has paused where its own overrides ask for it, so that it has nothing more to do."""
    return row.state == State.paused and "trainer.pause_after_validations" in typed(row)


def take_over_folder(planned: PlannedJob) -> None:
    """Resume a job that an earlier run of the sweep had started when it was killed, and had not noted yet.

    Raises:
        ConfigError: the folder contains the results of another job, which must not be written over.
    """
    saved = planned.folder / ".hydra" / "overrides.yaml"
    if not saved.is_file():
        return
    overrides = redact.without(OmegaConf.to_container(OmegaConf.load(saved)))  # other apps save theirs as typed
    if overrides != planned.row.overrides:
        raise ConfigError(
            f"{planned.folder} holds the results of another job ({' '.join(overrides)}), which would be written over: "
            "give another hydra.sweep.dir, or leave it out"
        )
    resume(planned, 0.0)


def resume(planned: PlannedJob, spent_s: float) -> None:
    """Let a job of ours resume from its last checkpoint, if it has one.

    Args:
        planned: the job.
        spent_s: how long it has taken so far, in seconds.
    """
    checkpoints = planned.folder / "checkpoints" / "manifest.json"
    if planned.is_ours and checkpoints.is_file():
        with open_dict(planned.config):
            planned.config.resume = str(planned.folder)
        planned.spent_s = spent_s


def first_need(config: DictConfig) -> Need:
    """Return what the first job of a sweep probably needs, before it is composed.

    Args:
        config: of the sweep, without the swept overrides.
    """
    with hydra_config_of(config):
        swept = [override for override in config.hydra.overrides.task if override.startswith("cluster")]
        return need_of(config) if is_ours(config) and not any("," in override for override in swept) else Need()


def own_need(ranks: int | None, config: Any) -> Need:
    """Return what tasks of other apps need, by `hydra.launcher.ranks` and `hydra.launcher.cluster`."""
    if ranks is None:
        return Need()
    settings = {"_target_": "distributed.LocalCluster", **(config or {})}
    settings.setdefault("n_workers", ranks)
    if settings["_target_"] == "distributed.LocalCluster":
        settings = {
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "dashboard_address": "127.0.0.1:0",
            "preload": "ddp_hydra.rank.dask_preload",
            **settings,
        }
    return Need(OmegaConf.to_yaml(OmegaConf.create(settings), sort_keys=True), ranks)
