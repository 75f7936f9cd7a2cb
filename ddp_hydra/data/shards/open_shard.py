"""Shards that are mapped into memory."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path
from typing import Any

from ddp_hydra.data.shards.index import Shard, shown
from ddp_hydra.data.shards.tar_index import TarMembers, read_members


class OpenShard:
    """A shard that is mapped into memory; its file stays locked while any part of it is in use.

    Args:
        descriptor: of the tar file; the caller may close it.
        members: where the samples are in the file.
    """

    __slots__ = ("content", "members")

    def __init__(self, descriptor: int, members: TarMembers) -> None:
        # The mapping keeps a copy of the descriptor, and with it the lock.
        self.content = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def fields(self, index: int) -> dict[str, memoryview]:
        """Return the fields of a sample by extension, without a copy."""
        return self.members.fields(index, self.content)


class LocalShards:
    """Opens shards that are files of this machine, and remembers where their samples are."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[Any, TarMembers]] = {}

    def open(self, shard: Shard) -> OpenShard:
        """Open a shard.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, or not what the index says.
        """
        path = Path(shard.url)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"there is no shard {path} on {socket.gethostname()}: check data.index=... and data.base=..."
            ) from None
        try:
            status = os.fstat(descriptor)
            if shard.size not in (None, status.st_size):
                raise ValueError(f"{path} has {status.st_size:,} bytes, and the index says {shard.size:,}")
            stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            known, members = self._members.get(shard.url, (None, None))
            if members is None or known != stamp:
                members = checked(shard, read_members(path, descriptor))
                self._members[shard.url] = stamp, members
            return OpenShard(descriptor, members)
        finally:
            os.close(descriptor)


def checked(shard: Shard, members: TarMembers) -> TarMembers:
    """Return the members of a shard. More samples than the index says are no error: it stands for the first ones.

    Raises:
        ValueError: there are fewer samples than the index says.
    """
    if len(members) < shard.n_samples:
        raise ValueError(
            f"{shown(shard.url)} holds {len(members):,} samples, and the index says {shard.n_samples:,}: write the "
            "index again with python -m ddp_hydra.data.shards index"
        )
    return members
