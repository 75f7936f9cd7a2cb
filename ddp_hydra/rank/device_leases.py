"""The GPU and the cores that each rank of this host has taken, so that gangs on one host share them out.

A rank's lease is a file in the runtime folder, locked as long as its relay lives. So a process that dies gives its
lease back by that; whoever looks next removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_hydra.rank import fork_client


@dataclass(frozen=True)
class Lease:
    """What a rank has taken.

    Args:
        gang: whose rank it is, without the attempt.
        ranks: how many ranks of the gang are on this host.
        cores: those that the gang's ranks here share; empty where that is not known.
        gpu: the GPU's UUID, or "".
    """

    gang: str
    ranks: int
    cores: tuple[int, ...] = ()
    gpu: str = ""

    def meets(self, cores: Collection[int]) -> bool:
        """Whether it uses some of these cores."""
        return not self.cores or not cores or not set(self.cores).isdisjoint(cores)


@dataclass(frozen=True)
class Share:
    """What a rank may use.

    Args:
        position: of its GPU among those that it sees, or None.
        others_on_gpu: ranks of other gangs that have the same GPU.
        other_ranks: ranks of other gangs that share its cores.
    """

    position: int | None
    others_on_gpu: int
    other_ranks: int


@contextmanager
def take(gang: str, ranks: int, cores: Sequence[int], gpus: Sequence[str], preferred: int) -> Iterator[Share]:
    """Take a GPU and a share of the cores for a rank, as long as the block lasts.

    Args:
        gang: whose rank it is, without the attempt.
        ranks: how many ranks of the gang are on this host.
        cores: those that they share.
        gpus: UUIDs of those that it sees; only these are taken.
        preferred: position of the one to take where several are as free.
    """
    folder = fork_client.runtime_folder()
    path = folder / f"{secrets.token_hex(8)}.lease"
    with contextlib.ExitStack() as stack:
        with fork_client.locked(folder):
            taken = find(folder)
            position = choose(gang, taken, gpus, preferred)
            gpu = "" if position is None else gpus[position]
            lease = Lease(gang, ranks, tuple(cores), gpu)
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            stack.callback(give_back, path, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, json.dumps(asdict(lease)).encode())
        others = [other for other in taken if other.gang != gang]
        yield Share(position, sum(other.gpu == gpu for other in others if gpu), count(others, cores))


def count(others: Sequence[Lease], cores: Collection[int]) -> int:
    """Return how many ranks of other gangs share some of the cores; of a gang that is just starting, all count."""
    gangs: dict[str, int] = {}
    for other in others:
        if other.meets(cores):
            gangs[other.gang] = max(other.ranks, gangs.get(other.gang, 0))
    return sum(gangs.values())


def choose(gang: str, taken: Sequence[Lease], gpus: Sequence[str], preferred: int) -> int | None:
    """Return the position of the GPU that fewest have, first of all fewest of the same gang."""
    if not gpus:
        return None

    def burden(position: int) -> tuple[int, int, bool, int]:
        mine = sum(lease.gpu == gpus[position] and lease.gang == gang for lease in taken)
        all_of_them = sum(lease.gpu == gpus[position] for lease in taken)
        return mine, all_of_them, position != preferred % len(gpus), position

    return min(range(len(gpus)), key=burden)


def find(folder: Path) -> list[Lease]:
    """Return the leases of all that live, and remove those of the dead; called with the folder locked."""
    found = []
    for path in folder.glob("*.lease"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(ValueError, TypeError):
                    said = json.loads(file.read())
                    found.append(Lease(**{**said, "cores": tuple(said["cores"])}))
            else:
                path.unlink()
    return found


def give_back(path: Path, handle: int) -> None:
    """Remove a lease, and the folder where it was the last thing in it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with fork_client.locked(path.parent):
            path.parent.rmdir()
    os.close(handle)
