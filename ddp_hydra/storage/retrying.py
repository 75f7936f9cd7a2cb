"""The methods of all stores that are elsewhere: they repeat requests that fail for now."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ddp_hydra.storage.base import (
    NoBucketError,
    ObjectChangedError,
    OtherRegionError,
    StaleCredentialsError,
    TemporaryError,
    TransferCounters,
    WrongBodyError,
)
from ddp_hydra.storage.retry import Backoff

T = TypeVar("T")


class Retrying(ABC):
    """A store that retries by itself; a subclass says how its client does something once.

    It opens its connections when they are first needed, in each process anew, so it can be pickled at any time.
    Its methods may be called from many threads at once.

    Args:
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long to retry a request; the first contact gets `FIRST_RETRY_TIMEOUT_S` at most.
        traffic: counts requests and bytes; None for counters of its own.

    Attributes:
        url: of the store, for messages.
        ranges: whether the store can return parts of objects, as far as is known.
    """

    url: str
    FIRST_RETRY_TIMEOUT_S = 5.0
    REGION_RETRY_TIMEOUT_S = 1.0
    """How long to retry a wrong region, before any request has worked."""

    def __init__(
        self, timeout_s: float = 10.0, retry_timeout_s: float = 60.0, traffic: TransferCounters | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.retry_timeout_s = retry_timeout_s
        self.ranges = True
        self.traffic = traffic or TransferCounters()
        self._reset()

    def _reset(self) -> None:
        self._opened: Any = None
        self._opening = threading.Lock()
        self._closing = threading.Event()
        self._worked = False

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_opened", "_opening", "_closing", "_worked")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def get(self, key: str, size: int | None = None) -> Any:
        """Return the content of an object, as something with the buffer protocol.

        Args:
            key: its name.
            size: its size in bytes when it was listed; None: not known. An answer of another size is retried, unless
                the object itself has changed.

        Raises:
            FileNotFoundError: there is no such object.
            PermissionError: no credentials, or wrong ones.
            ConnectionError: the store is not reachable, or out of order, for longer than `retry_timeout_s`.
            ValueError: all answers were of another size for so long.
        """
        return self._read(lambda store: self._get(store, key, size), key)

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return bytes `start` to `end` (exclusive) of an object; raises as `get`.

        Raises:
            RangesIgnoredError: the store gives whole objects only, as `stream` takes them.
        """
        return self._read(lambda store: self._get_range(store, key, start, end), key)

    def _read(self, request: Callable[[Any], Any], key: str) -> Any:
        content = self._request(request, key)
        self.traffic.read(len(content))
        return content

    def size(self, key: str) -> int:
        """Return the size of an object in bytes; raises as `get`."""
        return self._request(lambda store: self._size(store, key), key, first=True)

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under `prefix`; raises as `objects`."""
        return self._request(lambda store: self._folders(store, prefix), None, first=True)

    def put(self, key: str, content: Any, size: int = 0) -> None:
        """Write an object, in pieces if it is large. It replaces an older one at the moment when it is complete.

        Args:
            key: its name.
            content: its bytes, the path of a file, or a file that is open for reading.
            size: the size of the open file in bytes.

        Raises:
            PermissionError: there are no credentials, they are wrong, or the store is only for reading.
            ConnectionError: as `get`.
        """
        self._request(lambda store: self._put(store, key, content, size), key)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there; raises as `put`."""

        def delete(store: Any) -> None:
            with suppress(FileNotFoundError):
                self._delete(store, key)

        self._request(delete, key)

    def etag(self, key: str) -> str | None:
        """Return a text that differs for each content of an object, None if there is none; raises as `put`."""
        try:
            return self._request(lambda store: self._etag(store, key), key)
        except NoBucketError:
            raise
        except FileNotFoundError:
            return None

    def shown(self) -> str:
        """Return the URL of the store, without its secrets."""
        return self.url

    def close(self) -> None:
        """End all waiting for retries."""
        closing, self._closing = self._closing, threading.Event()
        closing.set()

    # -- what a subclass knows: `store` is the client's ----------------------------------------------------------

    @abstractmethod
    def _open(self) -> Any:
        """Return the client's store."""

    @abstractmethod
    def _explain(self, error: Exception, key: str | None) -> Exception:
        """Turn an error of the client into a builtin one that says what to type."""

    @abstractmethod
    def _get(self, store: Any, key: str, size: int | None) -> Any: ...

    @abstractmethod
    def _get_range(self, store: Any, key: str, start: int, end: int) -> Any: ...

    @abstractmethod
    def _size(self, store: Any, key: str) -> int: ...

    @abstractmethod
    def _folders(self, store: Any, prefix: str) -> list[str]: ...

    @abstractmethod
    def _put(self, store: Any, key: str, content: Any, size: int) -> None: ...

    @abstractmethod
    def _delete(self, store: Any, key: str) -> None: ...

    @abstractmethod
    def _etag(self, store: Any, key: str) -> str: ...

    # -- requests --------------------------------------------------------------------------------------------------

    def _request(self, request: Callable[[Any], T], key: str | None, first: bool = False) -> T:
        backoff = None
        while True:
            try:
                result = request(self._store())
            except Exception as raised:
                error = self._explained(raised, key)
            else:
                self._worked = True
                return result
            backoff = backoff or Backoff(self._retry_timeout_s(error, first), self._closing.wait)
            is_stale = isinstance(error, StaleCredentialsError)
            if is_stale:
                self._opened = None  # forget the credentials: new ones may help, unless the old ones have never worked
            may_pass = isinstance(error, TemporaryError) or (is_stale and self._worked)
            if not may_pass or not backoff.wait():
                raise (ValueError(str(error)) if isinstance(error, WrongBodyError) else error) from None
            self.traffic.add(retries=1)

    def _retry_timeout_s(self, error: Exception, first: bool) -> float:
        """Return how long to retry a request that has failed for the first time."""
        if not self._worked and isinstance(error, OtherRegionError):
            return min(self.retry_timeout_s, self.REGION_RETRY_TIMEOUT_S)
        if not self._worked and first:
            return min(self.retry_timeout_s, self.FIRST_RETRY_TIMEOUT_S)
        return self.retry_timeout_s

    def _explained(self, error: Exception, key: str | None) -> Exception:
        """Turn any error into one of ours."""
        if isinstance(error, TemporaryError | StaleCredentialsError | ObjectChangedError | NotImplementedError):
            return error
        return self._explain(error, key)

    def _wrong_body(self, key: str, came: int, size: int) -> WrongBodyError:
        return WrongBodyError(
            f"{self.shown()}/{key} came with {came:,} bytes in place of {size:,}: try again later; where it was "
            "changed, list it anew"
        )

    def _store(self) -> Any:
        store = self._opened
        if store is None:
            with self._opening:
                if self._opened is None:
                    self._opened = self._open()
                store = self._opened
        return store
