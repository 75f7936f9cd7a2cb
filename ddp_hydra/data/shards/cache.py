"""Opens shards: those of this machine where they are, all others from a cache on the local disk."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ddp_hydra.data.shards.cached_shards import GIB, CachedShards
from ddp_hydra.data.shards.download import is_packed
from ddp_hydra.data.shards.index import Shard, is_local
from ddp_hydra.data.shards.tar_index import OpenShard, TarMembers, checked, read_members
from ddp_hydra.storage import Access, bare_url


class ShardCache:
    """Opens the shards of an index, and keeps those from elsewhere on the local disk.

    All processes of a host share the folder. Each shard is downloaded once, by the process that needs it first, and
    gets its name only when it is complete and verified. A shard that is needed now waits for its space and evicts
    others. A shard that is fetched in the background never waits and evicts only what is not needed any more. The
    cache can be pickled at any time, and used by many threads.

    Args:
        shards: the shards of the index.
        folder: the cache folder; None: ddp_hydra/shards in the user's cache folder (XDG_CACHE_HOME) of each host.
        budget_bytes: the most that the folder may hold, shards of other indexes included.
        prefetch: how many shards are downloaded before they are needed.
        access: how URLs are read.

    Attributes:
        held: {number: open shard}.
        counts: downloads, bytes_downloaded, hits (the shard was on the disk when it was opened), misses, waited_s
            (time spent on opening shards).

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        folder: str | Path | None = None,
        budget_bytes: int = 50 * GIB,
        *,
        prefetch: int = 4,
        access: Access | None = None,
    ) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"cache_gb is {budget_bytes / GIB:g}, and must be above 0: type data.cache_gb=50")
        if prefetch < 0:
            raise ValueError(f"prefetch_shards is {prefetch}, and must be 0 or more: type data.prefetch_shards=4")
        self.shards = tuple(shards)
        self.access = access or Access(setting="data.index")
        self._settings = folder, budget_bytes, prefetch, self.access
        # The name of each shard in the cache; None: it is used where it is.
        self._names = [
            None if is_local(shard.url) and not is_packed(shard.url) else _file_name(shard, self.access.endpoint_url)
            for shard in self.shards
        ]
        self._set_process_state()

    def _set_process_state(self) -> None:
        self.held: dict[int, OpenShard] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._bad: dict[int, tuple[type[ValueError | FileNotFoundError], str]] = {}
        self._local_members: dict[str, tuple[Any, TarMembers]] = {}
        self._cached = CachedShards(self.shards, self._names, *self._settings, self._close_others)
        self.counts = self._cached.counts
        self._max_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("shards", "access", "_settings", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_process_state()

    def open(self, number: int) -> OpenShard:
        if (held := self.held.get(number)) is not None:
            return held
        self._check_process()
        self.note_started(number)  # the next shards need not wait for this one
        with self._opening.setdefault(number, threading.Lock()):
            if (held := self.held.get(number)) is not None:
                return held
            if number in self._bad:
                kind, message = self._bad[number]
                raise kind(message)
            started = time.monotonic()
            try:
                is_cached = self._names[number] is not None
                shard = self._cached.open(number) if is_cached else self._open_local(self.shards[number])
            except (ValueError, FileNotFoundError) as error:
                self._bad[number] = ValueError if isinstance(error, ValueError) else FileNotFoundError, str(error)
                raise
            finally:
                self._cached.count(waited_s=time.monotonic() - started)
            with self._lock:
                self.held[number] = shard
                newest = list(self.held)[-self._max_open :]
        self._close_others(newest)
        return shard

    def _open_local(self, shard: Shard) -> OpenShard:
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
            known, members = self._local_members.get(shard.url, (None, None))
            if members is None or known != stamp:
                members = checked(shard, read_members(path, descriptor))
                self._local_members[shard.url] = stamp, members
            return OpenShard(descriptor, members)
        finally:
            os.close(descriptor)

    def expect(self, order: Sequence[int]) -> None:
        # Say which shards will be needed, so that they are downloaded before that.
        # order: their numbers in the order of their use, each once.
        self._check_process()
        needed = [number for number in order if self._names[number] is not None]
        self._cached.prefetcher.expect(needed)
        if needed and self._cached.prefetcher.depth:
            self._cached.prefetcher.start()

    def note_started(self, number: int) -> None:
        self._cached.prefetcher.note_started(number)

    def note_done(self, number: int) -> None:
        if self._names[number] is not None:
            with self._lock:
                self.held.pop(number, None)
            self._cached.note_done(number)

    def close(self) -> None:
        self.access.close()
        self._cached.close()
        self._close_others(())

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # this process was forked: the parent's threads do not run here
            self._set_process_state()

    def _close_others(self, kept: Container[int]) -> None:
        with self._lock:
            for number in [number for number in self.held if number not in kept]:
                del self.held[number]


def _file_name(shard: Shard, endpoint_url: str | None) -> str:
    # Return the name of a shard's file: a different one for each URL, store, size and MD5.
    endpoint = endpoint_url if shard.url.startswith("s3:") else None
    identity = "\n".join(map(str, (shard.url, endpoint, shard.size, shard.md5)))
    readable = re.sub(r"[^\w.-]", "_", bare_url(shard.url).rpartition("/")[2], flags=re.ASCII)
    readable = re.sub(r"(\.tar(\.gz)?|\.tgz)$", "", readable)[-60:]
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}-{readable}.tar"
