"""An object that is read in one go, and begun again where that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ddp_hydra.storage.counters import Traffic

_PIECE_BYTES = 2**20


class Stream:
    """Reads an object in pieces with one request, for stores that give no parts of objects.

    After an error it is read from its beginning, for there is no other way, and what was given out is left out.

    Args:
        key: its name.
        size: its bytes.
        start: how many of them to leave out; they are read all the same.
        wrong_size: makes an error of the bytes that came.
        traffic: counts.
    """

    def __init__(
        self, key: str, size: int, start: int, wrong_size: Callable[[int], Exception], traffic: Traffic
    ) -> None:
        self._key, self._size = key, size
        self._given = start
        self._wrong_size = wrong_size
        self._traffic = traffic
        self._pieces: Iterator[Any] | None = None
        self._position = 0

    def next_piece(self, store: Any) -> Any:
        """Return what comes next, of a store of obstore; None at the end. After an error, call it again."""
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
