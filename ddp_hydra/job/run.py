"""Runs one config as a job, which fills one run directory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from omegaconf import DictConfig

from ddp_hydra.cluster import connect, connection
from ddp_hydra.config import checkpoint_config, schema
from ddp_hydra.config.loggers import check_installed
from ddp_hydra.console.signals import held_back
from ddp_hydra.console.text import typed
from ddp_hydra.dispatch import inline
from ddp_hydra.errors import ConfigError, DdpHydraError, Interrupted
from ddp_hydra.job import loggers
from ddp_hydra.job.job_config import (
    DOWNLOADS,
    check,
    check_files,
    find_paths,
    find_resume,
    find_weights,
    packed_project,
    weights_path,
)
from ddp_hydra.job.local import Job, RemoteContext
from ddp_hydra.job.run_dir import best_checkpoint, keep_project, metrics_at, refuse_other_run, saved_metrics
from ddp_hydra.job.summary import closing_lines, read_result, shown_path, summarised, why_stopped
from ddp_hydra.rank import torchrun
from ddp_hydra.record import Record, Start
from ddp_hydra.results import finite
from ddp_hydra.run_state import Objective, Summary
from ddp_hydra.writers.run_dir import locked, read_summary


def run_job(
    cfg: DictConfig,
    run_dir: Path,
    overrides: Sequence[str] = (),
    remote: RemoteContext | None = None,
    stop: threading.Event | None = None,
) -> float | None:
    """Train one job.

    Args:
        remote: the driver's part, if a driver runs the job.
        stop: asks a job on a cluster to save a checkpoint and end, as Ctrl-C does in the main thread.

    Returns:
        The objective's last value, for sweepers.

    Raises:
        DdpHydraError: the config can't be a job, no cluster came up, or the gang failed.
        Interrupted: the job was asked to end, or its time was up; its state is saved.
    """
    find_paths(cfg)
    if cfg.dry_run:
        check(cfg)
        config = schema.resolved(cfg)
        check_files(cfg)
        if not cfg.detach:  # else they are needed where the driver runs
            check_installed(cfg)
        if weights_path(cfg) is not None:
            config["model"]["weights"] = None
        packed_project(cfg, config)
        _dry_run(config)
        return None
    if remote is None and torchrun.is_here() and not connect.is_torchrun(cfg.cluster):
        raise ConfigError("torchrun has started this process: give cluster=torchrun, or type it without torchrun")
    with locked(run_dir):
        if remote is None:
            refuse_restart(run_dir)
            refuse_other_run(run_dir, cfg.resume)
            if not connect.has_existing():  # a sweep goes on by itself
                torchrun.remember(str(run_dir.absolute()))
        print(f"ddp_hydra  ->  {remote.spec.url if remote else shown_path(run_dir)}", flush=True)  # noqa: T201
        if cfg.results.handler is schema.Handler.cluster:
            connection.load()
            from ddp_hydra.job.remote.client import run_remote_job

            return run_remote_job(cfg, run_dir, overrides)
        return train(cfg, run_dir, overrides, remote, stop)


def refuse_restart(run_dir: Path) -> None:
    """Refuse a job that torchrun has started again for nothing; it knows only that a process has failed."""
    before = (torchrun.is_again(run_dir) and read_summary(run_dir)) or Summary(status="failed")
    if (reason := before.interrupted) in ("time_limit", "callback"):
        raise Interrupted(f"{why_stopped(reason, before.steps or 0)}: torchrun has started it again, but it is over")
    if (failure := before.failure) is not None and failure.kind != "lost":
        who = "" if failure.rank is None else f"rank {failure.rank} on {failure.host}: "
        raise DdpHydraError(f"{who}{failure.message}: torchrun has started it again, but its own attempts are used up")


def train(
    cfg: DictConfig, run_dir: Path, overrides: Sequence[str], remote: RemoteContext | None, stop: threading.Event | None
) -> float | None:
    shown_dir = remote.spec.url if remote else shown_path(run_dir)
    with summarised(run_dir, cfg, shown_dir) as summary, ExitStack() as stack:
        check(cfg)
        with held_back():
            from ddp_hydra.writers import hparams  # imports TensorBoard: not before the config is known to be right

        stack.enter_context(hparams.session(run_dir, overrides))
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
        job = Job(run_dir, cfg, config, files, summary, remote, saved_config, senders)
        result = read_result(job.run_here() if connect.is_inline(cfg.cluster) else job.run_on_dask(packed, stop))
        # What an attempt has not measured itself, the one before has: it may have ended just after its last validation.
        before: dict[str, float | None] = {**saved_metrics(run_dir, cfg.resume), **summary.metrics}
        if cfg.resume and not before and not result.metrics:  # nothing was left to train
            before |= metrics_at(cfg.resume, result.steps)
        metrics, slowest = {**before, **finite(result.metrics)}, finite(result.slowest)
        summary.update({**asdict(result), "metrics": metrics, "slowest": slowest})
        summary.best = best_checkpoint(run_dir, config["objective"]["metric"])
        is_paused = result.interrupted == "pause"
        if result.interrupted and not is_paused:
            raise Interrupted(
                f"{why_stopped(result.interrupted, result.steps)}: go on with {typed('resume', shown_dir)}"
            )
        summary.status = "paused" if is_paused else "done"
    print(closing_lines(summary, shown_dir))  # noqa: T201
    metric = config["objective"]["metric"]
    return result.metrics.get(metric, summary.metrics.get(metric))


def _dry_run(config: dict[str, Any]) -> None:
    def show(record: Record) -> None:
        if isinstance(record.data, Start):
            print("\n".join(record.data.lines))  # noqa: T201

    inline.run("ddp_hydra.training.loop:dry_run", config, on_record=show)
