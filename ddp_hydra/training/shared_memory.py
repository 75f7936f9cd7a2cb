"""Gradients of ranks that compute on one host's CPUs: averaged in memory that all of them see.

Sockets copy each gradient into the kernel and out of it again, and again for each rank; here it is written once, and
the others read it where it lies. Sums are in order of rank, wherever a gradient lies in its bucket.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

ALIGN = 64
"""A bucket begins at a multiple of so many bytes."""
FEW = 4
"""Up to so many ranks, each adds up all gradients by itself: then they meet once, not twice."""


class SharedGradients:
    """A communication hook of DDP.

    Args:
        arena: (2, ranks, bytes) of uint8, seen by all ranks: a row for each rank's gradients, twice.
        group: the ranks, with gloo.
    """

    def __init__(self, arena: torch.Tensor, group: Any) -> None:
        self.arena, self.group = arena, group
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.half, self.start, self.stop = 0, 0, 0  # where the last bucket lay
        self.tick = torch.zeros(1)
        self.begun: queue.SimpleQueue[torch.futures.Future[None] | None] = queue.SimpleQueue()

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> SharedGradients | None:
        """Have a model's gradients averaged so; None where not all ranks can see the same memory. A collective."""
        sizes = (part.numel() * part.element_size() for part in ddp.module.parameters() if part.requires_grad)
        n_bytes = sum(-(-size // ALIGN) * ALIGN for size in sizes)
        group = dist.new_group(backend="gloo")
        arena = seen_by_all(2 * dist.get_world_size() * n_bytes, group)
        if arena is None:
            dist.destroy_process_group(group)
            return None
        shared = cls(arena.view(2, dist.get_world_size(), n_bytes), group)
        threading.Thread(target=serve, args=(shared.begun,), name="gradients", daemon=True).start()
        weakref.finalize(ddp, shared.begun.put, None)
        ddp.register_comm_hook(shared, hook)
        return shared

    def place(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        """The (ranks, n) elements of a bucket, free to be written.

        Buckets come in order. A rank may still read the last one while this one writes the next; that all have read
        the one before the last is known, for they have met since.
        """
        start = 0 if index == 0 else -(-self.stop // ALIGN) * ALIGN
        stop = start + gradients.numel() * gradients.element_size()
        if start < self.stop and self.start < stop:
            self.half ^= 1
        self.start, self.stop = start, stop
        return self.arena[self.half, :, start:stop].view(gradients.dtype)

    def average(self, rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        """Replace a bucket by its mean over the ranks. A collective."""
        rows[self.rank].copy_(gradients)
        self.meet()
        if self.ranks <= FEW:
            return mean(rows.unbind(), out=gradients)
        parts = [torch.tensor_split(row, self.ranks)[self.rank] for row in rows]
        mean(parts, out=parts[0])
        self.meet()
        return gradients.copy_(rows[0])

    def meet(self) -> None:
        """Wait until all ranks are here; what they wrote before can be read then. A collective."""
        dist.all_reduce(self.tick, group=self.group)


def hook(shared: SharedGradients, bucket):  # DDP refuses annotations that are text
    """Begin to average a bucket; a future of it."""
    gradients = bucket.buffer()
    rows = shared.place(bucket.index(), gradients)
    begun: torch.futures.Future[None] = torch.futures.Future()
    done = begun.then(lambda _: shared.average(rows, gradients))
    if torch.autograd._profiler_enabled():
        with record_function("shared:average") as span:
            done = span._call_end_callbacks_on_future(done)
    shared.begun.put(begun)
    return done


def serve(begun: queue.SimpleQueue[torch.futures.Future[None] | None]) -> None:
    """Do the work of buckets, one after the other, beside the backward pass."""
    while (bucket := begun.get()) is not None:
        bucket.set_result(None)


def mean(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The mean of several tensors; `out` may be one of them, the first."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    out /= len(parts)
    return out


def seen_by_all(n_bytes: int, group: Any) -> torch.Tensor | None:
    """Memory of rank 0 that all ranks of the group map; None where some can't. A collective."""
    name = f"ddp_hydra-gradients-{secrets.token_hex(8)}"
    with new_memory(name, n_bytes) if dist.get_rank() == 0 else nullcontext("") as path:
        told = [(name, path)]
        dist.broadcast_object_list(told, 0, group=group)
        memory = mapped(*told[0], n_bytes)
        seen = torch.tensor(memory is not None)
        dist.all_reduce(seen, dist.ReduceOp.MIN, group=group)
    return torch.frombuffer(memory, dtype=torch.uint8) if memory is not None and seen else None


@contextmanager
def new_memory(name: str, n_bytes: int) -> Iterator[str]:
    """The path of memory without a place in any file system; "" where the system has none.

    It goes with the last process that maps it, however that ends.
    """
    try:
        fd = os.memfd_create(name)
    except (AttributeError, OSError):
        yield ""
        return
    try:
        os.ftruncate(fd, n_bytes)
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def mapped(name: str, path: str, n_bytes: int) -> mmap.mmap | None:
    """Memory of that name, where a process has it open; None if it isn't there.

    In a container, rank 0's process number may be that of another process.
    """
    try:
        if not str(Path(path).readlink()).startswith(f"/memfd:{name}"):
            return None
        with Path(path).open("r+b", buffering=0) as file:
            return mmap.mmap(file.fileno(), n_bytes)
    except OSError:
        return None
