"""Describes a rank's place in its gang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's place in its gang.

    Args:
        rank: global rank, 0 … world_size - 1.
        world_size: number of ranks in the gang.
        local_rank: rank among those of the same host.
        local_world_size: number of ranks on that host.
        node_rank: number of the host, in order of rank.
        worker: address of the Dask worker that starts the rank.
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
