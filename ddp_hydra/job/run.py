"""Runs one config as a job, which fills one run directory."""

from __future__ import annotations

import copy
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect, connection
from ddp_hydra.config import checkpoint_config, env_values, schema
from ddp_hydra.config.project import Project
from ddp_hydra.config.validate import check_loggers_installed
from ddp_hydra.console.signals import SECOND, held_back
from ddp_hydra.console.text import typed
from ddp_hydra.dispatch import inline
from ddp_hydra.errors import CheckpointError, ConfigError, DdpHydraError, Interrupted
from ddp_hydra.job import loggers
from ddp_hydra.job.job_config import (
    DOWNLOADS,
    check,
    check_faults,
    check_files,
    find_paths,
    find_resume,
    find_weights,
    gang_settings,
    packed_project,
    ranks_per_worker,
    settings_of_hydra,
    weights_path,
)
from ddp_hydra.job.run_dir import (
    Measured,
    add_saved,
    earlier_kept,
    goes_on,
    is_held,
    keep_environment,
    keep_project,
    kept_environment,
    measured_until,
    refuse_other_run,
    saved_step,
    write_held,
)
from ddp_hydra.job.summary import closing_lines, read_result, shown_path, summarised, why_stopped
from ddp_hydra.rank import fault_injection, torchrun
from ddp_hydra.record import Record, Start
from ddp_hydra.results import finite
from ddp_hydra.run_state import AttemptEntry, Objective, Status, Summary
from ddp_hydra.storage.manifest import find_checkpoint, has_checkpoint
from ddp_hydra.writers.handler import ResultsHandler, Writer, default_writers
from ddp_hydra.writers.run_dir import locked, next_attempt, read_summary

if TYPE_CHECKING:  # these import Dask
    from ddp_hydra.job.remote.start_driver import DriverSpec

log = logging.getLogger(__name__)
TRAIN = "ddp_hydra.training.loop:train"
"""The function that ranks run; a name, because importing it here would import torch."""


@dataclass(frozen=True)
class RemoteContext:
    """Connects a job to the driver that runs it: the job as the command has sent it, further writers, its status."""

    spec: DriverSpec
    writers: Sequence[Writer]
    status: Status


def run_job(
    cfg: DictConfig,
    run_dir: Path,
    overrides: Sequence[str] = (),
    remote: RemoteContext | None = None,
    stop: threading.Event | None = None,
    rank_settings: dict[str, Any] | None = None,
) -> float | None:
    """Train one job.

    Args:
        remote: the driver's part, if a driver runs the job.
        stop: asks a job on a cluster to save a checkpoint and end, as Ctrl-C does in the main thread.
        rank_settings: what Hydra's part of the config says of the ranks; None for that of the job that Hydra runs here,
            see `settings_of_hydra`.

    Returns:
        The objective's last value, for sweepers.

    Raises:
        DdpHydraError: the config can't be a job, no cluster came up, or the gang failed.
        Interrupted: the job was asked to end, or its time was up; its state is saved.
    """
    schema.check_whole(cfg)
    find_paths(cfg)
    if rank_settings is None:
        rank_settings = remote.spec.rank_settings if remote else settings_of_hydra()
    if cfg.dry_run:
        check(cfg)
        config = schema.resolved(cfg)
        check_files(cfg)
        if not cfg.detach:  # else they are needed where the driver runs
            check_loggers_installed(cfg)
        if weights_path(cfg) is not None:
            config["model"]["weights"] = None
        packed_project(cfg, config)
        _dry_run(config)
        return None
    if remote is None and torchrun.is_here() and not connect.is_torchrun(cfg.cluster):
        raise ConfigError("torchrun has started this process: give cluster=torchrun, or type it without torchrun")
    with ExitStack() as stack:
        stack.enter_context(locked(run_dir))
        if remote is None:
            refuse_restart(run_dir)
            refuse_other_run(run_dir, cfg.resume, is_stored=cfg.results.handler is schema.Handler.cluster)
            if not connect.has_existing():  # a sweep goes on by itself
                torchrun.remember(str(run_dir.absolute()))
            stack.enter_context(earlier_kept(run_dir))
        print(f"ddp_hydra  ->  {remote.spec.url if remote else shown_path(run_dir)}", flush=True)  # noqa: T201
        if remote is None:
            environment = env_values.values_of(cfg)
            before = kept_environment(cfg.resume, cfg) if environment and cfg.resume else {}
            for line in env_values.changes(before, environment):
                print(f"  changed   {line}, by the environment", flush=True)  # noqa: T201
            keep_environment(run_dir, environment)
        if cfg.results.handler is schema.Handler.cluster:
            connection.load()
            from ddp_hydra.job.remote.client import run_remote_job

            return run_remote_job(cfg, run_dir, overrides, rank_settings)
        return train(cfg, run_dir, overrides, remote, stop, rank_settings)


def refuse_restart(run_dir: Path) -> None:
    """Refuse a job that torchrun has started again for nothing; it knows only that a process has failed."""
    before = (torchrun.remembered() == run_dir.absolute() and read_summary(run_dir)) or Summary(status="failed")
    if (reason := before.interrupted) in ("time_limit", "callback"):
        raise Interrupted(f"{why_stopped(reason, before.steps or 0)}: torchrun has started it again, but it is over")
    if (failure := before.failure) is not None and failure.kind != "lost":
        who = "" if failure.rank is None else f"rank {failure.rank} on {failure.host}: "
        raise DdpHydraError(f"{who}{failure.message}: torchrun has started it again, but its own attempts are used up")


def train(
    cfg: DictConfig,
    run_dir: Path,
    overrides: Sequence[str],
    remote: RemoteContext | None,
    stop: threading.Event | None,
    rank_settings: dict[str, Any],
) -> float | None:
    shown_dir = remote.spec.url if remote else shown_path(run_dir)
    with summarised(run_dir, cfg, shown_dir) as summary, ExitStack() as stack:
        stack.callback(add_saved, summary, run_dir, is_stored=remote is not None)
        is_own = goes_on(run_dir, cfg.resume, is_stored=remote is not None)
        before = read_summary(run_dir) or Summary(status="failed")
        counts = {name: copy.copy(getattr(before, name)) for name in ("attempts", "restarts", "steps_lost")}
        earlier = before if is_own else Summary(status="failed")
        summary.update({name: copy.copy(getattr(earlier, name)) for name in ("steps", "samples", "metrics")} | counts)
        with held_back():
            check(cfg)
            from ddp_hydra.writers import tensorboard  # imports TensorBoard: not before the config is known to be right

        session = tensorboard.session(run_dir, overrides)
        if not is_held(run_dir):
            stack.enter_context(session)
        config = remote.spec.config if remote else schema.resolved(cfg)
        saved_config = remote.spec.saved_config if remote else checkpoint_config.stored_config(cfg)
        summary.objective = Objective(config["objective"]["metric"], config["objective"]["direction"])
        stack.callback(shutil.rmtree, run_dir / DOWNLOADS, ignore_errors=True)
        files = {"resume": find_resume(cfg, run_dir)} if cfg.resume else {}
        if weights_path(cfg) is not None:
            config["model"]["weights"] = saved_config["model"]["weights"] = None
            if not cfg.resume and (weights := find_weights(cfg, run_dir)) is not None:
                files["weights"] = weights
        packed = remote.spec.project if remote else packed_project(cfg, config)
        summary.project = packed.sha256
        keep_project(run_dir, packed)
        if cfg.trainer.profile_steps:
            summary.profile = "profile/table.md"
        logged = remote.spec.logged if remote else loggers.describe(cfg, run_dir)
        senders = stack.enter_context(loggers.session(cfg, run_dir, logged, remote.spec.project if remote else None))
        job = Job(run_dir, cfg, config, files, summary, remote, saved_config, senders, rank_settings)
        if is_held(run_dir):
            job.on_begin = partial(stack.enter_context, session)
        result = read_result(job.run_here() if connect.is_inline(cfg.cluster) else job.run_on_dask(packed, stop))
        # What an attempt has not measured itself, the one before has: it may have ended just after its last validation.
        metrics, slowest = {**summary.metrics, **finite(result.metrics)}, finite(result.slowest)
        matrices = result.matrices or (earlier.matrices if summary.from_step == earlier.steps else None) or {}
        summary.update({**asdict(result), "metrics": metrics, "slowest": slowest, "matrices": matrices})
        if result.interrupted not in ("", "pause"):
            raise Interrupted(
                f"{why_stopped(result.interrupted, result.steps)}: go on with {typed('resume', shown_dir)}"
            )
        summary.status = "paused" if result.interrupted else "done"
    print(closing_lines(summary, shown_dir, None if remote else run_dir))  # noqa: T201
    metric = config["objective"]["metric"]
    return result.metrics.get(metric, summary.metrics.get(metric))


def _dry_run(config: dict[str, Any]) -> None:
    def show(record: Record) -> None:
        if isinstance(record.data, Start):
            print("\n".join(record.data.lines))  # noqa: T201

    inline.run("ddp_hydra.training.loop:dry_run", config, on_record=show)


@dataclass(eq=False, repr=False)
class Job:
    """Runs one job and writes its results: on a Dask cluster, or in this process.

    Args:
        config: `cfg` as plain values, for the ranks.
        files: files of the client that rank 0 needs, by name: "resume", a checkpoint; "weights", to start with.
        saved_config: the config as checkpoints contain it; None for all of it but the cluster.
        loggers: further writers, which get each record last.
        rank_settings: see `settings_of_hydra`.
        on_begin: what is to be done when the job begins to train in the run directory of an earlier run.
    """

    run_dir: Path
    cfg: DictConfig
    config: dict[str, Any]
    files: dict[str, Path]
    summary: Summary
    remote: RemoteContext | None = None
    saved_config: dict[str, Any] | None = None
    loggers: Sequence[Writer] = ()
    rank_settings: dict[str, Any] = field(default_factory=dict)
    on_begin: Callable[[], Any] = lambda: None

    def __post_init__(self) -> None:
        self.shown_dir = self.remote.spec.url if self.remote else shown_path(self.run_dir)
        self.give_up = threading.Event()
        self.begun = time.monotonic()
        self.first_attempt = next_attempt(self.run_dir)
        earlier = read_summary(self.run_dir) or Summary(status="failed")
        self.earlier_attempts = earlier.attempts
        self.first_world_size = 0
        self.first_step = 0
        self.steps_before = earlier.last_step  # done by the attempt before, maybe in another process
        self.ranks_before: int | None = None  # of a driver that was lost; 0: of none, but it outlives workers
        _, hosts, run_dir = torchrun.read_memory()
        if run_dir == str(self.run_dir.absolute()):  # torchrun may have started it before, with more hosts
            self.first_world_size = self.cfg.dispatch.ranks or hosts * int(ranks_per_worker(self.cfg))
        elif self.remote and self.remote.spec.is_restart:
            self.first_world_size = next(filter(None, (one.world_size for one in self.earlier_attempts)), 0)
            self.ranks_before = self.first_world_size
        elif self.remote and self.remote.spec.max_restarts:  # its scheduler may be another one than the command's
            self.ranks_before = 0
        self.sent = set[int]()  # steps of checkpoints
        first_save = "resume" in self.files and not has_checkpoint(self.run_dir)
        self.saving: dict[str, Any] = {"kept": self.saved_config, "first_save": first_save}
        self.ended: list[AttemptEntry] = []
        self.status = Status(objective=self.summary.objective, tags=self.summary.tags, attempts=self.earlier_attempts)
        self.status.metrics = dict(self.summary.metrics)
        self.goes_on = goes_on(self.run_dir, self.cfg.resume, is_stored=self.remote is not None)
        self.measured = Measured()  # when the newest attempt began

    def handler(self, fetch: Any) -> ResultsHandler:
        results = self.cfg.results
        settings = {"retry_s": results.retry_s, "give_up": self.give_up}
        kept = {"keep": results.keep_checkpoints, "keep_every": results.keep_every, "mirror": results.mirror}
        kept["is_stored"] = self.remote is not None
        writers: list[Writer] = [self, *default_writers(self.run_dir, fetch, **kept, status=self.status, **settings)]
        if faults := [fault for fault in fault_injection.parse(self.cfg.faults) if fault.kind == "interrupt"]:
            writers.append(fault_injection.InterruptWriter(faults))
        writers += self.remote.writers if self.remote else ()
        return ResultsHandler([*writers, *self.loggers], **settings, summary=self.summary)

    def run_here(self) -> dict[str, Any]:
        check_faults(self.cfg, self.cfg.faults, 1)
        self.summary.world_size = 1
        self.summary.count_attempts(self.earlier_attempts, (), begun=1)
        for key in ("ranks", "ranks_per_worker"):
            if (given := self.cfg.dispatch[key]) not in (None, 1, "auto"):
                log.warning("dispatch.%s=%s has no effect with cluster=inline, which has one rank", key, given)
        with self.handler(inline.fetch) as handler:
            return inline.run(
                TRAIN,
                self.config,
                on_record=handler.handle,
                notice=partial(self.interrupt_notice, trains=True),
                files={name: str(path) for name, path in self.files.items()},
                **self.saving,
                attempt=self.first_attempt,
                settings=gang_settings(self.cfg),
            )[0]

    def run_on_dask(self, packed: Project, stop: threading.Event | None = None) -> dict[str, Any]:
        with held_back():
            from ddp_hydra.cluster import preflight

        pip = preflight.check_requirements(self.cfg.cluster.get("pip") or ())
        with connect.connect(self.cluster_config, self.run_dir / "logs") as client:
            with held_back():
                from ddp_hydra.dispatch.gang import Gang

            own = {"cwd": self.remote.spec.cwd if self.remote else "", **self.rank_settings}
            settings = gang_settings(self.cfg, name="job", pip=pip, **own)
            gang = Gang(client, project=packed, stop=stop, settings=settings)
            try:
                with self.handler(gang.fetch) as handler:
                    values: list[dict[str, Any]] = gang.run_attempts(
                        self.call,
                        handler.handle,
                        first_attempt=self.first_attempt,
                        ranks_before=self.ranks_before,
                        expected=connect.expected_workers(self.cfg.cluster),
                        notice=lambda: self.interrupt_notice(gang.trains),
                        goes_on=lambda done: self.end_attempt(done, gang.restarts.ended),
                        on_give_up=self.give_up.set,
                    )
                return values[0]
            finally:
                found = gang.summary()
                self.summary.world_size = found["world_size"]
                self.summary.count_attempts(self.earlier_attempts, found["attempts"], found["begun"])

    @property
    def cluster_config(self) -> DictConfig:
        """Return the config of the cluster; its workers are processes where a fault strikes one."""
        strikes = any(fault.kind in fault_injection.STRUCK for fault in fault_injection.parse(self.cfg.faults))
        if strikes and self.cfg.cluster.get("processes") is False:
            return DictConfig(OmegaConf.merge(self.cfg.cluster, {"processes": True}))
        return self.cfg.cluster

    def interrupt_notice(self, trains: bool) -> str:
        doing = (
            "a checkpoint is saved at the next step" if trains else "no step is being done, so nothing is to be saved"
        )
        return f"{doing}, then the job ends. {SECOND}. Run directory: {self.shown_dir}"

    def call(self, number: int, world_size: int) -> Any:
        """Return the call of an attempt's ranks: the same job, resumed from its last whole checkpoint."""
        from ddp_hydra.dispatch.call import Call

        config, settings = copy.deepcopy(self.config), dict(self.saving)
        if number == self.first_attempt:  # before it, the job may have waited for workers
            self.begun = time.monotonic()
            check_faults(self.cfg, self.cfg.faults, self.cfg.dispatch.ranks or world_size)
        if config["trainer"]["time_limit_s"] is not None:
            config["trainer"]["time_limit_s"] = max(0.0, config["trainer"]["time_limit_s"] - self.elapsed_s())
        self.first_world_size = self.first_world_size or world_size
        files = self.files
        if number != self.first_attempt or world_size != self.first_world_size:
            settings["first_ranks"] = self.first_world_size
            if self.saved:  # otherwise an earlier run has left the checkpoints in the run directory
                settings["first_save"] = False
                try:
                    files = {"resume": find_checkpoint(self.run_dir).absolute()}
                except CheckpointError as error:
                    log.warning("from the beginning again: %s", error)
        return Call(TRAIN, (config,), settings, files=files)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun

    def write(self, record: Record) -> None:
        """Note what the summary, and a restart, need of a record; before the other writers."""
        if record.checkpoint is not None:
            self.sent.add(record.checkpoint.step)
        if not isinstance(record.data, Start):
            return
        if is_held(self.run_dir):
            write_held(self.run_dir)
            self.on_begin()
        self.summary.from_step = begin = record.step or 0
        self.begin_from(begin)
        self.summary.steps_lost += max(0, self.steps_before - begin)
        for status in (self.status, *([self.remote.status] if self.remote else [])):
            status.attempts, status.steps_lost = [*self.earlier_attempts, *self.ended], self.summary.steps_lost
            status.metrics = dict(self.summary.metrics)
        if not self.ended:
            self.first_step = begin

    def begin_from(self, step: int) -> None:
        """Begin an attempt with what the summary knows of the steps before."""
        summary, before = self.summary, self.measured
        known = Measured(summary.steps, summary.samples, summary.metrics), before
        self.measured = Measured(step)
        if step and (self.goes_on or before.steps is not None):
            self.measured = measured_until(self.run_dir, step, known)
        summary.steps, summary.samples, summary.metrics = step, self.measured.samples, dict(self.measured.metrics)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def saved(self) -> bool:
        """Return whether a checkpoint of this job is saved. One of several parts is when the last one has come."""
        return saved_step(self.run_dir) in self.sent

    def end_attempt(self, steps_done: int, ended: Sequence[AttemptEntry]) -> str:
        """Note the attempts that have ended; say where the next one begins."""
        self.ended, self.steps_before = list(ended), steps_done
        begin = (saved_step(self.run_dir) or 0) if self.saved else self.first_step
        again = max(0, steps_done - begin)
        return f", from step {begin}" + (f" ({again} step{'s' if again > 1 else ''} again)" if again else "")
