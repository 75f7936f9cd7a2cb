"""Computes the environment variables and the cores of a rank."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

from ddp_hydra.rank import gpus
from ddp_hydra.rank.fork_environment import without_dasks_limits
from ddp_hydra.rank.spec import JobSpec, RankSpec


def of_rank(
    job: JobSpec, spec: RankSpec, interface: str | None = None, error_file: str = "", gpu: int | None = None
) -> dict[str, str]:
    """Return the environment of a rank: that of the worker, plus the variables that torchrun sets.

    Args:
        job: of the rank.
        spec: the rank's place.
        interface: the network interface by which the ranks reach each other.
        error_file: where torch's `record` writes the error of a script.
        gpu: position of the rank's GPU among the visible ones; None for `preferred_gpu`.
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
        "TORCHELASTIC_RUN_ID": job.gang,
        "TORCHELASTIC_RESTART_COUNT": str(job.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.settings.max_restarts),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without =, eth1 would also mean eth10
    own = preferred_gpu(spec) if gpu is None else gpu
    # A script takes the GPU of its local rank.
    return variables | own_gpu_first(variables, own if job.makes_group else own - spec.local_rank)


def preferred_gpu(spec: RankSpec) -> int:
    """Return the position of the GPU that a rank takes if all are free; dask-cuda puts each worker's own first."""
    return 0 if is_placed() else spec.local_rank


def is_placed() -> bool:
    return "dask_cuda" in sys.modules


def seen_gpus() -> list[str]:
    """Return the GPUs that this worker's ranks can share among them; [] if each worker has its own already."""
    return [] if is_placed() else gpus.identities(os.environ)


def threads(total: int, ranks: int) -> int:
    """Return a rank's number of threads: its share of the host's cores, within those that its worker is bound to."""
    return max(1, min(len(cores()) or total, total // ranks))


def shared_cores(nanny: int | None) -> list[int]:
    """Return the cores that the ranks of this host share: dask-cuda binds a worker to some, but not its nanny.

    Args:
        nanny: process id of the worker's nanny; None without one.
    """
    found = set(cores())
    if nanny and found:
        with contextlib.suppress(OSError):
            found |= os.sched_getaffinity(nanny)
    return sorted(found)


def cores() -> list[int]:
    """Return the cores that this worker is bound to; [] on systems without such bindings.

    dask-cuda binds a worker to the cores near its GPU. It does so after the start, so only the main thread is bound.
    """
    return sorted(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else []


def own_gpu_first(variables: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variable with which each local rank sees its own GPU first; a negative number undoes it."""
    if not (seen := gpus.visible(variables)):
        return {}
    first = local_rank % len(seen)
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[first:] + seen[:first])}
