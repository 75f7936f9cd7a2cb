"""The world of a rank: one generation of its gang's process group.

A world owns its process groups. What holds one (DDP, shared gradients, votes) is built for a world and ends with it; a
process may live through several worlds, one after the other.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_hydra import results
from ddp_hydra.errors import ConfigError

SMALL = 4096
"""Bytes of a value that takes one exchange."""


@dataclass(eq=False, frozen=True)
class World:
    """The ranks that train together, as one of them sees them.

    Args:
        rank: of this process.
        size: number of ranks.
        local_size: number of ranks on this host.
        group: the process group; None for the only rank of a world, or if the call makes its group itself.
        cpu_group: the group for tensors on the CPU; it is `group`, if that has gloo.
        backend: of the group; "" without one.
        timeout_s: of collectives.
        generation: how many worlds the gang had before.
        kept: what this process keeps from one world for the next.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    group: Any = None
    cpu_group: Any = None
    backend: str = ""
    timeout_s: float = 1800.0
    generation: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def is_on_one_host(self) -> bool:
        return self.local_size == self.size

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks. A collective.

        Small values take one exchange, where torch's own function makes two.
        """
        if self.size == 1:
            return [value]
        content = pickle.dumps(value)
        content = content if len(content) <= SMALL else pickle.dumps(...)
        row = torch.zeros(SMALL, dtype=torch.uint8)
        row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self.cpu_group)
        found = [pickle.loads(bytes(one.numpy())) for one in rows]  # noqa: S301
        if any(one is ... for one in found):
            dist.all_gather_object(found, value, group=self.cpu_group)
        return found

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Return what rank 0 makes. A collective."""
        if self.size == 1:
            return make()
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]

    def send(self, make: Callable[[], Any], source: int = 0) -> Any:
        """Return a state that one rank makes: plain values, and tensors on the CPU. A collective.

        Large tensors are sent one by one. Only the rest is pickled.
        """
        if self.size == 1:
            return make()
        tensors: list[torch.Tensor] = []
        if self.rank == source:
            content, frame = make(), io.BytesIO()
            _Frame(frame, tensors).dump(content)
            box = [frame.getvalue()]
        else:
            box = [b""]
        dist.broadcast_object_list(box, src=source, group=self.cpu_group)
        if self.rank != source:
            content = _Filled(io.BytesIO(box[0]), tensors).load()
        for tensor in tensors:
            dist.broadcast(as_bytes(tensor), src=source, group=self.cpu_group)
        return content

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a tensor over all ranks, in place. A collective."""
        if self.size > 1:
            dist.all_reduce(tensor, op, group=self.cpu_group if tensor.device.type == "cpu" else self.group)
        return tensor

    def send_from_rank_0(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with the values of rank 0. A collective."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self.cpu_group if tensor.device.type == "cpu" else self.group)


class _Frame(pickle.Pickler):
    """Pickles a value without its large tensors, which it collects in their order; small ones are bytes.

    A tensor that lies at several places is one tensor again.
    """

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.seen: dict[int, tuple[int, torch.Tensor]] = {}  # by id; while a tensor is held, no other has its id

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return None
        if (seen := self.seen.get(id(value))) is not None:
            return seen[0]
        self.seen[id(value)] = len(self.seen), value
        sent = dense(value.detach())
        layout = sent.dtype, tuple(sent.shape), sent.stride()
        if sent.nbytes <= SMALL:  # pickle knows no storage of some types, and takes the whole storage of a part
            return *layout, as_bytes(sent).numpy().tobytes()
        self.tensors.append(sent)
        return *layout, None


class _Filled(pickle.Unpickler):
    """Reads what `_Frame` has written, with empty tensors, which it collects."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.seen: list[torch.Tensor] = []

    def persistent_load(self, described: Any) -> torch.Tensor:
        if isinstance(described, int):
            return self.seen[described]
        dtype, shape, stride, content = described
        tensor = torch.empty_strided(shape, stride, dtype=dtype)  # in another layout, an optimizer rounds otherwise
        self.seen.append(tensor)
        if content is None:
            self.tensors.append(tensor)
        elif content:
            as_bytes(tensor).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor lie side by side, in any order of its axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its elements, each once: the same one if it does."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain if is_dense(plain) else plain.contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as (bytes,) uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def in_world(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that gets its rank's `World` as its first argument; other functions use torch's own calls."""
    function.in_world = True  # type: ignore[attr-defined]
    return function


ALONE = World()
"""The world of a process without a gang."""


def meet(rank: int, host: str, port: int, timeout_s: float = 1800.0, listener_fd: int | None = None) -> dist.Store:
    """Connect to the store that rank 0 serves, as a script does that makes its own process group."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store exists: nobody else must serve one at this port
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener_fd)


@contextmanager
def joined(
    store: dist.Store,
    rank: int,
    size: int,
    local_size: int = 1,
    backend: str = "auto",
    timeout_s: float = 1800.0,
    makes_group: bool = True,
    generation: int = 0,
    kept: dict[str, Any] | None = None,
) -> Iterator[World]:
    """Join a world and its process group; leave them after the block.

    Args:
        backend: gloo, nccl, or auto: see `choose_backend`.
        timeout_s: of collectives, also of other groups that are made inside the block.
        makes_group: whether to make the process group; otherwise the code inside the block does.
    """
    timeout = timedelta(seconds=timeout_s)
    with default_timeout(timeout):
        group, cpu_group, used = None, None, ""
        if makes_group:
            if torch.cuda.is_available() and backend != "gloo":
                torch.cuda.set_device(0)  # each rank sees its own GPU first
            if backend == "auto":
                backend = choose_backend(store, rank, size)
            elif "nccl" in backend:
                check_gpu_is_own(store, rank, size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            group, used = dist.group.WORLD, str(dist.get_backend_config())
            if size > 1:
                cpu_group = group if "gloo" in used else dist.new_group(backend="gloo")
        store.add("ddp_hydra/joined", 1)
        while rank == 0 and not makes_group and store.add("ddp_hydra/joined", 0) < size:
            time.sleep(0.005)  # a script may end by os._exit, and the store with it
        own = {} if kept is None else kept
        yield World(rank, size, local_size, group, cpu_group, used, timeout_s, generation, own)
        # Not in a `finally`: a rank that failed must not wait for others, and must not hide its error.
        while store.add("ddp_hydra/joined", 0) < size:
            time.sleep(0.005)  # ranks that still connect would take the end of this one for a crash
        store.add("ddp_hydra/done", 1)
        while rank == 0 and store.add("ddp_hydra/done", 0) < size:
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
    """Check that a rank has a GPU that no other has. NCCL's error would not say so, and would cause another attempt."""
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


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
