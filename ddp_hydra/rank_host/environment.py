"""The environment variables of a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ddp_hydra.placement import RankSpec
from ddp_hydra.rank_host.warm import without_dasks_limits


def of_rank(
    spec: RankSpec, interface: str | None, gang: str = "", attempt: int = 0, group: bool = True
) -> dict[str, str]:
    """The worker's environment, plus what everyone expects to find in a rank's: what torchrun sets.

    Args:
        spec: the rank's place.
        interface: the network interface by which the ranks reach each other.
        gang: the gang's name, with its attempt.
        attempt: which start of the gang.
        group: whether the rank finds its process group; a script that makes it takes the GPU with its local rank.
    """
    variables = without_dasks_limits(os.environ) | {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(spec.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "NODE_RANK": str(spec.node_rank),
        "GROUP_RANK": str(spec.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nodes),
        "ROLE_RANK": str(spec.rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": gang,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # eth1 alone would mean eth10, too
    if "dask_cuda" not in sys.modules:  # it has already put each worker's own GPU first
        variables |= own_gpu_first(variables, spec.local_rank)
    if not group:
        variables |= own_gpu_first(variables, -spec.local_rank)
    return variables


def cores() -> list[int]:
    """Return the cores that this worker is bound to, as dask-cuda does to those beside its GPU; [] on other systems.

    A worker is bound after its start, so threads that were there before are not: its main thread counts.
    """
    return sorted(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else []


def own_gpu_first(variables: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variable that has each local rank see its own GPU first; a negative number undoes it."""
    if not (gpus := visible_gpus(variables)):
        return {}
    first = local_rank % len(gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])}


def visible_gpus(variables: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with these variables sees, counted without touching CUDA."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [gpu for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
