"""The process group of the ranks: where they meet, by what they exchange tensors, and how they leave it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_hydra import results
from ddp_hydra.errors import ConfigError


def meet(rank: int, host: str, port: int, timeout_s: float = 1800.0, listener_fd: int | None = None) -> dist.Store:
    """Connect to the store that rank 0 serves, as a script does that makes its own process group."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store exists: nobody else must serve one at this port
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener_fd)


@contextmanager
def process_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    backend: str = "auto",
    timeout_s: float = 1800.0,
    init: bool = True,
) -> Iterator[None]:
    """Join the gang and its process group; leave them after the block.

    Args:
        store: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        backend: gloo, nccl, or auto: see `choose_backend`.
        timeout_s: of collectives, also of other groups that are made inside the block.
        init: whether to make the process group; otherwise the code inside the block does.
    """
    timeout = timedelta(seconds=timeout_s)
    with default_timeout(timeout):
        if init:
            if torch.cuda.is_available() and backend != "gloo":
                torch.cuda.set_device(0)  # each rank sees its own GPU first
            if backend == "auto":
                backend = choose_backend(store, rank, world_size)
            elif "nccl" in backend:
                check_gpu_is_own(store, rank, world_size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        store.add("ddp_hydra/joined", 1)
        while rank == 0 and not init and store.add("ddp_hydra/joined", 0) < world_size:
            time.sleep(0.005)  # a script may end by os._exit, and the store with it
        yield
        # Not in a `finally`: a rank that failed must not wait for others, and must not hide its error.
        while store.add("ddp_hydra/joined", 0) < world_size:
            time.sleep(0.005)  # ranks that still connect would take the end of this one for a crash
        store.add("ddp_hydra/done", 1)
        while rank == 0 and store.add("ddp_hydra/done", 0) < world_size:
            time.sleep(0.005)  # rank 0 serves the store, so it leaves last
        leave_process_group()


def choose_backend(store: dist.Store, rank: int, world_size: int) -> str:
    """Return gloo, with NCCL for tensors on GPUs where each rank has one of its own. A collective."""
    uses_gpu = torch.cuda.is_available()
    if uses_gpu and (uuid := gpu_uuid()) is not None and store.add(f"ddp_hydra/gpu/{uuid}", 1) > 1:
        store.add("ddp_hydra/gpu_shared", 1)
    store.add("ddp_hydra/gpus_named", 1)
    if not uses_gpu:
        return "gloo"
    while store.add("ddp_hydra/gpus_named", 0) < world_size:
        time.sleep(0.002)
    if not store.add("ddp_hydra/gpu_shared", 0):
        return "cpu:gloo,cuda:nccl"
    if rank == 0:
        results.warn("ranks share a GPU, so gradients go by gloo, which is slower: give as many workers as GPUs")
    return "gloo"


def check_gpu_is_own(store: dist.Store, rank: int, world_size: int) -> None:
    """Check that a rank has a GPU that no other has. NCCL's error would not say so, and would cause another attempt.

    Raises:
        ConfigError: there is none, or another rank has it; says what to give instead.
    """
    if not torch.cuda.is_available():
        where = f"{socket.gethostname()}, where rank {rank} is"
        raise ConfigError(f"dispatch.backend=nccl, but {where}, has no GPU for torch: give dispatch.backend=auto")
    uuid = gpu_uuid()
    if world_size == 1 or uuid is None or store.add(f"ddp_hydra/gpu/{uuid}", 1) == 1:
        return
    here, ranks = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", "several")
    raise ConfigError(
        f"rank {rank} on {socket.gethostname()} has the same GPU as another rank ({uuid}), and NCCL takes each once: "
        f"this host has {ranks} ranks that see {here} GPU{'s' * (here != 1)}. Give as many workers as there are GPUs, "
        f"on a single host dispatch.ranks={here}, or dispatch.backend=gloo, or trainer.device=cpu"
    )


def gpu_uuid() -> str | None:
    """Return the UUID of this rank's GPU; None if torch does not know it."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return None if uuid is None else str(uuid)


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    vars(distributed_c10d).update(dict.fromkeys(names, timeout))
    try:
        yield
    finally:
        vars(distributed_c10d).update(before)


def current_timeout() -> timedelta:
    return distributed_c10d.default_pg_timeout


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
