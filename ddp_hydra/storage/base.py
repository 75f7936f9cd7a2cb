"""Defines what all stores have in common: methods, retries, errors and counters."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.retry import Backoff

T = TypeVar("T")
PIECE_BYTES = 8 * 2**20
"""Large objects are written, and results are read, in pieces of this size."""


class TemporaryError(ConnectionError):
    """The store is out of reach, busy or broken: the next try may work."""

    told = True
    """Its message says all, so it is shown without a traceback; a job is tried again."""


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

    told = True


class ObjectChangedError(Exception):
    """A conditional put found another object than it expected."""


_EXPLAINED = (TemporaryError, StaleCredentialsError, ObjectChangedError, NotImplementedError)


class ProcessLocal:
    """Leaves what `_set_process_state` sets out of pickles: the process that unpickles it sets it anew.

    A fork keeps it, with locks of its own: its parent's may be held by threads that a fork does not copy. A subclass
    calls `_begin_process_state` where it is built.
    """

    def _begin_process_state(self) -> None:
        known = set(vars(self))
        self._set_process_state()
        self._process_state = set(vars(self)) - known
        _process_local[id(self)] = self

    def _set_process_state(self) -> None:
        raise NotImplementedError

    def _begin_fork(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, _LOCK):
                setattr(self, name, threading.Lock())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._process_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_process_state()
        _process_local[id(self)] = self


_LOCK = type(threading.Lock())
_process_local: weakref.WeakValueDictionary[int, ProcessLocal] = weakref.WeakValueDictionary()


def _begin_fork() -> None:
    for item in list(_process_local.values()):
        item._begin_fork()


os.register_at_fork(after_in_child=_begin_fork)


class Counters(ProcessLocal):
    """Counters by name, for all threads of a process. An unpickled copy begins at zero."""

    def __init__(self) -> None:
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._lock = threading.Lock()
        self.totals: defaultdict[str, float] = defaultdict(int)

    def add(self, **more: float) -> None:
        """Add to some counters, given by name."""
        with self._lock:
            for name, value in more.items():
                self.totals[name] += value


class TransferCounters(Counters):
    """Counts answered requests, retries (requests that were made again), and bytes that were read."""

    requests = property(lambda self: int(self.totals["requests"]))
    retries = property(lambda self: int(self.totals["retries"]))
    bytes = property(lambda self: int(self.totals["bytes"]))


def bare_url(url: str) -> str:
    """Return a URL, or a path, without its possible secrets: password, and of http(s) also user and query."""
    if not url.startswith(("http://", "https://")):
        return re.sub(r"//([^/@:]*):[^/@]*@", r"//\1@", url)
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_key(key: str, where: object = "its store") -> None:
    """Refuse a key that would lead out of its store: a ValueError."""
    if key.startswith("/") or ".." in key.split("/"):
        raise ValueError(f"{key!r} leads out of {where}: give paths below it, without '..'")


def cause(full: str) -> str:
    """Return " (why)" from the depths of the client's error, or nothing."""
    if "InvalidCertificate" in full:
        return " (its certificate is not trusted: set SSL_CERT_FILE to the file of whoever signed it)"
    found = re.findall(r'message: "([^"]+)"', full) or re.findall(r"kind: (TimedOut|Timeout)", full)
    return f" ({found[-1]})" if found else ""


_of_parent: list[dict[str, Any]] = []
"""Keeps the connections that a fork has copied: closing one would end its parent's."""


class Store(ProcessLocal):
    """A place for data or results: a folder, a bucket, a web server. Its methods may be called from many threads.

    This class retries what fails for now and counts requests; a subclass says how its client does something once. It
    opens its connections when they are first needed, in each process anew, so it can be pickled at any time.

    Stores of data raise builtin errors. A store of results raises ConfigError for what only a person can put right,
    ConnectionError for what may pass, and FileNotFoundError if the object to read is not there.

    Args:
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long to retry a request; the first contact gets `FIRST_RETRY_TIMEOUT_S` at most.
        traffic: counts requests and bytes; None for counters of its own.

    Attributes:
        url: of the store.
        setting: the config key that names the store, for messages; None: it holds results.
        endpoint_url: of a bucket of S3; None: AWS, or another store.
        ranges: whether the store can return parts of objects, as far as is known.
    """

    url: str
    setting: str | None
    endpoint_url: str | None = None
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
        self._begin_process_state()

    def _set_process_state(self) -> None:
        self._opened: Any = None
        self._opening = threading.Lock()
        self._closing = threading.Event()
        self._worked = False

    def _begin_fork(self) -> None:
        _of_parent.append(dict(vars(self)))
        self._set_process_state()

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
        return self._read(self._get, key, size)

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return bytes `start` to `end` (exclusive) of an object; raises as `get`.

        Raises:
            RangesIgnoredError: the store gives whole objects only, as `stream` takes them.
        """
        return self._read(self._get_range, key, start, end)

    def _read(self, request: Callable[..., Any], key: str, *arguments: Any) -> Any:
        content = self._request(request, key, key, *arguments)
        self.traffic.add(requests=1, bytes=len(content))
        return content if self.setting is not None else bytes(content)

    def stream(self, key: str, size: int, start: int = 0) -> Iterator[Any]:
        """Yield the content of an object of `size` bytes from `start` on, piece by piece; raises as `get`."""
        for begin in range(start, size, PIECE_BYTES):
            yield self.get_range(key, begin, min(begin + PIECE_BYTES, size))

    def size(self, key: str) -> int:
        """Return the size of an object in bytes; raises as `get`."""
        return self._request(self._size, key, key, first=True)

    def size_or_none(self, key: str) -> int | None:
        """Return the size of an object in bytes, None if there is none; raises as `put`."""
        return self._or_none(self.size, key)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the key and the size in bytes of each object below a folder, with all folders in it.

        Args:
            prefix: the folder; "" for all.

        Raises:
            FileNotFoundError: there is no such store.
            PermissionError: no credentials, or wrong ones.
            ConnectionError: the store is not reachable, or out of order.
        """
        raise NotImplementedError

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under `prefix`; raises as `objects`."""
        return self._request(self._folders, None, prefix, first=True)

    def put(self, key: str, content: Any) -> None:
        """Write an object, in pieces if it is large. It replaces an older one at the moment when it is complete.

        Args:
            key: its name.
            content: its bytes, or a file that is open for reading.

        Raises:
            PermissionError: there are no credentials, they are wrong, or the store is only for reading.
            ConnectionError: as `get`.
        """
        self._request(self._put, key, key, content)

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        """Write an object if it still has this ETag (None: if there is no object), and return its new ETag.

        A try whose answer was lost may have written it: then the next one finds a changed object.

        Raises:
            ObjectChangedError: the object has another ETag.
            NotImplementedError: the store has no conditional writes.
            Exception: as `put`.
        """
        return self._request(self._put_if, key, key, content, etag)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there; raises as `put`."""

        def delete(client: Any) -> None:
            with suppress(FileNotFoundError):
                self._delete(client, key)

        self._request(delete, key)

    def etag(self, key: str) -> str | None:
        """Return a text that differs for each content of an object, None if there is none; raises as `put`."""
        return self._or_none(lambda key: self._request(self._etag, key, key), key)

    def _or_none(self, request: Callable[[str], T], key: str) -> T | None:
        try:
            return request(key)
        except NoBucketError:
            raise
        except FileNotFoundError:
            return None

    def public_url(self) -> str:
        """Return the URL of the store, without its secrets."""
        return bare_url(self.url).rstrip("/")

    def close(self) -> None:
        """End all waiting for retries."""
        closing, self._closing = self._closing, threading.Event()
        closing.set()

    # -- what a subclass knows -------------------------------------------------------------------------------------

    # The first argument is the client: what `_open` returns. Then come those of the method without an underscore.
    _get: Callable[[Any, str, int | None], Any]
    _get_range: Callable[[Any, str, int, int], Any]
    _size: Callable[[Any, str], int]
    _folders: Callable[[Any, str], list[str]]
    _put: Callable[[Any, str, Any], None]
    _delete: Callable[[Any, str], None]
    _etag: Callable[[Any, str], str]

    def _put_if(self, client: Any, key: str, content: bytes, etag: str | None) -> str:
        raise NotImplementedError

    def _open(self) -> Any:
        """Return the client's store."""

    def _explain(self, error: Exception, key: str | None) -> Exception:
        """Turn an error of the client, which is none of ours, into a builtin one that says what to type."""
        return error

    # -- requests --------------------------------------------------------------------------------------------------

    def _request(self, request: Callable[..., T], key: str | None, *arguments: Any, first: bool = False) -> T:
        """Call `request(client, *arguments)` until it works; errors are about `key`, or about the store as a whole."""
        backoff, closing = None, self._closing  # of now: `close` ends also what only begins to wait after it
        while True:
            try:
                result = request(self._client(), *arguments)
            except Exception as raised:
                error = raised if isinstance(raised, _EXPLAINED) else self._explain(raised, key)
            else:
                self._worked = True
                return result
            backoff = backoff or Backoff(self._retry_timeout_s(error, first), closing.wait)
            is_stale = isinstance(error, StaleCredentialsError)
            if is_stale:
                self._opened = None  # forget the credentials: new ones may help, unless the old ones have never worked
            may_pass = isinstance(error, TemporaryError) or (is_stale and self._worked)
            if not may_pass or not backoff.wait():
                raise self._final(error) from None
            self.traffic.add(retries=1)

    def _retry_timeout_s(self, error: Exception, first: bool) -> float:
        if not self._worked and isinstance(error, OtherRegionError):
            return min(self.retry_timeout_s, self.REGION_RETRY_TIMEOUT_S)
        if not self._worked and first:
            return min(self.retry_timeout_s, self.FIRST_RETRY_TIMEOUT_S)
        return self.retry_timeout_s

    def _final(self, error: Exception) -> Exception:
        """Return the error to raise; see the class for what stores of results raise."""
        if self.setting is not None:
            return ValueError(str(error)) if isinstance(error, WrongBodyError) else error
        if isinstance(error, NoBucketError | OtherRegionError | PermissionError):
            return ConfigError(str(error))
        if isinstance(error, FileNotFoundError | ConnectionError) or not isinstance(error, OSError | ValueError):
            return error
        return ConnectionError(str(error))

    def _wrong_body(self, key: str, came: int, size: int) -> WrongBodyError:
        return WrongBodyError(
            f"{self.public_url()}/{key} came with {came:,} bytes in place of {size:,}: try again, or list it anew"
        )

    def _check_answers(self, client: Any, prefix: str) -> None:
        """Refuse a server that has an object of any name: clients take a web console's page for an empty listing."""
        key = f"{prefix}/.ddp_hydra-no-object".lstrip("/")
        try:
            self._size(client, key)
        except Exception as error:
            explained = self._explain(error, key)
            if isinstance(explained, TemporaryError):
                raise
            return
        raise self._no_listing()

    def _no_listing(self) -> TemporaryError:
        address = "data.endpoint_url=..." if self.setting is not None else "AWS_ENDPOINT_URL in the environment"
        return TemporaryError(
            f"{self.public_url()} gave what is not a listing, as a web page: try again later, or check {address}"
        )

    def _client(self) -> Any:
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened
