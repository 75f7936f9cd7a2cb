"""Defines the interfaces, the errors and the counters that all stores share."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import IO, Any, Protocol


class TemporaryError(ConnectionError):
    """The store is out of reach, busy or broken: the next try may work."""


class WrongBodyError(TemporaryError):
    """The answer has another number of bytes than it should have."""


class OtherRegionError(TemporaryError):
    """The store says that the bucket is in another region: a bucket that was here before may be here again."""


class NoBucketError(FileNotFoundError):
    """The store has no such bucket."""


class RangesIgnoredError(OSError):
    """The store answers with the whole object where a part of it was asked for."""


class StaleCredentialsError(PermissionError):
    """The store does not accept the credentials any more, or never did."""


class ObjectChangedError(Exception):
    """A conditional put found another object than it expected."""


class Counters:
    """Counters by name, for all threads of a process. Each thread has its own sums, so that no thread waits for a lock.

    An unpickled copy begins at zero.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[defaultdict[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def add(self, **more: float) -> None:
        """Add to some counters, given by name."""
        counts = self.of_thread()
        for name, value in more.items():
            counts[name] += value

    def of_thread(self) -> defaultdict[str, float]:
        """Return the counts of the calling thread."""
        try:
            return self._local.counts
        except AttributeError:
            counts: defaultdict[str, float] = defaultdict(float)
            self._local.counts = counts
            self._all.append(counts)
            return counts

    def total(self, name: str) -> float:
        """Return the sum over all threads."""
        return sum(counts.get(name, 0) for counts in list(self._all))


class TransferCounters(Counters):
    """Counts answered requests, retries, and bytes."""

    def read(self, n_bytes: int) -> None:
        """Count an answer of so many bytes."""
        counts = self.of_thread()
        counts["requests"] += 1
        counts["bytes"] += n_bytes

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return int(self.total("requests"))

    @property
    def retries(self) -> int:
        """Requests that were made again."""
        return int(self.total("retries"))

    @property
    def bytes(self) -> int:
        """Bytes that were read."""
        return int(self.total("bytes"))


class Store(Protocol):
    """A store that data is read from; see `Retrying` for what the methods raise."""

    url: str
    ranges: bool
    traffic: TransferCounters

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the key and the size in bytes of each object below a prefix."""

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix."""

    def get(self, key: str, size: int | None = None) -> Any:
        """Return the content of an object; `size` is what the listing said."""

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return bytes `start` to `end` (exclusive) of an object."""

    def stream(self, key: str, size: int, start: int = 0) -> Iterator[Any]:
        """Yield the content of an object of `size` bytes from `start` on, piece by piece."""

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""

    def put(self, key: str, content: Any) -> None:
        """Write an object."""

    def shown(self) -> str:
        """Return the URL of the store, without its secrets."""

    def close(self) -> None:
        """End all waiting for retries."""


class WritableStore(Protocol):
    """A store that results are written to. Each object is there whole or not at all.

    `ResultsFolder` says what its methods raise.
    """

    url: str

    def get(self, key: str) -> Any:
        """Return the content of a small object."""

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return bytes `start` to `end` (exclusive) of an object."""

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None, or FileNotFoundError, if there is none."""

    def put(self, key: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Write an object. It replaces an older one at the moment when it is complete.

        Args:
            key: its name.
            content: its bytes, or a file to read them from.
            size: the size of the file in bytes.
        """

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""

    def etag(self, key: str) -> str | None:
        """Return a text that differs for each content of an object; None if there is no object."""

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Write an object if it still has this ETag (None: if there is no object), and return its new ETag.

        Raises:
            ObjectChangedError: the object has another ETag.
            NotImplementedError: the store has no conditional writes.
        """
