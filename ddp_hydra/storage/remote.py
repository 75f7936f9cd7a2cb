"""Reads and writes objects over HTTP, with obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from ddp_hydra.storage.base import RangesIgnoredError, TemporaryError, WrongBodyError
from ddp_hydra.storage.counters import TransferCounters
from ddp_hydra.storage.listing import Walk
from ddp_hydra.storage.retrying import Retrying
from ddp_hydra.storage.stream import Stream

PIECE_BYTES = 8 * 2**20
"""Large objects are written, and results are read, in pieces of this size."""
_MOST_PIECES = 9000  # S3 takes 10,000

# obstore starts threads that a fork does not copy: used on both sides of one, it hangs.
_used = False
_forked = False


class Remote(Retrying):
    """Reads and writes objects over HTTP; see `Retrying`.

    Args:
        url: of the store, for its connections.
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long to retry a request.
        traffic: counts; None: an own one.
    """

    def __init__(
        self,
        url: str | None,
        timeout_s: float = 10.0,
        retry_timeout_s: float = 60.0,
        traffic: TransferCounters | None = None,
    ) -> None:
        super().__init__(timeout_s, retry_timeout_s, traffic)
        self._http_url = url

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
        try:
            content = self._request(lambda store: self._whole(store, key, size), key)
        except WrongBodyError as error:
            raise ValueError(str(error)) from None
        self.traffic.read(len(content))
        return content

    def _whole(self, store: Any, key: str, size: int | None) -> Any:
        content = store.get(key).bytes()
        if size is None or len(content) == size:
            return content
        import obstore

        is_document = bytes(content[:1]) in (b"", b"<")  # an error document, sent with the status of a success
        if is_document or obstore.head(store, key)["size"] != len(content):
            raise self._wrong_body(key, len(content), size)
        return content

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return bytes `start` to `end` (exclusive) of an object; raises as `get`.

        Raises:
            RangesIgnoredError: the store gives whole objects only, as `stream` takes them.
        """
        try:
            content = self._request(lambda store: store.get_range(key, start=start, end=end), key)
        except WrongBodyError as error:
            raise ValueError(str(error)) from None
        self.traffic.read(len(content))
        return content

    def stream(self, key: str, size: int, start: int = 0) -> Iterator[Any]:
        """Yield an object in pieces, in order, with one request for all of it: for stores without ranges.

        Args:
            key: its name.
            size: its bytes.
            start: how many bytes to skip; they are transferred all the same.

        Raises:
            ValueError: it has another size.
            Exception: as `get`.
        """
        stream = Stream(key, size, start, lambda came: self._wrong_body(key, came, size), self.traffic)
        try:
            while (piece := self._request(stream.next_piece, key)) is not None:
                yield piece
        except WrongBodyError as error:
            raise ValueError(str(error)) from None

    def size(self, key: str) -> int:
        """Return the size of an object in bytes; raises as `get`."""
        import obstore

        return int(self._request(lambda store: obstore.head(store, key)["size"], key, first=True))

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
        import obstore

        piece = max(PIECE_BYTES, -(-size // _MOST_PIECES))

        def put(store: Any) -> None:
            if hasattr(content, "seek"):
                content.seek(0)
            obstore.put(store, key, content, chunk_size=piece, max_concurrency=4)

        self._request(put, key)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """List the objects under a folder.

        Args:
            prefix: the folder, without the bucket; "" for all.

        Yields:
            Key and size in bytes. The key of a folder's marker comes without its last slash, and size 0.

        Raises:
            FileNotFoundError: there is no such bucket.
            PermissionError: no credentials, or wrong ones.
            ConnectionError: the endpoint is not reachable, is no S3 store, or does not have this bucket in its region.
            ValueError: a key that is no path.
        """
        walk = Walk(self.shown(), prefix)
        while page := self._request(walk.next_page, None, first=True):
            yield from page

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under `prefix`; raises as `objects`."""
        return self._request(lambda store: self._folders_twice(store, prefix), None, first=True)

    def _folders_twice(self, store: Any, prefix: str) -> list[str]:
        """List the folders until two answers agree: the client takes an error document for an empty one."""
        import obstore

        answers = [obstore.list_with_delimiter(store, prefix=prefix or None)["common_prefixes"] for _ in range(2)]
        if answers[0] != answers[1]:
            raise TemporaryError(f"{self.shown()} lists its folders differently each time: try again later")
        return sorted(folder.rsplit("/", 1)[-1] for folder in answers[0])

    def _explained(self, error: Exception, key: str | None) -> Exception:
        text = str(error)
        if isinstance(error, TemporaryError):
            return error
        if "non-partial response" in text or "Range request not supported" in text:
            return RangesIgnoredError(f"{self.shown()} gives whole objects only, and a part of {key} was asked for")
        if found := re.match(r".*Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)", text):
            start, end, came_from, came_to = map(int, found.groups())
            return self._wrong_body(str(key), came_to - came_from, end - start)
        if "invalid list response" in text:
            return TemporaryError(
                f"{self.shown()} answered with what is no listing: if it is an S3 store, try again later; if "
                "not, check data.endpoint_url=..."
            )
        return super()._explained(error, key)

    def _store(self) -> Any:
        global _used
        if _forked:
            raise RuntimeError(
                "a store was read in a process that then forked this one: the client would hang here. Read in threads "
                "(data.threads=...), or start processes by 'spawn' or 'forkserver', as in DataLoader(..., "
                'multiprocessing_context="forkserver")'
            )
        _used = True
        return super()._store()

    def _options(self) -> dict[str, Any]:
        """Return how obstore connects. It does not retry by itself, as this class does that and counts it."""
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


def is_forked() -> bool:
    """Return whether this process was forked by one that had read a store: the client would hang here."""
    return _forked


def _note_fork() -> None:
    global _forked
    _forked = _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
