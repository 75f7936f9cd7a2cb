"""Leases GPUs and cores of this host to ranks, so that several gangs share them.

A lease is a file in the runtime folder. It is locked while its rank's worker runs the rank, so the death of the worker
ends the lease; the next process that looks removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddp_hydra.checked import prepare
from ddp_hydra.rank import fork_client
from ddp_hydra.storage.files import try_lock, unlock


@dataclass(frozen=True)
class Lease:
    """The GPU and the cores that a rank has leased.

    Args:
        gang: name of its gang, without the attempt.
        ranks: how many ranks of the gang are on this host.
        cores: that the gang's ranks on this host share; empty if they are not known.
        gpu: the GPU's UUID, or "".
    """

    gang: str
    ranks: int
    cores: tuple[int, ...] = ()
    gpu: str = ""


@dataclass(frozen=True)
class Share:
    """The GPU that a rank may use, and how many ranks share what it has.

    Args:
        position: of its GPU among the visible ones, or None.
        others_on_gpu: ranks of other gangs that have the same GPU.
        other_ranks: ranks of other gangs that share its cores.
    """

    position: int | None
    others_on_gpu: int
    other_ranks: int


@contextmanager
def acquire(gang: str, ranks: int, cores: Sequence[int], gpus: Sequence[str], preferred: int) -> Iterator[Share]:
    """Lease a GPU and a share of the cores to a rank, until the block ends.

    Args:
        gang, ranks, cores: see `Lease`.
        gpus: UUIDs of the visible GPUs; only these are leased.
        preferred: position of the GPU to lease if several have equally few leases.
    """
    folder = fork_client.runtime_folder()
    path = folder / f"{secrets.token_hex(8)}.lease"
    with contextlib.ExitStack() as stack:
        with fork_client.locked(folder):
            leases = find(folder)
            position = choose(gang, leases, gpus, preferred)
            gpu = "" if position is None else gpus[position]
            lease = Lease(gang, ranks, tuple(cores), gpu)
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            stack.callback(_release, path, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, msgspec.json.encode(lease))
        others = [other for other in leases if other.gang != gang]
        yield Share(position, sum(other.gpu == gpu for other in others if gpu), count(others, cores))


def count(others: Sequence[Lease], cores: Collection[int]) -> int:
    """Return how many ranks of other gangs share some of the cores; ranks of a gang that is just starting all count."""
    gangs: dict[str, int] = {}
    for other in others:
        if not other.cores or not cores or not set(other.cores).isdisjoint(cores):
            gangs[other.gang] = max(other.ranks, gangs.get(other.gang, 0))
    return sum(gangs.values())


def choose(gang: str, leases: Sequence[Lease], gpus: Sequence[str], preferred: int) -> int | None:
    """Return the position of the GPU with the fewest leases: first of the same gang, then of all."""
    own, total = Counter(lease.gpu for lease in leases if lease.gang == gang), Counter(lease.gpu for lease in leases)
    loads = [(own[gpu], total[gpu], n != preferred % len(gpus), n) for n, gpu in enumerate(gpus)]
    return min(loads)[-1] if loads else None


def find(folder: Path) -> list[Lease]:
    """Return the leases of live processes and remove all others; called while the folder is locked."""
    found = []
    for path in folder.glob("*.lease"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            if try_lock(file.fileno()):
                path.unlink()
                continue
            with contextlib.suppress(ValueError):
                found.append(msgspec.json.decode(file.read(), type=Lease))
    return found


def _release(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with fork_client.locked(path.parent):
            path.parent.rmdir()
    unlock(handle)


prepare(Lease)
