"""Describes a job of a sweep: its config, its folder, what it needs of a cluster, and its result, in little space.

It runs in a process of its own, which has its own HydraConfig, logging, folder and environment. The process is a fork
of the sweep's. So the sweep imports what every job needs before it forks.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connect import is_inline
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.config import project, redact, unknown_keys
from ddp_hydra.config.hydra_compat import (
    ENV_SET,
    IS_1_3,
    are_words,
    config_of,
    hydra_config_of,
    reads_variable,
    sets_variables,
    typed_words,
    variables_set,
)
from ddp_hydra.console.text import message_of, traceback_of
from ddp_hydra.errors import ConfigError, DdpHydraError, SweepFailed
from ddp_hydra.storage.manifest import FOLDER, NAME, has_checkpoint
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, typed


def _compressed(name: str) -> Any:
    return property(
        lambda self: pickle.loads(zlib.decompress(self.__dict__[name])),  # noqa: S301, pickled in the next line
        lambda self, value: self.__dict__.update({name: zlib.compress(pickle.dumps(value), 1)}),
    )


class CompactReturn(JobReturn):
    """Keeps the configs of a result compressed: the configs of hundreds of jobs would fill the memory of the sweep."""

    cfg = _compressed("_cfg")
    hydra_cfg = _compressed("_hydra_cfg")

    def __init__(self, result: JobReturn) -> None:
        for name in vars(result).keys() | {"cfg", "hydra_cfg"}:
            setattr(self, name, getattr(result, name))


def portable(result: JobReturn) -> CompactReturn:
    try:
        compact = CompactReturn(result)
        pickle.loads(pickle.dumps(compact))  # noqa: S301, pickled just now
    except Exception as reason:
        value = result._return_value
        if result.status == JobStatus.FAILED:
            result._return_value = RuntimeError(describe_error(value))
        else:
            result.status = JobStatus.FAILED
            result._return_value = TypeError(
                f"the task returned a {type(value).__name__}, which cannot be sent to the sweep's process: {reason}"
            )
        return CompactReturn(result)
    return compact


def describe_error(error: BaseException) -> str:
    if isinstance(error, DdpHydraError):
        return first_line(str(error))
    return first_line(": ".join(filter(None, [type(error).__name__, message_of(error)])))


def first_line(text: str) -> str:
    """Return the first line of a text, and the next one if the first ends with a colon, as in errors of Hydra."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    end = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines))
    return " ".join(lines[: end + 1])


@dataclass(frozen=True)
class Need:
    """The cluster that a job needs, in canonical YAML, "" for a process on this machine; its workers, None for all."""

    cluster: str = ""
    workers: int | None = None


@dataclass(eq=False)
class PlannedJob:
    """A job of the sweep.

    Args:
        overrides: with Hydra's own part.
        earlier: its row in an earlier run of the sweep, if it was there.
        config: with Hydra's own part; empty until it is composed.
        folder: its run directory.
        is_ours: whether its config is one of ours, so that the task dispatches a gang itself.
        result: for Hydra's sweeper.
        spent_s: duration of the earlier runs that it resumes.
        priority: jobs with a higher one start first.
        is_secret: whether a swept value of it is a secret, so that its row does not tell which job it is.
    """

    row: JobRow
    overrides: Sequence[str] = ()
    earlier: JobRow | None = None
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    need: Need = Need()
    folder: Path = Path()
    is_ours: bool = False
    result: JobReturn | None = None
    spent_s: float = 0.0
    priority: int = 0
    is_secret: bool = False

    @property
    def is_composed(self) -> bool:
        return "hydra" in self.config

    @property
    def is_dry(self) -> bool:
        return self.is_ours and bool(self.config.get("dry_run"))

    def fail(self, error: Exception) -> None:
        self.row.state, self.row.message = JobState.failed, first_line(unknown_keys.explain(error) or str(error))
        self.result = self.failed_return(error)

    def failed_return(self, error: Exception) -> JobReturn:
        return self._return(JobStatus.FAILED, error)

    def value_return(self) -> JobReturn:
        """Return the result of a job whose value is in its row; a stopped one has at least NaN."""
        value = math.nan if self.row.value is None and self.row.state == JobState.stopped else self.row.value
        return self._return(JobStatus.COMPLETED, value)

    def return_for_optuna(self, result: JobReturn, objective: SweepObjective) -> JobReturn:
        """Return a result that Optuna's sweeper can tell it: with NaN, it ends with a traceback.

        A stopped job has the worst value in its place; any other has failed, as in Optuna itself. A job of ours needs a
        finite value: no file keeps another one for a second start.
        """
        if result.status != JobStatus.COMPLETED:
            return result
        values = _numbers(result._return_value)
        if all(map(math.isfinite, values or [math.nan])) if self.is_ours else not any(map(math.isnan, values)):
            return result
        if self.row.state == JobState.stopped:
            return self._return(JobStatus.COMPLETED, -math.inf if objective.maximize else math.inf)
        reason = f"job {self.row.number}: {objective.metric} has no finite value"
        return self.failed_return(SweepFailed(f"{reason}, which is a failure (hydra.sweeper.max_failure_rate)"))

    def earlier_return(self) -> JobReturn:
        if self.row.state in (JobState.done, JobState.paused, JobState.stopped):
            return self.value_return()
        reason = f"job {self.row.number} failed before ({self.row.message})"
        return self.failed_return(SweepFailed(f"{reason}: run it again with hydra.launcher.retry_failed=true"))

    def _return(self, status: JobStatus, value: object) -> JobReturn:
        keys = [str(key) for key in self.config if key != "hydra"]
        config = OmegaConf.masked_copy(self.config, keys) if self.is_composed else None
        result = JobReturn(self.row.overrides, config, working_dir=str(self.folder), status=status)
        result._return_value = value
        return result


def _numbers(value: Any) -> list[float]:
    """Return a job's value, or values, as Optuna's sweeper reads them; an empty list where it reads none."""
    for read in (lambda: [float(value)], lambda: list(map(float, value))):
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            return read()
    return []


def is_ours(config: DictConfig) -> bool:
    target = OmegaConf.select(config, "cluster._target_", throw_on_missing=False)
    return target is not None and "dispatch" in config and "trainer" in config


def need_of(config: DictConfig) -> Need:
    if config.get("dry_run") or is_inline(config.cluster):
        return Need()
    ranks, each = config.dispatch.ranks, config.dispatch.ranks_per_worker
    workers = ranks and -(-ranks // (each if isinstance(each, int) else 1))
    return Need(_yaml(OmegaConf.to_container(config.cluster, resolve=True, enum_to_str=True)), workers)


def in_order(overrides: Sequence[str]) -> list[str]:
    """Return overrides ordered by their keys, in which they may be typed; of one key, the last one still wins."""
    return sorted(overrides, key=lambda word: word.partition("=")[0])


def variables_read(hydra_cfg: Mapping[Any, Any], config: DictConfig) -> list[str]:
    """Return the variables that Hydra sets for a job and that its config reads, as words, but no secrets.

    Whether they were typed makes no difference: a sweep that goes on types again what a file has let Hydra copy.
    """
    variables = variables_set(hydra_cfg).items()
    words = [f"{ENV_SET}.{name}={value}" for name, value in variables if reads_variable(config, name)]
    return [word for word in words if redact.HIDDEN not in redact.without([word])[0]]


def is_paused(row: JobRow) -> bool:
    """Return whether a job has paused where its own overrides ask for it, so that it has nothing more to do."""
    return row.state == JobState.paused and "trainer.pause_after_validations" in typed(row)


def take_over_folder(planned: PlannedJob) -> None:
    """Resume a job that an earlier run of the sweep had started when it was killed, and had not noted yet."""
    saved, hydra_cfg = (_saved(planned.folder / ".hydra" / f"{name}.yaml") for name in ("overrides", "hydra"))
    if not are_words(saved):
        return
    overrides = redact.without(saved)  # other apps save theirs as typed
    own = [word for word in planned.row.overrides if not sets_variables(word)]
    if isinstance(hydra_cfg, dict) and isinstance(hydra_cfg.get("hydra"), dict):  # without it, only the overrides tell
        overrides += variables_read(hydra_cfg["hydra"], planned.config)
        now: Any = OmegaConf.to_container(planned.config.get("hydra") or OmegaConf.create({}))
        own += variables_read(now, planned.config)  # a row lacks them if only an experiment sets variables
    if planned.is_secret or in_order(overrides) != in_order(own):
        raise ConfigError(
            f"{planned.folder} has results of {'what may be ' * planned.is_secret}another job ({' '.join(overrides)}): "
            "give another hydra.sweep.dir"
        )
    resume(planned, 0.0)


def _saved(path: Path) -> Any:
    """Return what a YAML file holds; None if there is none, or its writer was killed."""
    with contextlib.suppress(OSError, YAMLError, ValueError):
        return OmegaConf.to_container(OmegaConf.load(path))
    return None


def resume(planned: PlannedJob, spent_s: float) -> None:
    manifest = planned.folder / FOLDER / NAME
    if planned.is_ours and (manifest.is_file() or has_checkpoint(planned.folder)):
        with open_dict(planned.config):
            planned.config.resume = str(planned.folder)
        planned.spent_s = spent_s


def first_need(config: DictConfig) -> Need:
    with hydra_config_of(config):
        swept = [override for override in typed_words(config.hydra) if override.startswith("cluster")]
        return need_of(config) if is_ours(config) and not any("," in override for override in swept) else Need()


def own_need(ranks: int | None, config: Any) -> Need:
    if ranks is None:
        return Need()
    if OmegaConf.is_config(config):  # a launcher's argument: Hydra 1.3 has resolved its texts
        config = OmegaConf.to_container(config, resolve=not IS_1_3, enum_to_str=True)
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
    return Need(_yaml(settings), ranks)


def _yaml(values: Any) -> str:
    return OmegaConf.to_yaml(config_of(values), sort_keys=True)


PRELOAD = (
    "ddp_hydra.job.run",
    "ddp_hydra.dispatch.gang",
    "ddp_hydra.writers.files",
    "ddp_hydra.writers.tensorboard",
    "ddp_hydra.writers.progress",
    "tornado.platform.asyncio",
)
"""Modules that every job needs; imported once, before the processes of the jobs are forked."""


@dataclass
class JobOutcome:
    """The end of a job: done, failed or interrupted, and why, in one line.

    Hydra has no result of one that was interrupted or could not start.
    """

    state: JobState
    result: CompactReturn | None
    message: str = ""


def preload(is_ours: bool) -> None:
    from distributed.versions import get_versions

    for name in PRELOAD if is_ours else ():
        importlib.import_module(name)
    get_versions()  # each job asks for these, which are remembered
    if is_ours:
        with contextlib.suppress(ConfigError, OSError):  # then each job says so
            project.pack(*project.layers())


def run_planned_job(
    planned: PlannedJob, context: HydraContext, task: TaskFunction, scheduler: Scheduler | None
) -> JobOutcome:
    if scheduler is not None:
        connect.use_existing(scheduler)
        if not planned.is_ours:
            from ddp_hydra.sweep.other_apps import on_ranks

            assert planned.need.workers is not None
            task = on_ranks(task, planned.need.workers, context)
    try:
        result = run_job(
            hydra_context=context,
            task_function=task,
            config=planned.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except KeyboardInterrupt as error:
        return JobOutcome(JobState.interrupted, None, first_line(str(error)) or "interrupted")
    except SystemExit as error:
        return JobOutcome(JobState.failed, None, describe_exit(error))
    except Exception as error:  # Hydra could not start the job: hydra.job.env_set, its logging, the folder
        print(traceback_of(error), flush=True)  # noqa: T201
        return JobOutcome(JobState.failed, None, describe_error(error))
    value, sent = result._return_value, portable(result)
    if sent.status == JobStatus.COMPLETED:
        return JobOutcome(JobState.done, sent)
    raised = value if isinstance(value, BaseException) else sent._return_value
    print(traceback_of(raised), flush=True)  # noqa: T201
    if getattr(sent, "_remote_traceback", None) is None:  # Hydra 1.4 sends it by itself
        sent._return_value = ExceptionWithTraceback(sent._return_value, raised.__traceback__)
    return JobOutcome(JobState.failed, sent, describe_error(raised))


def describe_exit(error: SystemExit) -> str:
    if error.code in (None, 0):
        return "the task exited with code 0 (sys.exit) before it returned"
    if isinstance(error.code, int):
        return f"the task exited with code {error.code} (sys.exit)"
    return f"the task exited with code 1 (sys.exit): {first_line(str(error.code))}"
