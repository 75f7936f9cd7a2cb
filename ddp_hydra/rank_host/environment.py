"""The environment variables of a rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddp_hydra.placement import RankSpec
from ddp_hydra.rank_host.warm import without_dasks_limits


def of_rank(spec: RankSpec, interface: str | None) -> dict[str, str]:
    """The worker's environment, plus what everyone expects to find in a rank's.

    Args:
        spec: the rank's place.
        interface: the network interface by which the ranks reach each other.
    """
    variables = without_dasks_limits(os.environ) | {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(spec.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "NODE_RANK": str(spec.node_rank),
        "GROUP_RANK": str(spec.node_rank),
    }
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # eth1 alone would mean eth10, too
    # dask-cuda has already put each worker's own GPU first; elsewhere the local rank does.
    if "dask_cuda" not in sys.modules and (gpus := visible_gpus(variables)):
        first = spec.local_rank % len(gpus)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
    return variables


def visible_gpus(variables: dict[str, str]) -> list[str]:
    """The GPUs that a process with these variables sees, counted without touching CUDA."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [gpu for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
