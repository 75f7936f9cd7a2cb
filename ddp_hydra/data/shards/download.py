"""Downloads a shard into a file: in several pieces at a time, decompressed, verified; the next ones ahead of time."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ddp_hydra.data.shards.index import Shard
from ddp_hydra.data.threads import Lookahead
from ddp_hydra.storage import Store, bare_url
from ddp_hydra.storage.base import PIECE_BYTES, RangesIgnoredError

_LOG = logging.getLogger(__name__)

CONNECTIONS = 4
"""How many pieces of a shard are fetched at a time."""
_UNPACKED_BYTES = 4 * 2**20


def is_packed(url: str) -> bool:
    return url.partition("?")[0].lower().endswith((".tar.gz", ".tgz"))


def download(
    shard: Shard, store: Store, key: str, file: int, reserve: Callable[[int], None], on_piece: Callable[[Any], object]
) -> int:
    # Return how many bytes were fetched.
    # reserve: called with the size that the file will have, before it grows; raises if there is no space.
    # on_piece: called with each piece, in order; may raise to stop.
    size = store.size(key)
    if shard.size is not None and size != shard.size:
        raise ValueError(f"{bare_url(shard.url)} has {size:,} bytes, and the index says {shard.size:,}")
    digest = hashlib.md5(usedforsecurity=False) if shard.md5 else None
    packed = is_packed(shard.url)

    def pieces() -> Iterator[Any]:
        for piece in _pieces(store, key, size, shard.url):
            if digest is not None:
                digest.update(piece)
            on_piece(piece)
            yield piece

    reserve(size)
    try:
        with open(file, "wb", closefd=False) as written:
            written.seek(0)
            for piece in _unpack(pieces()) if packed else pieces():
                if packed:
                    reserve(written.tell() + len(piece))
                written.write(piece)
            written.truncate()
    except zlib.error as error:
        raise ValueError(f"{bare_url(shard.url)} can't be decompressed: {error}") from None
    if digest is not None and digest.hexdigest() != shard.md5:
        raise ValueError(f"{bare_url(shard.url)} has the MD5 {digest.hexdigest()}, and the index says {shard.md5}")
    return size


def _pieces(store: Store, key: str, size: int, url: str) -> Iterator[Any]:
    def fetch(start: int) -> Any:
        end = min(start + PIECE_BYTES, size)
        piece = store.get(key, size) if end - start == size else store.get_range(key, start, end)
        if len(piece) != end - start:
            raise ValueError(f"{bare_url(url)} gave {len(piece):,} bytes in place of {end - start:,}")
        return piece

    done = 0
    if store.ranges:
        try:
            calls = (partial(fetch, start) for start in range(0, size, PIECE_BYTES))
            with Lookahead(calls, CONNECTIONS, CONNECTIONS + 1) as fetched:
                for piece in fetched:
                    yield piece
                    done += len(piece)
            return
        except RangesIgnoredError:
            pass
    yield from store.stream(key, size, done)
    if store.ranges:
        store.ranges = False
        _LOG.warning(
            "%s gives whole files only: each shard uses one connection, and starts again if that breaks",
            store.public_url(),
        )


def _unpack(pieces: Iterable[Any]) -> Iterator[bytes]:
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


_POLL_S = 0.2


class Prefetcher:
    """Fetches the next numbers of a known order in background threads, a few at a time.

    Args:
        fetch: called with a number. It returns whether it is finished with it; False means: no space yet, try again.
            It calls `note_space` as soon as the number has its space: space is given out in the known order.
        depth: how many numbers are fetched before they are needed.
        poll: called about every 0.2 seconds.
    """

    def __init__(self, fetch: Callable[[int], bool], depth: int, poll: Callable[[], None]) -> None:
        self.depth = depth
        self._fetch = fetch
        self._poll = poll
        self._changed = threading.Condition()
        self._places: dict[int, int] = {}  # of all numbers that are still needed
        self._waiting: dict[int, None] = {}  # the needed numbers that are not in use yet, in order
        self._fetched: set[int] = set()  # finished or under way
        self._asking: int | None = None  # the number that has no space yet
        self._paused_until = 0.0
        self._closing = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        with self._changed:
            if self._threads or self._closing:
                return
            # Daemon threads that hold only a weak reference: a prefetcher that nobody closes lets its process end.
            arguments = (weakref.ref(self), self._changed)
            for _ in range(self.depth + 1):  # one thread may still fetch what is already in use
                self._threads.append(threading.Thread(target=_work, args=arguments, name="shard-prefetch", daemon=True))
        for thread in self._threads:
            thread.start()

    def expect(self, order: Sequence[int]) -> None:
        with self._changed:
            self._places = {number: place for place, number in enumerate(order)}
            self._waiting = dict.fromkeys(order)
            self._fetched = set()
            self._changed.notify_all()

    def note_started(self, number: int) -> None:
        with self._changed:
            self._waiting.pop(number, None)
            self._changed.notify_all()

    def note_done(self, number: int) -> None:
        with self._changed:
            self._waiting.pop(number, None)
            self._places.pop(number, None)
            self._paused_until = 0.0
            self._changed.notify_all()

    def note_space(self, number: int) -> None:
        # Note that a number has its space: the next one may ask for space.
        with self._changed:
            if self._asking == number:
                self._asking = None
                self._changed.notify_all()

    def in_use(self) -> set[int]:
        with self._changed:
            return self._places.keys() - self._waiting.keys()

    def needed(self) -> dict[int, int]:
        with self._changed:
            return dict(self._places)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _next(self) -> int | None:
        if self._asking is not None or time.monotonic() < self._paused_until:
            return None
        return next((number for number in islice(self._waiting, self.depth) if number not in self._fetched), None)

    def _note_fetched(self, number: int, finished: bool) -> None:
        self.note_space(number)
        with self._changed:
            if not finished:
                self._fetched.discard(number)
                self._paused_until = time.monotonic() + _POLL_S
            self._changed.notify_all()


def _work(reference: weakref.ref[Prefetcher], changed: threading.Condition) -> None:
    while (prefetcher := reference()) is not None:
        prefetcher._poll()
        with changed:
            if prefetcher._closing:
                return
            number = prefetcher._next()
            if number is None:
                del prefetcher
                changed.wait(_POLL_S)
                continue
            prefetcher._fetched.add(number)
            prefetcher._asking = number
        finished = False
        try:
            finished = prefetcher._fetch(number)
        finally:
            prefetcher._note_fetched(number, finished)
