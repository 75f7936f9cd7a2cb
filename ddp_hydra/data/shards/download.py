"""Downloads a shard into a file: in several pieces at a time, decompressed if necessary, and verified."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ddp_hydra.data.shards.index import Shard, shown
from ddp_hydra.storage import Store
from ddp_hydra.storage.base import RangesIgnoredError

_LOG = logging.getLogger(__name__)

PIECE_BYTES = 8 * 2**20
CONNECTIONS = 4
_UNPACKED_BYTES = 4 * 2**20


def is_packed(url: str) -> bool:
    """Return whether a shard is a compressed tar file, by its name."""
    return url.partition("?")[0].lower().endswith((".tar.gz", ".tgz"))


def download(
    shard: Shard,
    store: Store,
    key: str,
    file: int,
    reserve: Callable[[int], None],
    on_piece: Callable[[Any], object] = lambda piece: None,
    connections: int = CONNECTIONS,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Write a shard to a file, and check its size and MD5 if the index gives them.

    Args:
        shard: the shard, as the index describes it.
        store: the store that holds it; it retries by itself.
        key: of the shard in the store.
        file: descriptor of an empty file.
        reserve: called with the size that the file will have, before it grows; raises if there is no space.
        on_piece: called with each piece, in order; may raise to stop.
        connections: how many pieces are fetched at a time.
        piece_bytes: size of the pieces.

    Returns:
        How many bytes were fetched.

    Raises:
        ValueError: the shard is not what the index says, or is compressed and damaged.
        FileNotFoundError: the store does not have it.
        PermissionError: it may not be read.
        ConnectionError: the store is not reachable.
    """
    size = store.size(key)
    if shard.size is not None and size != shard.size:
        raise ValueError(f"{shown(shard.url)} has {size:,} bytes, and the index says {shard.size:,}")
    digest = hashlib.md5(usedforsecurity=False) if shard.md5 else None
    source = _Pieces(shard.url, store, key, size, file, connections, piece_bytes)

    def pieces() -> Iterator[Any]:
        for piece in source.in_order():
            if digest is not None:
                digest.update(piece)
            on_piece(piece)
            yield piece

    reserve(size)
    written = 0
    try:
        for piece in _unpack(pieces()) if source.packed else pieces():
            if source.packed:
                reserve(written + len(piece))
                _write(file, piece, written)
            written += len(piece)
    except zlib.error as error:
        raise ValueError(f"{shown(shard.url)} can't be decompressed: {error}") from None
    os.ftruncate(file, written)
    if digest is not None and digest.hexdigest() != shard.md5:
        raise ValueError(f"{shown(shard.url)} has the MD5 {digest.hexdigest()}, and the index says {shard.md5}")
    return size


@dataclass
class _Pieces:
    """Fetches a shard in pieces; writes them to its file where they belong, unless they are compressed.

    Args:
        url: of the shard.
        store: the store that holds it.
        key: of the shard in the store.
        size: of the shard in the store, bytes.
        file: descriptor of the file.
        connections: how many pieces are fetched at a time.
        piece_bytes: size of the pieces.
    """

    url: str
    store: Store
    key: str
    size: int
    file: int
    connections: int
    piece_bytes: int

    @property
    def packed(self) -> bool:
        """Whether the shard is compressed."""
        return is_packed(self.url)

    def in_order(self) -> Iterator[Any]:
        """Yield the pieces in order; fetch several at a time if the store can read ranges."""
        done = 0
        if self.store.ranges:
            try:
                for piece in _in_parallel(self.fetch, range(0, self.size, self.piece_bytes), self.connections):
                    yield piece
                    done += len(piece)
                return
            except RangesIgnoredError:
                pass
        for piece in self.store.stream(self.key, self.size, done):
            self.write(piece, done)
            yield piece
            done += len(piece)
        if self.store.ranges:
            self.store.ranges = False
            _LOG.warning(
                "%s gives whole files only: each shard uses one connection, and starts again if that breaks",
                self.store.shown(),
            )

    def fetch(self, start: int) -> Any:
        """Return the piece that begins at a byte."""
        end = min(start + self.piece_bytes, self.size)
        is_whole = end - start == self.size
        piece = self.store.get(self.key, self.size) if is_whole else self.store.get_range(self.key, start, end)
        if len(piece) != end - start:
            raise ValueError(f"{shown(self.url)} gave {len(piece):,} bytes in place of {end - start:,}")
        self.write(piece, start)
        return piece

    def write(self, piece: Any, start: int) -> None:
        """Write a piece to the file, unless it is compressed."""
        if not self.packed:
            _write(self.file, piece, start)


def _in_parallel(action: Callable[[int], Any], numbers: range, threads: int) -> Iterator[Any]:
    """Yield the results of an action for each number, in order, while the next ones are being computed."""
    pool = ThreadPoolExecutor(threads, "shard-pieces")
    running: deque[Future[Any]] = deque()
    waiting = iter(numbers)
    try:
        while True:
            while len(running) <= threads and (number := next(waiting, None)) is not None:
                running.append(pool.submit(action, number))
            if not running:
                return
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write(file: int, piece: Any, start: int) -> None:
    view = memoryview(piece).cast("B")
    while view:
        done = os.pwrite(file, view, start)
        start += done
        view = view[done:]


def _unpack(pieces: Iterable[Any]) -> Iterator[bytes]:
    """Decompress gzip, also several gzip files in a row."""
    unpacker = zlib.decompressobj(wbits=31)
    for piece in pieces:
        rest = bytes(piece)
        while rest:
            if unpacker.eof:
                if not (rest := rest.lstrip(b"\0")):  # padding
                    break
                unpacker = zlib.decompressobj(wbits=31)
            yield unpacker.decompress(rest, _UNPACKED_BYTES)
            rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    if not unpacker.eof:
        raise zlib.error("it ends too early")
