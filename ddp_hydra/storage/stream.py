"""Reads an object with one request, and starts over after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ddp_hydra.storage.counters import TransferCounters

_PIECE_BYTES = 2**20


class Stream:
    """Reads an object in pieces with one request, for stores that give no parts of objects.

    After an error the object is read from its beginning, as there is no other way; bytes that were returned before are
    skipped.

    Args:
        key: its name.
        size: its size in bytes.
        start: how many bytes to skip; they are transferred all the same.
        wrong_size: returns the error for an object of another size, given that size.
        traffic: counts.
    """

    def __init__(
        self, key: str, size: int, start: int, wrong_size: Callable[[int], Exception], traffic: TransferCounters
    ) -> None:
        self._key, self._size = key, size
        self._given = start
        self._wrong_size = wrong_size
        self._traffic = traffic
        self._pieces: Iterator[Any] | None = None
        self._position = 0

    def next_piece(self, store: Any) -> Any:
        """Return the next piece, read from a store of obstore; None at the end. After an error, call it again."""
        try:
            return self._next_piece(store)
        except Exception:
            self._pieces = None
            raise

    def _next_piece(self, store: Any) -> Any:
        if self._pieces is None:
            self._pieces, self._position = iter(store.get(self._key).stream(min_chunk_size=_PIECE_BYTES)), 0
            self._traffic.add(requests=1)
        for piece in self._pieces:
            self._position += len(piece)
            self._traffic.add(bytes=len(piece))
            if self._position > self._size:
                raise self._wrong_size(self._position)
            if (new := self._position - self._given) > 0:
                self._given = self._position
                return memoryview(piece)[max(0, len(piece) - new) :]
        if self._position != self._size:
            raise self._wrong_size(self._position)
        return None
