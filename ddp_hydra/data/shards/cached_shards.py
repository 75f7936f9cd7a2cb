"""Opens shards from the cache folder; downloads those that are missing, when they are needed or before."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddp_hydra.data.shards.cache_folder import ShardFolder, with_index
from ddp_hydra.data.shards.download import Prefetcher, download, is_packed
from ddp_hydra.data.shards.index import Shard
from ddp_hydra.data.shards.tar_index import OpenShard, TarMembers, checked, checksum_of_some, load_members, read_members
from ddp_hydra.data.user_cache import user_cache
from ddp_hydra.storage import Access

GIB = 2**30
WAIT_S = 60.0
"""How long to wait for space that other processes use."""
_POLL_S = 0.02
_ASK_AFTER_S = 0.5
"""After waiting this long for space, all processes are asked to close all shards: those in use can be opened again."""


class CachedShards:
    """Gives one process the shards that are kept in the cache folder.

    Args:
        shards: the shards of the index.
        names: of their files in the folder; None: the shard is not kept there.
        folder: as in `ShardCache`, and so are budget_bytes, prefetch and access.
        close: called with some numbers: closes the open shards of all other numbers.

    Attributes:
        counts: as in `ShardCache`.
        prefetcher: the threads that download shards before they are needed.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        names: Sequence[str | None],
        folder: str | Path | None,
        budget_bytes: int,
        prefetch: int,
        access: Access,
        close: Callable[[Container[int]], None],
    ) -> None:
        self.shards = shards
        self.names = [name or "" for name in names]
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.access = access
        self.counts: dict[str, float] = dict.fromkeys(
            ("downloads", "bytes_downloaded", "hits", "misses", "waited_s"), 0
        )
        self.prefetcher = Prefetcher(self._fetch_ahead, prefetch, self._answer)
        self._close_others = close
        self._files = frozenset(self.names)
        self._lock = threading.Lock()
        self._disk: ShardFolder | None = None
        self._closed = False
        self._index_saver = ThreadPoolExecutor(1, "shard-index-saver")
        self._asked_ns = time.time_ns()

    def open(self, number: int) -> OpenShard:
        folder, name = self._folder(), self.names[number]
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
                self.prefetcher.start()
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
        folder, name = self._folder(), self.names[number]
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
        folder, name, shard = self._folder(), self.names[number], self.shards[number]
        missing = False
        while True:
            descriptor = folder.open(name)
            if descriptor is not None:
                size = os.fstat(descriptor).st_size
                right_size = shard.size in (None, size) or is_packed(shard.url)
                if size and right_size and folder.is_certain(descriptor, name):
                    self.count(hits=not missing)
                    return descriptor, False
                folder.discard(descriptor, name)
                os.close(descriptor)
            self.count(misses=not missing)
            missing = True
            part = folder.claim(name)
            if part is not None:
                self._download(part, number, background=False)
                return part, True
            if self._closed:
                raise _ClosedError
            time.sleep(_POLL_S)

    def _download(self, part: int, number: int, background: bool) -> None:
        folder, name, shard = self._folder(), self.names[number], self.shards[number]

        def reserve(n_bytes: int) -> None:
            self._reserve(part, n_bytes, background)
            self.prefetcher.note_space(number)

        try:
            store, key = self.access.open(shard.url)
            try:
                download(shard, store, key, part, reserve, self._note_piece)
            except ValueError:
                os.ftruncate(part, 0)
                download(shard, store, key, part, reserve, self._note_piece)
            folder.note_fetched(part)
            folder.publish(part, name)
        except BaseException as error:
            folder.abandon(part, name)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    f"the disk of {folder.path} on {socket.gethostname()} became full: free it, or type "
                    "data.cache_dir=... for another one"
                ) from None
            raise
        self.count(downloads=1)

    def _note_piece(self, piece: Any) -> None:
        self.count(bytes_downloaded=len(piece))
        if self._closed:
            raise _ClosedError

    def _reserve(self, part: int, n_bytes: int, background: bool) -> None:
        folder = self._folder()
        if with_index(n_bytes) > self.budget_bytes:
            raise OSError(
                f"a shard takes {with_index(n_bytes) / GIB:.2f} GiB, and the cache in {folder.path} may take "
                f"{self.budget_bytes / GIB:.2f}: type data.cache_gb={_in_gib(2 * n_bytes)}"
            )
        started = time.monotonic()
        evict_needed = False
        while True:
            needed = {self.names[number]: place for number, place in self.prefetcher.needed().items()}
            problem = folder.reserve(part, n_bytes, self._files, needed, evict_needed)
            if problem is None:
                return
            if background:
                raise _NoSpaceError
            if self._closed:
                raise _ClosedError
            waited_s = time.monotonic() - started
            if waited_s > WAIT_S:
                raise OSError(
                    f"no space for a shard of {n_bytes / GIB:.2f} GiB in {folder.path} on {socket.gethostname()}, "
                    f"waited {waited_s:.0f} s: {problem}. Free the disk or type data.cache_dir=... for another one. "
                    f"If the disk has space, type data.cache_gb={_in_gib(self.budget_bytes + 4 * n_bytes)}"
                )
            asks = waited_s > _ASK_AFTER_S
            self._close_others(() if asks else self.prefetcher.in_use())
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
            folder, name = self._folder(), self.names[number]
            part = None if (folder.path / name).exists() else folder.claim(name)
            if part is not None:
                self._download(part, number, background=True)
                try:
                    self._read_and_save_members(number, part)
                finally:
                    os.close(part)
        except _NoSpaceError:
            return False
        except (OSError, ValueError, RuntimeError):
            pass  # it is raised again when the shard is needed
        return True

    def _folder(self) -> ShardFolder:
        if self._disk is None:
            path = user_cache() / "shards" if self.folder is None else Path(self.folder).expanduser().absolute()
            try:
                self._disk = ShardFolder(path, self.budget_bytes)
            except OSError as error:
                raise OSError(
                    f"the folder for shards, {path} on {socket.gethostname()}, can't be made ({error.strerror}): type "
                    "data.cache_dir=..."
                ) from None
        return self._disk

    def note_done(self, number: int) -> None:
        self._folder().note_read(self.names[number])
        self.prefetcher.note_done(number)

    def count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                self.counts[name] += value

    def close(self) -> None:
        self._closed = True
        self.prefetcher.close()
        self._index_saver.shutdown(cancel_futures=True)


class _NoSpaceError(Exception):
    """There is no space for a shard that is fetched in the background."""


class _ClosedError(RuntimeError):
    """The cache was closed."""

    def __init__(self) -> None:
        super().__init__("the shard cache was closed while a shard was being fetched")


def _in_gib(n_bytes: int) -> int:
    return -(-n_bytes // GIB)
