"""Shards that are mapped into memory."""

from __future__ import annotations

import mmap

from ddp_hydra.data.shards.index import Shard
from ddp_hydra.data.shards.tar_index import TarMembers
from ddp_hydra.storage import shown


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

    def fields(self, index: int) -> dict[str, memoryview]:
        """Return the fields of a sample by extension, without a copy."""
        return self.members.fields(index, self.content)


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
