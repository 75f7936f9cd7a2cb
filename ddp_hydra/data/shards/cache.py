"""Opens shards: local ones where they are, all others from a cache on the local disk."""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import math
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddp_hydra.console.text import expanded
from ddp_hydra.data.names import check_range
from ddp_hydra.data.shards.cache_folder import ShardFolder, with_index
from ddp_hydra.data.shards.download import Prefetcher, download, is_packed
from ddp_hydra.data.shards.index import Shard
from ddp_hydra.data.shards.tar_index import OpenShard, TarMembers, checked, checksum_of_some, load_members, read_members
from ddp_hydra.storage import Access, bare_url, is_remote
from ddp_hydra.storage.base import Counters, ProcessLocal
from ddp_hydra.storage.files import user_cache
from ddp_hydra.storage.retry import FULL

GIB = 2**30
WAIT_S = 60.0
"""How long to wait for space that other processes use."""
_POLL_S = 0.02
_ASK_AFTER_S = 0.5
"""After waiting this long for space, all processes are asked to close all shards: those in use can be opened again."""


class ShardCache(ProcessLocal):
    """Opens the shards of an index, and keeps the shards of other hosts on the local disk.

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
        counts: downloads, bytes, cache_hits (the shard was on the disk when it was opened), cache_misses, waited_s
            (time spent on opening shards).
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
        check_range("cache_gb", budget_bytes / GIB, 0, example=50, above=True)
        check_range("prefetch_shards", prefetch, 0, example=4)
        self.shards = tuple(shards)
        self.access = access or Access(setting="data.index")
        self._given_folder, self.budget_bytes, self._prefetch = folder, budget_bytes, prefetch
        # The name of each shard in the cache; "": it is used where it is.
        self._names = [
            _file_name(shard, self.access.endpoint(shard.url)) if is_remote(shard.url) or is_packed(shard.url) else ""
            for shard in self.shards
        ]
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self.held: dict[int, OpenShard] = {}
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._failed: dict[int, tuple[float, Exception]] = {}  # {number: until when it is not tried again, why}
        self._local_members: dict[str, tuple[Any, TarMembers]] = {}
        self._counters = Counters()
        self.counts = self._counters.totals
        self._prefetcher = Prefetcher(self._fetch_ahead, self._prefetch, self._answer)
        self._disk: ShardFolder | None = None
        self._closed = False
        self._index_saver = ThreadPoolExecutor(1, "shard-index-saver")
        self._asked_ns = time.time_ns()
        self._max_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def _begin_fork(self) -> None:
        self._set_process_state()  # the parent's threads do not run here, and shards that stay open stay on the disk

    def open(self, number: int) -> OpenShard:
        if (held := self.held.get(number)) is not None:
            return held
        asked = time.monotonic()
        self._prefetcher.note_started(number)  # the next shards need not wait for this one
        with self._opening.setdefault(number, threading.Lock()):
            if (held := self.held.get(number)) is not None:
                return held
            until, why = self._failed.get(number, (-math.inf, None))
            if why is not None and asked < until:
                raise _without_frames(why)
            started = time.monotonic()
            try:
                is_cached = self._names[number]
                shard = self._open_cached(number) if is_cached else self._open_local(self.shards[number])
            except Exception as error:
                # Threads that wait for the shard have waited as long as this one: they don't try in turn.
                is_bad = isinstance(error, (ValueError, FileNotFoundError))
                self._failed[number] = math.inf if is_bad else time.monotonic(), _without_frames(error)
                raise
            finally:
                self._counters.add(waited_s=time.monotonic() - started)
            with self._lock:
                self.held[number] = shard
                newest = list(self.held)[-self._max_open :]
        self._close_others(newest)
        return shard

    def _open_local(self, shard: Shard) -> OpenShard:
        path = Path(shard.url)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, PermissionError):
                closed = PermissionError(f"{path} on {socket.gethostname()}: {error.strerror}")
                closed.errno = error.errno  # as it is of this file alone: a store may refuse all
                raise closed from None
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
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
        needed = [number for number in order if self._names[number]]
        self._prefetcher.expect(needed)
        if needed and self._prefetcher.depth:
            self._prefetcher.start()

    def note_done(self, number: int) -> None:
        if self._names[number]:
            with self._lock:
                self.held.pop(number, None)
            self._folder().note_read(self._names[number])
            self._prefetcher.note_done(number)

    def close(self) -> None:
        self.access.close()
        self._closed = True
        self._prefetcher.close()
        self._index_saver.shutdown(cancel_futures=True)
        self._close_others(())

    def _close_others(self, kept: Container[int]) -> None:
        with self._lock:
            for number in [number for number in self.held if number not in kept]:
                del self.held[number]

    # -- the folder

    def _open_cached(self, number: int) -> OpenShard:
        folder, name = self._folder(), self._names[number]
        while True:
            descriptor, fresh = self._find_or_download(number)
            try:
                members = None if fresh else load_members(folder.index_path(name), os.fstat(descriptor).st_size)
                if members is not None and members.checksum != checksum_of_some(descriptor):
                    raise ValueError(f"{folder.path / name} was changed since it was downloaded")
                if members is None or len(members) < self.shards[number].n_samples:
                    members = self._read_and_save_members(number, descriptor)
                shard = OpenShard(descriptor, members)
                folder.note_read(name)
                self._prefetcher.start()
                return shard
            except ValueError:
                # A file from the cache may have been damaged there; a fresh download is damaged at its source.
                folder.discard(descriptor, name)
                if fresh:
                    raise
            finally:
                os.close(descriptor)

    def _read_and_save_members(self, number: int, descriptor: int) -> TarMembers:
        # Without a saved index, the next process indexes the shard again.
        folder, name = self._folder(), self._names[number]
        members = checked(self.shards[number], read_members(folder.path / name, descriptor))
        members.checksum = checksum_of_some(descriptor)

        def save() -> None:
            # Without a lock, so that the shard may be evicted meanwhile.
            with contextlib.suppress(OSError), (folder.path / name).open("rb") as file:
                os.fsync(file.fileno())
                folder.save_index(file.fileno(), name, members)

        with contextlib.suppress(RuntimeError):  # the cache was closed, or the interpreter ends
            self._index_saver.submit(save)
        return members

    def _find_or_download(self, number: int) -> tuple[int, bool]:
        folder, name, shard = self._folder(), self._names[number], self.shards[number]
        missing = False
        while True:
            descriptor = folder.open(name)
            if descriptor is not None:
                size = os.fstat(descriptor).st_size
                right_size = shard.size in (None, size) or is_packed(shard.url)
                if size and right_size and folder.is_certain(descriptor, name):
                    self._counters.add(cache_hits=not missing)
                    return descriptor, False
                folder.discard(descriptor, name)
                os.close(descriptor)
            self._counters.add(cache_misses=not missing)
            missing = True
            part = folder.claim(name)
            if part is not None:
                self._download(part, number, background=False)
                return part, True
            self._check_open()
            time.sleep(_POLL_S)

    def _download(self, part: int, number: int, background: bool) -> None:
        folder, name, shard = self._folder(), self._names[number], self.shards[number]

        def reserve(n_bytes: int) -> None:
            self._reserve(part, n_bytes, background)
            self._prefetcher.note_space(number)

        try:
            store, key = self.access.open(shard.url)
            try:
                download(shard, store, key, part, reserve, self._note_piece)
            except ValueError:
                os.ftruncate(part, 0)
                download(shard, store, key, part, reserve, self._note_piece)
            folder.note_fetched(part)
            self._counters.add(downloads=1)  # who sees the file sees it counted
            folder.publish(part, name)
        except BaseException as error:
            folder.abandon(part, name)
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(
                    f"{folder.path} on {socket.gethostname()} became full: free it, or type data.cache_dir=..."
                ) from None
            raise

    def _note_piece(self, piece: Any) -> None:
        self._counters.add(bytes=len(piece))
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the shard cache was closed while a shard was being fetched")

    def _reserve(self, part: int, n_bytes: int, background: bool) -> None:
        folder = self._folder()
        if with_index(n_bytes) > self.budget_bytes:
            raise OSError(
                f"a shard takes {n_bytes / GIB:.2f} GiB, more than the cache: type data.cache_gb={_in_gib(2 * n_bytes)}"
            )
        started, files = time.monotonic(), frozenset(self._names)
        evict_needed = False
        while True:
            needed = {self._names[number]: place for number, place in self._prefetcher.needed().items()}
            problem = folder.reserve(part, n_bytes, files, needed, evict_needed)
            if problem is None:
                return
            if background:
                raise _NoSpaceError
            self._check_open()
            waited_s = time.monotonic() - started
            if waited_s > WAIT_S:
                raise OSError(
                    f"no space for {n_bytes / GIB:.2f} GiB in {folder.path} on {socket.gethostname()}: {problem}. "
                    f"Free it, or type data.cache_dir=... or data.cache_gb={_in_gib(self.budget_bytes + 4 * n_bytes)}"
                )
            asks = waited_s > _ASK_AFTER_S
            self._close_others(() if asks else self._prefetcher.in_use())
            if asks:
                folder.ask_for_space()
            if evict_needed:
                time.sleep(_POLL_S)
            evict_needed = True

    def _answer(self) -> None:
        if self._disk is not None and (asked_ns := self._disk.asked_ns()) > self._asked_ns:
            self._asked_ns = asked_ns
            self._close_others(())

    def _fetch_ahead(self, number: int) -> bool:
        try:
            folder, name = self._folder(), self._names[number]
            part = None if (folder.path / name).exists() else folder.claim(name)
            if part is not None and number not in self._prefetcher.needed():  # it was read, and evicted, meanwhile
                folder.abandon(part, name)
            elif part is not None:
                self._download(part, number, background=True)
                try:
                    self._read_and_save_members(number, part)
                finally:
                    os.close(part)
        except _NoSpaceError:
            return False
        except Exception:
            return True  # it is raised again when the shard is needed
        return True

    def _folder(self) -> ShardFolder:
        if self._disk is None:
            path = expanded(self._given_folder or user_cache() / "shards").absolute()
            self._disk = ShardFolder(path, self.budget_bytes)
        return self._disk


class _NoSpaceError(Exception):
    """There is no space for a shard that is fetched in the background."""


def _without_frames(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # its constructor takes other arguments than it keeps
        return error


def _in_gib(n_bytes: int) -> int:
    return -(-n_bytes // GIB)


def _file_name(shard: Shard, endpoint: str | None) -> str:
    # Return the name of a shard's file: a different one for each URL, store, size and MD5, and time of a local file.
    written: tuple[int, ...] = ()
    if not is_remote(shard.url):
        with contextlib.suppress(OSError):  # it is said when the shard is needed
            written = (Path(shard.url).stat().st_mtime_ns,)
    identity = "\n".join(map(str, (shard.url, endpoint, shard.size, shard.md5, *written)))
    readable = re.sub(r"[^\w.-]", "_", bare_url(shard.url).rpartition("/")[2], flags=re.ASCII)
    readable = re.sub(r"(\.tar(\.gz)?|\.tgz)$", "", readable)[-60:]
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}-{readable}.tar"
