"""Runs the loggers of a job, and keeps the ids of their runs for a resume."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_hydra.config import loggers as config
from ddp_hydra.config import project
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.job.run_dir import is_resumed
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.loggers.base import FAILED, FINISHED, KILLED, RunInfo
from ddp_hydra.writers.loggers.sender import LoggerProcess

RUNS = "loggers.json"
"""The file of a run directory with the runs at the services: {"mlflow": {"id": …, "url": …}}."""
AWAY_S = 3.0
"""How long the end of a job waits for a logger whose service is away."""
KILLED_S = 10.0
"""How long the end of a job waits after Ctrl-C, so that the services learn of it; a second Ctrl-C ends the wait."""
NOTICE_S = 2.0
"""How long the end of a job waits for loggers before it says so."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedJob:
    """Holds what loggers need to know of a job. It travels to a driver, so it has no paths.

    Args:
        name: of the run.
        sweep: name of its sweep; "" for none.
        params: the parameters to log.
        earlier: the runs at the services that it continues, as in `RUNS`.
    """

    name: str
    sweep: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, dict[str, str]] = field(default_factory=dict)


def describe(cfg: DictConfig, run_dir: Path, url: str = "") -> LoggedJob:
    """Describe a job to its loggers, where the command was typed.

    Args:
        cfg: the composed config.
        run_dir: of the job.
        url: of its results, if they are not in the run directory.
    """
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    sweep = Path(str(HydraConfig.get().sweep.dir)) if is_sweep else None
    # Several jobs of a sweep may resume from one run; they are runs of their own.
    continues = cfg.resume and not cfg.results.new_logger_runs and (not is_sweep or is_resumed(run_dir, cfg.resume))
    earlier = read_runs(cfg.resume) if continues and cfg.results.loggers else {}
    name = short_name(url or str(run_dir.absolute()), 3 if is_sweep else 2)
    parameters = config.parameters(cfg) if cfg.results.loggers else {}
    return LoggedJob(name, short_name(str(sweep.absolute())) if sweep else "", parameters, earlier)


def short_name(path: str, parts: int = 2) -> str:
    """Return the end of a path or a URL: "2026-08-01/12-00-00-123456"."""
    found = [part for part in PurePosixPath(path).parts[-parts:] if part not in ("/", "outputs", "multirun")]
    return "/".join(found)


def read_runs(resume: str) -> dict[str, dict[str, str]]:
    """Return the runs at the services of the run that `resume` names; {} if it has none that can be read."""
    try:
        return msgspec.json.decode(RunRef.of(resume).read(RUNS, timeout_s=10), type=dict[str, dict[str, str]])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, ConfigError) as error:
        log.warning("%s of %s cannot be read (%s): the loggers begin new runs", RUNS, resume, error)
        return {}


def save_runs(run_dir: Path, runs: Mapping[str, dict[str, str]]) -> None:
    """Write `RUNS` of a run directory."""
    try:
        write_atomic(run_dir / RUNS, (json.dumps(runs, indent=2) + "\n").encode())
    except RecordError as error:
        log.warning("a resumed job will begin new runs at its loggers: %s", error)


@contextmanager
def session(
    cfg: DictConfig, run_dir: Path, job: LoggedJob, packed: project.Project | None = None
) -> Iterator[list[LoggerProcess]]:
    """Run the loggers of a job inside the block, and tell them at its end how the job ended.

    Args:
        cfg: the composed config.
        run_dir: where the results are written.
        job: as `describe` returns it.
        packed: the project space, if it is not that of this process.

    Yields:
        The loggers, which are writers that never fail or wait.

    Raises:
        ConfigError: a logger's package is missing.
    """
    nodes = config.nodes(cfg)
    if not nodes:
        yield []
        return
    config.check_installed(cfg)
    runs, lock = _earlier_runs(cfg, run_dir, job, in_driver=packed is not None), threading.Lock()
    if runs:
        save_runs(run_dir, runs)

    def note(name: str, run: dict[str, str]) -> None:
        with lock:
            runs[name] = run
            save_runs(run_dir, runs)

    def started(name: str, node: dict[str, Any]) -> LoggerProcess:
        roots: tuple[Path, ...] = ()
        if str(node["_target_"]).split(".")[0] in project.PACKAGES:
            roots = (packed.unpack(run_dir / ".project"),) if packed else project.layers()
        earlier = runs.get(name, {}).get("id", "")
        info = RunInfo(job.name, run_dir.absolute(), list(cfg.tags), job.sweep, job.params, earlier)
        order = {
            "node": node,
            "job": asdict(info) | {"run_dir": str(info.run_dir)},
            "roots": [str(root.absolute()) for root in roots],
        }
        log_file = run_dir / "logs" / f"{name}.log"
        return LoggerProcess(name, order, log_file, partial(note, name), cfg.results.loggers_timeout_s)

    senders: list[LoggerProcess] = []
    status = FAILED
    try:
        for name, node in nodes.items():
            senders.append(started(name, node))
        yield senders
        status = FINISHED
    except KeyboardInterrupt:
        status = KILLED
        raise
    finally:
        end(senders, status, cfg.results.loggers_timeout_s)


def _earlier_runs(cfg: DictConfig, run_dir: Path, job: LoggedJob, in_driver: bool) -> dict[str, dict[str, str]]:
    """Return the runs that a job continues; a driver sees more: the driver that it follows, and paths of its host."""
    if not in_driver:
        return dict(job.earlier)
    is_new = not cfg.resume or job.earlier or job.sweep or cfg.results.new_logger_runs
    return {**job.earlier, **({} if is_new else read_runs(cfg.resume)), **read_runs(str(run_dir))}


def end(senders: list[LoggerProcess], status: str, timeout_s: float) -> None:
    """Tell all loggers how the job ended, and wait for them a limited time; one Ctrl-C ends the wait.

    Args:
        senders: the loggers.
        status: how the job ended.
        timeout_s: how long to wait for all of them together.
    """
    began = time.monotonic()
    for sender in senders:
        sender.finish(status)
    try:
        for sender in senders:
            most_s = AWAY_S if sender.is_away else KILLED_S if status == KILLED else timeout_s
            limit_s = min(timeout_s, most_s)
            if limit_s > NOTICE_S and not sender.has_ended(began + NOTICE_S):
                log.info("waiting up to %g s for %s to send what it has; Ctrl-C ends that", limit_s, sender.name)
            if missing := sender.wait(began + limit_s):
                log.warning(
                    "%s has not all records of this job: %s. The run directory has them; more time is given with "
                    "results.loggers_timeout_s=<seconds>",
                    sender.name,
                    missing,
                )
    finally:
        for sender in senders:
            with contextlib.suppress(Exception):
                sender.kill()
