"""Shards at hand: mapped into memory from where they are, or from a cache on the local disk that is filled ahead."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import resource
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddp_hydra.data.shards.cache_folder import ShardFolder, with_index
from ddp_hydra.data.shards.download import download, is_packed
from ddp_hydra.data.shards.index import Shard, shown
from ddp_hydra.data.shards.prefetch import Prefetcher
from ddp_hydra.data.shards.tar_index import TarMembers, checksum_of_some, load_members, read_members
from ddp_hydra.data.user_cache import user_cache
from ddp_hydra.storage import Access

GIB = 2**30
_POLL_S = 0.02
_POLITE_S = 0.1
"""So long, what is done with is waited for, rather than evicting what is still needed."""
_PATIENT_S = 1.0
"""After so long without room, what is in use but can be opened again has to go, too."""
_KEPT_OPEN = 4
"""Shards that stay open beyond those in use, where the cache can't hold all."""

_caches: weakref.WeakSet[ShardCache] = weakref.WeakSet()
_caches_lock = threading.Lock()


class OpenShard:
    """A shard that is mapped into memory; while it is, or any part of it, nobody evicts it.

    Args:
        content: the tar file.
        members: where its samples are.
    """

    __slots__ = ("content", "members")

    def __init__(self, content: mmap.mmap, members: TarMembers) -> None:
        self.content = memoryview(content)
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def fields(self, index: int) -> dict[str, memoryview]:
        """Return the fields of a sample under their extensions, without a copy."""
        return self.members.fields(index, self.content)


class ShardCache:
    """Opens the shards of an index, and keeps those from elsewhere on the local disk.

    All processes of a host share the folder: each shard is downloaded once, by whoever needs it first, and has its
    name only when it is complete and verified. Shards that are files of this machine are used where they are.
    It can be pickled at any time, and used from many threads.

    Args:
        shards: of the index.
        folder: of the cache; None: ddp_hydra/shards in the user's cache folder (XDG_CACHE_HOME) of each host.
        budget_bytes: what the folder may take, with the shards of other indexes.
        prefetch: shards downloaded before they are needed.
        connections: pieces of a shard that are fetched at a time.
        wait_s: how long to wait for room that others take.
        access: how URLs are read.

    Attributes:
        held: the open shards by number.
        counts: downloads, bytes_downloaded, hits (opened and on the disk already), misses, waited_s (for shards).

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        folder: str | Path | None = None,
        budget_bytes: int = 50 * GIB,
        *,
        prefetch: int = 4,
        connections: int = 4,
        wait_s: float = 60.0,
        access: Access | None = None,
    ) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"cache_gb is {budget_bytes / GIB:g}, and must be above 0: type data.cache_gb=50")
        if prefetch < 0:
            raise ValueError(f"prefetch_shards is {prefetch}, and must be 0 or more: type data.prefetch_shards=4")
        self.shards = tuple(shards)
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.prefetch = prefetch
        self.connections = connections
        self.wait_s = wait_s
        self.access = access or Access(setting="data.index")
        self._cached = [not shard.local or is_packed(shard.url) for shard in self.shards]
        self._names = [self._name(shard) for shard in self.shards]
        self._ours = frozenset(name for name, cached in zip(self._names, self._cached, strict=True) if cached)
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to one process."""
        self.held: dict[int, OpenShard] = {}
        self.counts: dict[str, float] = dict.fromkeys(
            ("downloads", "bytes_downloaded", "hits", "misses", "waited_s"), 0
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._sizes = {
            number: shard.size
            for number, shard in enumerate(self.shards)
            if shard.size is not None and not is_packed(shard.url)
        }
        self._bad: dict[int, tuple[type[ValueError | FileNotFoundError], str]] = {}
        self._local_members: dict[int, tuple[Any, TarMembers]] = {}
        self._disk: ShardFolder | None = None
        self._closed = False
        self._settling: ThreadPoolExecutor | None = None
        self._heard_ns = time.time_ns()
        self._ahead = Prefetcher(self._fetch_ahead, self.prefetch, self._listen)
        self._most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        with _caches_lock:
            _caches.add(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("shards", "folder", "budget_bytes", "prefetch", "connections", "wait_s", "access")
        also = ("_cached", "_names", "_ours")
        return {name: self.__dict__[name] for name in (*kept, *also)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _name(self, shard: Shard) -> str:
        """Return a shard's file in the cache: another one for each URL, store, size and MD5."""
        endpoint = self.access.endpoint_url if shard.url.startswith("s3:") else None
        whole = "\n".join(map(str, (shard.url, endpoint, shard.size, shard.md5)))
        readable = re.sub(r"[^\w.-]", "_", shown(shard.url).rpartition("/")[2], flags=re.ASCII)
        readable = re.sub(r"(\.tar(\.gz)?|\.tgz)$", "", readable)[-60:]
        return f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}-{readable}.tar"

    def open(self, number: int) -> OpenShard:
        """Return a shard of the index, downloaded first where need be.

        Raises:
            ValueError: the shard is damaged, or not what the index says.
            FileNotFoundError: it is not there.
            PermissionError: it may not be read.
            ConnectionError: its store is not reachable.
            OSError: there is no room for it.
        """
        if (held := self.held.get(number)) is not None:
            return held
        if self._pid != os.getpid():  # forked: threads and locks of the parent are none here
            self._reset()
        self.note_started(number)  # what comes next need not wait for this one
        with self._opening.setdefault(number, threading.Lock()):
            if (held := self.held.get(number)) is not None:
                return held
            if number in self._bad:
                known, said = self._bad[number]
                raise known(said)
            started = time.monotonic()
            try:
                shard = self._open_cached(number) if self._cached[number] else self._open_local(number)
            except (ValueError, FileNotFoundError) as error:
                kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
                self._bad[number] = kind, str(error)
                raise
            finally:
                with self._lock:
                    self.counts["waited_s"] += time.monotonic() - started
            with self._lock:
                self.held[number] = shard
        if self._cached[number]:
            self._ahead.start()
        self._trim()
        return shard

    def expect(self, order: Sequence[int]) -> None:
        """Say which shards are going to be needed, in order: they are downloaded ahead.

        Args:
            order: their numbers, each once.
        """
        if self._pid != os.getpid():
            self._reset()
        needed = [number for number in order if self._cached[number]]
        self._ahead.expect(needed)
        if needed and self.prefetch:
            self._ahead.start()

    def note_started(self, number: int) -> None:
        """Say that the reading of an expected shard begins."""
        if self._cached[number]:
            self._ahead.note_started(number)

    def note_done(self, number: int) -> None:
        """Say that nothing more of a shard is needed for the time being."""
        if not self._cached[number]:
            return
        self._folder().note_read(self._names[number])
        if not self._holds_all():
            self._release([number])
        self._ahead.note_done(number)

    def close(self) -> None:
        """Stop the downloads and let go of all shards."""
        self._closed = True
        self.access.close()
        self._ahead.close()
        if self._settling is not None:
            self._settling.shutdown(cancel_futures=True)
        self._release(list(self.held))

    def _open_local(self, number: int) -> OpenShard:
        shard = self.shards[number]
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
            known, members = self._local_members.get(number, (None, None))
            if members is None or known != stamp:
                members = self._check(number, read_members(path, descriptor))
                self._local_members[number] = stamp, members
            return OpenShard(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), members)
        finally:
            os.close(descriptor)

    def _open_cached(self, number: int) -> OpenShard:
        while True:
            descriptor, fresh = self._obtain(number)
            try:
                shard = self._map(number, descriptor, fresh)
                self._folder().note_read(self._names[number])
                self._sizes[number] = len(shard.content)
                return shard
            except ValueError:
                # What was in the cache may have been damaged there, what was just downloaded is so at its source.
                self._folder().discard(descriptor, self._names[number])
                if fresh:
                    raise
            finally:
                os.close(descriptor)  # what is mapped keeps a copy, and with it the lock

    def _map(self, number: int, descriptor: int, fresh: bool) -> OpenShard:
        folder, name = self._folder(), self._names[number]
        size = os.fstat(descriptor).st_size
        members = None if fresh else load_members(folder.index_path(name), size)
        if members is not None and members.checksum != checksum_of_some(descriptor):
            raise ValueError(f"{folder.path / name} was changed since it was downloaded")
        if members is None or len(members) != self.shards[number].n_samples:
            members = self._check(number, read_members(folder.path / name, descriptor))
            self._settle(number, descriptor, members)
        return OpenShard(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), members)

    def _settle(self, number: int, descriptor: int, members: TarMembers) -> None:
        """Save the index of a shard's members once the disk has the shard, while nobody waits for it."""
        copy = os.dup(descriptor)

        def settle() -> None:
            with contextlib.suppress(OSError):  # then the next process reads the headers again
                os.fsync(copy)
                members.checksum = checksum_of_some(copy)
                members.save(self._folder().index_path(self._names[number]))

        with self._lock:
            if self._settling is None:
                self._settling = ThreadPoolExecutor(1, "shard-settling")
        try:
            settled = self._settling.submit(settle)
        except RuntimeError:  # the interpreter ends
            os.close(copy)
        else:
            settled.add_done_callback(lambda future: os.close(copy))

    def _check(self, number: int, members: TarMembers) -> TarMembers:
        shard = self.shards[number]
        if len(members) != shard.n_samples:
            raise ValueError(
                f"{shown(shard.url)} holds {len(members):,} samples, and the index says {shard.n_samples:,}: write the "
                "index anew, python -m ddp_hydra.data.shards index"
            )
        return members

    def _obtain(self, number: int) -> tuple[int, bool]:
        """Return a descriptor of the file in the cache, and whether it was downloaded just now."""
        folder, name, shard = self._folder(), self._names[number], self.shards[number]
        counted = False
        while True:
            descriptor = folder.open(name)
            if descriptor is not None:
                size = os.fstat(descriptor).st_size
                right = shard.size in (None, size) or is_packed(shard.url)
                if size and right and folder.is_certain(descriptor, name):
                    self._count(hits=not counted)
                    return descriptor, False
                folder.discard(descriptor, name)
                os.close(descriptor)
            self._count(misses=not counted)
            counted = True
            part = folder.claim(name)
            if part is not None:
                self._fill(part, number, polite=False)
                return part, True
            if self._closed:
                raise _ClosedError
            time.sleep(_POLL_S)

    def _fill(self, part: int, number: int, polite: bool) -> None:
        """Download a shard into its `.part`, a second time where it comes damaged, and give it its name."""
        folder, name, shard = self._folder(), self._names[number], self.shards[number]
        try:
            store, key = self.access.open(shard.url)
            for last in (False, True):
                try:
                    download(
                        shard,
                        store,
                        key,
                        part,
                        lambda n_bytes: self._make_room(part, number, n_bytes, polite),
                        self._go_on,
                        self.connections,
                    )
                    break
                except ValueError:
                    if last:
                        raise
                    os.ftruncate(part, 0)
            folder.note_fetched(part)
            folder.publish(part, name)
        except OSError as error:
            folder.abandon(part, name)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    f"the disk of {folder.path} on {socket.gethostname()} became full: free it, or type "
                    "data.cache_dir=... for another one"
                ) from None
            raise
        except BaseException:
            folder.abandon(part, name)
            raise
        self._count(downloads=1)

    def _make_room(self, part: int, number: int, n_bytes: int, polite: bool) -> None:
        folder = self._folder()
        if with_index(n_bytes) > self.budget_bytes:
            raise OSError(
                f"a shard takes {with_index(n_bytes) / GIB:.2f} GiB, and the cache in {folder.path} may take "
                f"{self.budget_bytes / GIB:.2f}: type data.cache_gb={_rounded_up(2 * n_bytes)}"
            )
        if polite and not self._ahead.take_turn(number):
            raise _NoRoomError
        started = time.monotonic()
        greedy = self._takes_most(n_bytes)
        while True:
            awaited = {self._names[number]: place for number, place in self._ahead.places().items()}
            waited_s = time.monotonic() - started
            gentle = polite or (waited_s < _POLITE_S and not greedy)
            why = folder.reserve(part, n_bytes, self._ours, awaited, gentle)
            if why is None:
                if polite:
                    self._ahead.note_room(number)
                return
            if polite:
                raise _NoRoomError
            if self._closed:
                raise _ClosedError
            if waited_s > self.wait_s:
                raise OSError(
                    f"no room for a shard of {n_bytes / GIB:.2f} GiB in {folder.path} on {socket.gethostname()}, "
                    f"waited {waited_s:.0f} s: {why}. Free the disk or type data.cache_dir=... for another one; or, "
                    f"where the disk has room, data.cache_gb={_rounded_up(self.budget_bytes + 4 * n_bytes)}"
                )
            folder.ask_for_room()
            with _caches_lock:
                caches = list(_caches)
            for cache in caches:
                cache._release_unneeded(all_of_them=waited_s > _PATIENT_S or greedy)
            time.sleep(_POLL_S)

    def _fetch_ahead(self, number: int) -> bool:
        """Download a shard that is not needed yet; say whether that is settled."""
        with contextlib.suppress(_NoRoomError):
            try:
                folder, name = self._folder(), self._names[number]
                part = None if (folder.path / name).exists() else folder.claim(name)
                if part is not None:
                    self._fill(part, number, polite=True)
                    try:
                        members = self._check(number, read_members(folder.path / name, part))
                        self._settle(number, part, members)
                    finally:
                        os.close(part)
            except (OSError, ValueError, RuntimeError):
                pass  # it is said when the shard is really needed
            return True
        return False

    def _go_on(self, piece: Any) -> None:
        self._count(bytes_downloaded=len(piece))
        if self._closed:
            raise _ClosedError

    def _listen(self) -> None:
        """Let go of what others have asked for."""
        if self._disk is None or (asked_ns := self._disk.last_asked_ns()) <= self._heard_ns:
            return
        again = asked_ns - self._heard_ns < 2 * _PATIENT_S * 1e9
        self._heard_ns = asked_ns
        self._release_unneeded(all_of_them=again)

    def _holds_all(self) -> bool:
        """Whether the whole index fits into the cache, as far as the sizes are known."""
        known = [size for number, size in self._sizes.items() if self._cached[number]]
        return bool(known) and sum(known) / len(known) * sum(self._cached) <= self.budget_bytes

    def _takes_most(self, more: int) -> bool:
        """Whether this process keeps most of the cache open, as it does where it reads without any locality."""
        held = sum(self._sizes[number] for number in list(self.held) if self._cached[number])
        return held + more > self.budget_bytes / 2

    def _trim(self) -> None:
        """Close shards that would be in the way of others."""
        with self._lock:
            held = list(self.held)
        self._release(held[: max(0, len(held) - self._most_open)])
        if not self._holds_all():
            in_use = self._ahead.in_use()
            idle = [number for number in held if self._cached[number] and number not in in_use]
            self._release(idle[:-_KEPT_OPEN])

    def _release_unneeded(self, all_of_them: bool) -> None:
        in_use = set() if all_of_them else self._ahead.in_use()
        self._release([number for number in list(self.held) if self._cached[number] and number not in in_use])

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with self._lock:
                self.held.pop(number, None)

    def _folder(self) -> ShardFolder:
        if self._disk is None:
            path = default_folder() if self.folder is None else Path(self.folder).expanduser().absolute()
            try:
                self._disk = ShardFolder(path, self.budget_bytes)
            except OSError as error:
                raise OSError(
                    f"the folder for shards, {path} on {socket.gethostname()}, can't be made ({error.strerror}): type "
                    "data.cache_dir=..."
                ) from None
        return self._disk

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                self.counts[name] += value


class _NoRoomError(Exception):
    """There is no room for what is not needed yet."""


class _ClosedError(RuntimeError):
    """The cache was closed."""

    def __init__(self) -> None:
        super().__init__("the shard cache was closed while a shard was being fetched")


def default_folder() -> Path:
    """Return where shards are kept if nothing else is said."""
    return user_cache() / "shards"


def _rounded_up(n_bytes: int) -> int:
    return -(-n_bytes // GIB)
