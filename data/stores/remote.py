"""Objects behind HTTP, read with obstore."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from data.stores.patience import StaleCredentialsError, TemporaryError, patiently
from data.stores.traffic import Traffic

T = TypeVar("T")

# obstore starts threads that a fork does not copy: used on both sides of one, it hangs.
_used = False
_forked = False


class Remote(ABC):
    """Reads and writes objects over HTTP, and tries again by itself.

    It opens its connections when they are first needed, in each process anew, so it can be pickled at any time.
    Its methods may be called from many threads at once.

    Args:
        url: of the store, for its connections.
        timeout_s: how long a connection may stay silent.
        patience_s: how long a request is tried again; the first contact gets `FIRST_PATIENCE_S`.
        traffic: counts; None: an own one.
    """

    FIRST_PATIENCE_S = 5.0

    def __init__(
        self, url: str | None, timeout_s: float = 10.0, patience_s: float = 60.0, traffic: Traffic | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.traffic = traffic or Traffic()
        self._http_url = url
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

    @abstractmethod
    def _open(self) -> Any:
        """Return a store of obstore."""

    @abstractmethod
    def _explain(self, error: Exception, key: str | None) -> Exception:
        """Turn an error of obstore into a builtin one that says what to type."""

    def get(self, key: str) -> Any:
        """Return the content of an object, as something with the buffer protocol.

        Raises:
            FileNotFoundError: there is no such object.
            PermissionError: no credentials, or wrong ones.
            ConnectionError: the store is not reachable, or out of order, for longer than `patience_s`.
        """
        content = self._request(lambda store: store.get(key).bytes(), key)
        self.traffic.read(len(content))
        return content

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return bytes `start` to `end` (exclusive) of an object; raises as `get`."""
        content = self._request(lambda store: store.get_range(key, start=start, end=end), key)
        self.traffic.read(len(content))
        return content

    def size(self, key: str) -> int:
        """Return the size of an object in bytes; raises as `get`."""
        import obstore

        return int(self._request(lambda store: obstore.head(store, key)["size"], key, first=True))

    def put(self, key: str, content: Any) -> None:
        """Put an object there: bytes, or the path of a file, in pieces where it is large.

        Raises:
            PermissionError: no credentials, wrong ones, or a store that is only for reading.
            ConnectionError: as `get`.
        """
        import obstore

        self._request(lambda store: obstore.put(store, key, content), key)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """List the objects under a folder.

        Args:
            prefix: the folder, without the bucket; "" for all.

        Yields:
            Key and size in bytes. The key of a folder's marker comes without its last slash, and size 0.

        Raises:
            FileNotFoundError: there is no such bucket.
            PermissionError: no credentials, or wrong ones.
            ConnectionError: the endpoint is not reachable, or is no S3 store.
            ValueError: another region, or a key that is no path.
        """
        import obstore

        pages: Iterator[Any] | None = None
        last: str | None = None

        def next_page(store: Any) -> Any:
            nonlocal pages
            if pages is None:
                pages = iter(obstore.list(store, prefix=prefix or None, offset=last, chunk_size=1000))
            try:
                return next(pages, None)
            except Exception:
                pages = None  # the next try goes on behind what was shown
                raise

        while page := self._request(next_page, None, first=True):
            for item in page:
                yield item["path"], item["size"]
            last = page[-1]["path"]

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under `prefix`; raises as `objects`."""
        import obstore

        found = self._request(lambda store: obstore.list_with_delimiter(store, prefix=prefix or None), None, first=True)
        return sorted(folder.rsplit("/", 1)[-1] for folder in found["common_prefixes"])

    def close(self) -> None:
        """Let nobody wait for a retry any more."""
        closing, self._closing = self._closing, threading.Event()
        closing.set()

    def _request(self, request: Callable[[Any], T], key: str | None, first: bool = False) -> T:
        try:
            result = request(self._store())
        except Exception as error:
            return self._request_again(self._explain(error, key), request, key, first)
        self._worked = True
        return result

    def _request_again(self, error: Exception, request: Callable[[Any], T], key: str | None, first: bool) -> T:
        if not isinstance(error, (TemporaryError, StaleCredentialsError)):
            raise error from None

        def once() -> T:
            try:
                return request(self._store())
            except Exception as again:
                raise self._explain(again, key) from None

        patience_s = self.FIRST_PATIENCE_S if first and not self._worked else self.patience_s
        result = patiently(once, patience_s, self.traffic, self._closing, self._renew, error)
        self._worked = True
        return result

    def _renew(self) -> bool:
        """Forget the credentials; whether that may help: those that never worked will not by asking again."""
        self._opened = None
        return self._worked

    def _store(self) -> Any:
        store = self._opened
        if store is None or _forked:
            store = self._open_once()
        return store

    def _open_once(self) -> Any:
        global _used
        if _forked:
            raise RuntimeError(
                "a store was read in a process that then forked this one: the client would hang here. Read in threads "
                "(data.threads=...), or start processes by 'spawn' or 'forkserver', as in DataLoader(..., "
                'multiprocessing_context="forkserver")'
            )
        with self._opening:
            _used = True
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _options(self) -> dict[str, Any]:
        """Return how obstore shall connect, and that it shall not try again: that is done here, and counted."""
        client: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=3),
            "read_timeout": timedelta(seconds=self.timeout_s),
            "timeout": timedelta(hours=1),
        }
        if self._http_url is not None and self._http_url.startswith("http://"):
            client["allow_http"] = True
            host = urlsplit(self._http_url).hostname or ""
            if host == "localhost" or host.startswith("127."):
                # A proxy of the environment can't reach this machine; one that excludes it is the way round.
                client |= {"proxy_url": self._http_url, "proxy_excludes": host}
        return {"client_options": client, "retry_config": {"max_retries": 0}}


def _note_fork() -> None:
    global _forked
    _forked = _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
