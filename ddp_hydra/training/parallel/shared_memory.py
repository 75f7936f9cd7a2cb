"""Averages gradients of ranks on one host's CPUs in memory that all of them share.

Sockets copy each gradient into the kernel and out again, for each rank. Here each rank writes it once, and the others
read it there. Sums are in the order of ranks, whatever a gradient's place in its bucket.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

from ddp_hydra.rank.world import World
from ddp_hydra.training.consensus import FIELDS
from ddp_hydra.training.train_step import sparse_weights

MS = 1000


class HostBarrier:
    """Lets ranks wait for each other: each writes to descriptors of the others, and reads from its own."""

    def __init__(self, to: Mapping[int, int], of: Mapping[int, int], timeout_s: float) -> None:
        self.to, self.of, self.timeout_s = dict(to), dict(of), timeout_s
        self.arrivals = {rank: select.poll() for rank in of}
        for rank, fd in of.items():
            self.arrivals[rank].register(fd, select.POLLIN)

    @classmethod
    def between_all(cls, world: World) -> HostBarrier | None:
        # A collective.
        own = {rank: os.pipe() for rank in range(world.size) if rank != world.rank}
        offer = os.getpid(), {rank: (end, os.fstat(end).st_ino) for rank, (_, end) in own.items()}
        offers = world.gather_objects(offer)
        to = {rank: opened(pid, *ends[world.rank]) for rank, (pid, ends) in enumerate(offers) if rank in own}
        are_open = world.reduce(torch.tensor(None not in to.values()), dist.ReduceOp.MIN)
        for _, end in own.values():
            os.close(end)  # so a pipe ends with the rank that writes to it
        barrier = cls(
            {rank: end for rank, end in to.items() if end is not None},
            {rank: end for rank, (end, _) in own.items()},
            world.timeout_s,
        )
        if are_open:
            return barrier
        barrier.close()
        return None

    def wait(self) -> None:
        # A collective.
        for rank, end in self.to.items():
            try:
                os.write(end, b".")
            except BrokenPipeError:
                raise RuntimeError(f"connection closed by rank {rank}") from None
        for rank, end in self.of.items():
            if not self.arrivals[rank].poll(self.timeout_s * MS):
                raise RuntimeError(f"timed out waiting for rank {rank}, after {self.timeout_s:g} s")
            if not os.read(end, 1):
                raise RuntimeError(f"connection closed by rank {rank}")

    def close(self) -> None:
        for ends in (self.to, self.of):
            while ends:
                os.close(ends.popitem()[1])


def opened(pid: int, fd: int, inode: int) -> int | None:
    # In a container, the process number may belong to another process.
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        return os.open(path, os.O_WRONLY) if str(path.readlink()) == f"pipe:[{inode}]" else None
    except OSError:
        return None


class ZeroGradients(nn.Module):
    """Gives every parameter of a model a gradient of zero, the last parameter first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        trained = (part for part in self.model.parameters() if part.requires_grad)
        real = (torch.view_as_real(part) if part.is_complex() else part for part in trained)
        return torch.stack([(part * 0).sum() for part in real]).sum()


def prebuild_buckets(ddp: DistributedDataParallel, world: World) -> None:
    # With more than two ranks, a gradient's place in its bucket decides the order of the sum. A restarted run has to
    # sum as it would have without the restart.
    model = ddp.module
    if world.size > 2 and not sparse_weights(model):
        ddp.module = ZeroGradients(model)
        ddp().backward()
        ddp.module = model
        ddp.zero_grad(set_to_none=True)


ALIGN = 64
"""Buckets begin at multiples of this number of bytes."""
FEW_RANKS = 4
"""Up to this number of ranks, each rank sums the whole bucket itself: they meet once per bucket instead of twice."""


class SharedGradients:
    """The state of a DDP communication hook.

    Args:
        memory: (2, ranks, bytes) uint8, shared by all ranks: two halves, each with a row for each rank's numbers and
            gradients; see `bytes_of_numbers`.

    Attributes:
        is_weighed: the gradients of the last backward pass were multiplied by the factor of `send_along`.
    """

    def __init__(self, world: World, memory: torch.Tensor, barrier: HostBarrier) -> None:
        self.barrier = barrier
        self.rank, self.ranks = world.rank, world.size
        ends = bytes_of_numbers(self.ranks)
        self.numbers, self.arena = memory[..., :ends].view(torch.float64), memory[..., ends:]
        self.half, self.start, self.stop = 0, 0, 0  # where the last bucket lay
        self.half_of_numbers = 0
        self.held_s = 0.0  # how long the backward pass has waited in the hook
        self.factor_of: Callable[[], float] | None = None
        self.factor, self.is_weighed = 1.0, False
        self.begun: queue.SimpleQueue[torch.futures.Future[None] | None] = queue.SimpleQueue()

    @classmethod
    def of(cls, ddp: DistributedDataParallel, world: World) -> SharedGradients | None:
        # A collective.
        sizes = (part.numel() * part.element_size() for part in ddp.module.parameters() if part.requires_grad)
        n_bytes = bytes_of_numbers(world.size) + sum(-(-size // ALIGN) * ALIGN for size in sizes)
        memory = seen_by_all(2 * world.size * n_bytes, world)
        barrier = HostBarrier.between_all(world) if memory is not None else None
        if memory is None or barrier is None:
            return None
        shared = cls(world, memory.view(2, world.size, n_bytes), barrier)
        threading.Thread(target=serve, args=(shared.begun,), name="gradients", daemon=True).start()
        weakref.finalize(ddp, shared.begun.put, None)
        weakref.finalize(ddp, barrier.close)
        ddp.register_comm_hook(shared, hook)
        return shared

    def send_along(
        self, numbers: torch.Tensor, factor_of: Callable[[torch.Tensor], float] | None = None
    ) -> Callable[[], torch.Tensor]:
        # A collective. The ranks meet in each backward pass. When this rank writes to a half again, they have met since
        # all have read it.
        self.half_of_numbers ^= 1
        rows = self.numbers[self.half_of_numbers, :, : len(numbers)]
        rows[self.rank] = numbers
        self.factor_of = None if factor_of is None else lambda: factor_of(rows)
        return lambda: torch.amax(rows, 0, out=numbers)

    def place(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        # Buckets come in order. Another rank may still read the last bucket while this rank writes the next one. All
        # have read the bucket before the last one, because the ranks have met since.
        start = 0 if index == 0 else -(-self.stop // ALIGN) * ALIGN
        stop = start + gradients.numel() * gradients.element_size()
        if start < self.stop and self.start < stop:
            self.half ^= 1
        self.start, self.stop = start, stop
        return self.arena[self.half, :, start:stop].view(gradients.dtype)

    def average(self, rows: torch.Tensor, gradients: torch.Tensor, is_first: bool) -> torch.Tensor:
        # A collective.
        rows[self.rank].copy_(gradients)
        self.barrier.wait()  # then what all ranks wrote before can be read
        if is_first:
            self.find_factor()
        if self.ranks <= FEW_RANKS:
            return mean(rows.unbind(), gradients, self.factor)
        parts = [torch.tensor_split(row, self.ranks)[self.rank] for row in rows]
        mean(parts, parts[0], self.factor)
        self.barrier.wait()
        return gradients.copy_(rows[0])

    def find_factor(self) -> None:
        factor_of, self.factor_of = self.factor_of, None
        self.factor, self.is_weighed = 1.0, False
        with suppress(ValueError):  # which comes again where the numbers are used
            if factor_of is not None:
                self.factor, self.is_weighed = factor_of(), True


def bytes_of_numbers(ranks: int) -> int:
    return -(-8 * (FIELDS + ranks) // ALIGN) * ALIGN


def hook(shared: SharedGradients, bucket):  # DDP refuses annotations that are text
    gradients = bucket.buffer()
    rows, is_first = shared.place(bucket.index(), gradients), bucket.index() == 0
    if is_first and bucket.is_last():  # the backward pass is over: nothing else runs
        began = time.perf_counter()
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with record_function("shared:average") if torch.autograd._profiler_enabled() else nullcontext():
            averaged.set_result(shared.average(rows, gradients, is_first))
        shared.held_s += time.perf_counter() - began
        return averaged
    begun: torch.futures.Future[None] = torch.futures.Future()
    done = begun.then(lambda _: shared.average(rows, gradients, is_first))
    if torch.autograd._profiler_enabled():
        with record_function("shared:average") as span:
            done = span._call_end_callbacks_on_future(done)
    shared.begun.put(begun)
    return done


def serve(begun: queue.SimpleQueue[torch.futures.Future[None] | None]) -> None:
    while (bucket := begun.get()) is not None:
        bucket.set_result(None)


def mean(parts: Sequence[torch.Tensor], out: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    # `out` may be one of them, the first.
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    if factor == 1:
        out /= len(parts)
    else:
        out *= factor / len(parts)
    return out


def seen_by_all(n_bytes: int, world: World) -> torch.Tensor | None:
    # A collective.
    name = f"ddp_hydra-gradients-{secrets.token_hex(8)}"
    with new_memory(name, n_bytes) if world.rank == 0 else nullcontext("") as path:
        name, path = world.from_rank_0(lambda: (name, path))
        memory = mapped(name, path, n_bytes)
        seen = world.reduce(torch.tensor(memory is not None), dist.ReduceOp.MIN)
    return torch.frombuffer(memory, dtype=torch.uint8) if memory is not None and seen else None


@contextmanager
def new_memory(name: str, n_bytes: int) -> Iterator[str]:
    # The memory is freed when the last process that maps it has ended.
    with ExitStack() as stack:
        try:
            fd = os.memfd_create(name)
            stack.callback(os.close, fd)
            os.ftruncate(fd, n_bytes)  # fails where a limit on the size of files is lower
            path = f"/proc/{os.getpid()}/fd/{fd}"
        except (AttributeError, OSError):
            path = ""
        yield path


def mapped(name: str, path: str, n_bytes: int) -> mmap.mmap | None:
    # In a container, rank 0's process number may belong to another process.
    try:
        if not str(Path(path).readlink()).startswith(f"/memfd:{name}"):
            return None
        with Path(path).open("r+b", buffering=0) as file:
            return mmap.mmap(file.fileno(), n_bytes)
    except OSError:
        return None
