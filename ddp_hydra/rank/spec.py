"""Describes a rank: its place in its gang, and all that a worker needs to run its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_hydra.config.project import Project


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's place in its gang.

    Args:
        rank: global rank, 0 … world_size - 1.
        world_size: number of ranks in the gang.
        local_rank: rank among those of the same host.
        local_world_size: number of ranks on that host.
        node_rank: number of the host, in order of rank.
        worker: address of the Dask worker that starts the rank; it may start several.
        host: the host's address, as the other workers reach it.
        nodes: number of hosts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    worker: str
    host: str
    nodes: int = 1


@dataclass(frozen=True)
class LaunchSpec:
    """Holds all that a worker needs to run its ranks.

    Args:
        gang: the gang's name, with its attempt; also the topic of its records.
        attempt: number of the gang's start.
        specs: the places of ranks; each worker starts its own.
        call: cloudpickle of (function or "module:name", args, kwargs).
        project: the packed project space, or None.
        backend: gloo, nccl or auto.
        timeout_s: of collectives.
        retry_s: how long to wait for room if the worker's temporary folder is full.
        group: whether to make the process group before the call.
        threads: CPU threads of each rank, 0 for its share of the host.
        data_workers: processes that make a rank's batches; None: the rank decides, if it has a GPU.
        ports: first and last port allowed for the rendezvous, None for any free one.
        interface: network interface by which the ranks reach each other, None for that of the workers' addresses.
        cwd: the client's folder, so that relative paths mean the same where the host has it too.
        owner: the gang's name, without its attempt.
        keep_warm_s: how long the host's fork server stays after its last rank.
        ranks_on_host: host -> how many ranks the sweep runs there at once; it shares the cores among as many, so that
            all its jobs get equally many threads. Empty outside of a sweep.
        stays: after a failure, the task waits for the launch of another attempt.
    """

    gang: str
    attempt: int
    specs: tuple[RankSpec, ...]
    call: bytes
    project: Project | None = None
    backend: str = "auto"
    timeout_s: float = 1800.0
    retry_s: float = 60.0
    group: bool = True
    threads: int = 0
    data_workers: int | None = 0
    ports: tuple[int, int] | None = None
    interface: str | None = None
    cwd: str = ""
    owner: str = ""
    keep_warm_s: float = 0.0
    ranks_on_host: Mapping[str, int] = field(default_factory=dict)
    stays: bool = False
