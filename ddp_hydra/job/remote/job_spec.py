"""What a driver is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_hydra.config.project import Project


@dataclass(frozen=True)
class JobSpec:
    """A job for a driver. It travels through Dask and a pipe, and is never on a disk.

    Args:
        name: of the driver; also the topic of what it says.
        url: of the results.
        plain: the config as plain values.
        kept: what checkpoints keep of the config.
        overrides: what it was composed with.
        project: the packed project space.
        hydra: files that Hydra has saved of the job, by name.
        cwd: the folder where the command was typed.
        client: the id of the command's client at the scheduler; None: the run goes on without it.
        sweep: on whose behalf workers are reserved.
        resume: the checkpoint to go on from, where the worker finds it; "" for none.
        lives: how many more drivers may follow, each when the one before is lost.
        again: there was one before.
    """

    name: str
    url: str
    plain: dict[str, Any]
    kept: dict[str, Any]
    overrides: tuple[str, ...]
    project: Project
    hydra: dict[str, bytes]
    cwd: str
    client: str | None
    sweep: str
    resume: str = ""
    lives: int = 0
    again: bool = False


@dataclass(frozen=True)
class Place:
    """Where a driver is; the worker knows it.

    Args:
        scheduler: its address, as workers reach it.
        security: of the worker's own connections.
        scratch: the folder for temporary files.
    """

    scheduler: str
    security: Any
    scratch: str
