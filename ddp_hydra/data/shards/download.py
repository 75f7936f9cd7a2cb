"""Downloads a shard into a file: in several pieces at a time, decompressed if necessary, and verified."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from ddp_hydra.data.shards.index import Shard
from ddp_hydra.storage import Store, shown
from ddp_hydra.storage.base import RangesIgnoredError

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
PIECE_BYTES = 8 * 2**20
CONNECTIONS = 4
"""How many pieces of a shard are fetched at a time."""
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
    on_piece: Callable[[Any], object],
) -> int:
    """Write a shard to a file, and check its size and MD5 if the index gives them.

    Args:
        shard: the shard, as the index describes it.
        store: the store that holds it; it retries by itself.
        key: of the shard in the store.
        file: descriptor of an empty file.
        reserve: called with the size that the file will have, before it grows; raises if there is no space.
        on_piece: called with each piece, in order; may raise to stop.

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
    packed = is_packed(shard.url)

    def write(piece: Any, start: int) -> None:
        if not packed:
            _write(file, piece, start)

    def pieces() -> Iterator[Any]:
        for piece in _pieces(store, key, size, shard.url, write):
            if digest is not None:
                digest.update(piece)
            on_piece(piece)
            yield piece

    reserve(size)
    written = 0
    try:
        for piece in _unpack(pieces()) if packed else pieces():
            if packed:
                reserve(written + len(piece))
                _write(file, piece, written)
            written += len(piece)
    except zlib.error as error:
        raise ValueError(f"{shown(shard.url)} can't be decompressed: {error}") from None
    os.ftruncate(file, written)
    if digest is not None and digest.hexdigest() != shard.md5:
        raise ValueError(f"{shown(shard.url)} has the MD5 {digest.hexdigest()}, and the index says {shard.md5}")
    return size


def _pieces(store: Store, key: str, size: int, url: str, write: Callable[[Any, int], None]) -> Iterator[Any]:
    """Yield the pieces of an object in order; fetch several at a time if the store can read ranges.

    Args:
        store: the store that holds it.
        key: its name there.
        size: bytes.
        url: for messages.
        write: called with each piece and the place of its first byte, in any order, and from several threads.
    """

    def fetch(start: int) -> Any:
        end = min(start + PIECE_BYTES, size)
        piece = store.get(key, size) if end - start == size else store.get_range(key, start, end)
        if len(piece) != end - start:
            raise ValueError(f"{shown(url)} gave {len(piece):,} bytes in place of {end - start:,}")
        write(piece, start)
        return piece

    done = 0
    if store.ranges:
        try:
            for piece in in_parallel(fetch, range(0, size, PIECE_BYTES), CONNECTIONS, CONNECTIONS + 1):
                yield piece
                done += len(piece)
            return
        except RangesIgnoredError:
            pass
    for piece in store.stream(key, size, done):
        write(piece, done)
        yield piece
        done += len(piece)
    if store.ranges:
        store.ranges = False
        _LOG.warning(
            "%s gives whole files only: each shard uses one connection, and starts again if that breaks", store.shown()
        )


def in_parallel(action: Callable[[T], Any], items: Iterable[T], threads: int, ahead: int) -> Generator[Any]:
    """Yield the results of an action for each item, in order, while the next ones are being computed.

    Args:
        action: called with an item, in a thread.
        items: what it is called with.
        threads: how many calls run at a time.
        ahead: how many results are waited for or held at a time.
    """
    pool = ThreadPoolExecutor(threads, "shards")
    running: deque[Future[Any]] = deque()
    waiting = iter(items)
    try:
        while True:
            running.extend(pool.submit(action, item) for item in islice(waiting, ahead - len(running)))
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
