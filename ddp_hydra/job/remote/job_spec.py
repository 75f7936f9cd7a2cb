"""Describe a job to a driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_hydra.config.project import Project
from ddp_hydra.job.loggers import LoggedJob


@dataclass(frozen=True)
class JobSpec:
    """Describe a job to a driver. It is sent through Dask and a pipe, and never written to a disk.

    Args:
        name: the driver's name, which is also the topic of its messages.
        url: the URL of the results.
        config: the config as plain values.
        saved_config: the config as checkpoints contain it.
        overrides: the overrides it was composed with.
        project: the packed project space.
        hydra_files: the files that Hydra has saved of the job, by name.
        cwd: the folder where the command was typed.
        client: the id of the command's client at the scheduler; None: the run goes on without the command.
        sweep: the sweep that workers are reserved for.
        logged: the job as loggers see it.
        resume: the checkpoint to resume from, as the worker finds it; "" for none.
        max_restarts: how many more drivers may follow, each when the one before is lost.
        is_restart: whether another driver has run this job before.
    """

    name: str
    url: str
    config: dict[str, Any]
    saved_config: dict[str, Any]
    overrides: tuple[str, ...]
    project: Project
    hydra_files: dict[str, bytes]
    cwd: str
    client: str | None
    sweep: str
    logged: LoggedJob
    resume: str = ""
    max_restarts: int = 0
    is_restart: bool = False


@dataclass(frozen=True)
class DriverContext:
    """Carry what a driver needs to know from the worker that starts it.

    Args:
        scheduler: address of the scheduler, as workers reach it.
        security: of the worker's own connections.
        scratch: the folder for temporary files.
    """

    scheduler: str
    security: Any
    scratch: str
