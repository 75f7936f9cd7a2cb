"""Reads and writes objects over HTTP, with obstore: what buckets and web servers have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from ddp_hydra.storage.base import PIECE_BYTES, RangesIgnoredError, Store, TemporaryError
from ddp_hydra.storage.forked_reader import by_reader, note_use

_MOST_PIECES = 9000  # S3 takes 10,000
_STREAMED_BYTES = 2**20
_PAGE = 1000
_EMPTY = 2
"""A listing must be empty this many times before it counts as empty."""


class ObjectStore(Store):
    """Reads and writes objects over HTTP; see `Store`. It also reads in processes that were forked."""

    get = by_reader(Store.get)
    get_range = by_reader(Store.get_range)
    size = by_reader(Store.size)
    folders = by_reader(Store.folders)

    @by_reader
    def stream(self, key: str, size: int, start: int = 0) -> Iterator[Any]:
        """Yield an object in pieces, in order, with one request for all of it: for stores without ranges.

        After an error the object is read from its beginning, as there is no other way; bytes that were yielded before
        are skipped.
        """
        given, position = start, 0
        pieces: Iterator[Any] | None = None

        def next_piece(client: Any) -> Any:
            nonlocal given, position, pieces
            try:
                if pieces is None:
                    pieces, position = iter(client.get(key).stream(min_chunk_size=_STREAMED_BYTES)), 0
                    self.traffic.add(requests=1)
                for piece in pieces:
                    position += len(piece)
                    self.traffic.add(bytes=len(piece))
                    if position > size:
                        break
                    if (new := position - given) > 0:
                        given = position
                        return memoryview(piece)[max(0, len(piece) - new) :]
                if position != size:
                    raise self._wrong_body(key, position, size)
                return None
            except Exception:
                pieces = None
                raise

        while (piece := self._request(next_piece, key)) is not None:
            yield piece

    @by_reader
    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the key and the size in bytes of each object below a folder; see `Store`.

        The key of a folder's marker comes without its last slash, and size 0.

        Raises:
            ValueError: a key that is not a path.
            Exception: as `Store.objects`.
        """
        walk = Walk(self.public_url(), prefix)
        while page := self._request(walk.next_page, None, first=True):
            yield from page

    def _get(self, client: Any, key: str, size: int | None) -> Any:
        content = client.get(key).bytes()
        if size is None or len(content) == size:
            return content
        is_document = bytes(content[:1]) in (b"", b"<")  # an error document, sent with the status of a success
        if is_document or self._size(client, key) != len(content):
            raise self._wrong_body(key, len(content), size)
        return content

    def _get_range(self, client: Any, key: str, start: int, end: int) -> Any:
        return client.get_range(key, start=start, end=end)

    def _size(self, client: Any, key: str) -> int:
        return int(client.head(key)["size"])

    def _folders(self, client: Any, prefix: str) -> list[str]:
        """List the folders until two answers agree: the client takes an error document for an empty one."""
        answers = [client.list_with_delimiter(prefix or None)["common_prefixes"] for _ in range(2)]
        if answers[0] != answers[1]:
            raise TemporaryError(f"{self.public_url()} lists its folders differently each time: try again later")
        return sorted(folder.rsplit("/", 1)[-1] for folder in answers[0])

    def _put(self, client: Any, key: str, content: Any, size: int) -> None:
        if hasattr(content, "seek"):
            content.seek(0)
        piece = max(PIECE_BYTES, -(-size // _MOST_PIECES))
        client.put(key, content, chunk_size=piece, max_concurrency=4)

    def _delete(self, client: Any, key: str) -> None:
        client.delete(key)

    def _etag(self, client: Any, key: str) -> str:
        return str(client.head(key)["e_tag"])

    def _explained(self, error: Exception, key: str | None) -> Exception:
        text = str(error)
        if isinstance(error, TemporaryError):
            return error
        if "non-partial response" in text or "Range request not supported" in text:
            return RangesIgnoredError(
                f"{self.public_url()} gives whole objects only, and a part of {key} was asked for"
            )
        if found := re.match(r".*Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)", text):
            start, end, came_from, came_to = map(int, found.groups())
            return self._wrong_body(str(key), came_to - came_from, end - start)
        if "invalid list response" in text:
            return TemporaryError(
                f"{self.public_url()} answered with what is not a listing: if it is an S3 store, try again later; if "
                "not, check data.endpoint_url=..."
            )
        return super()._explained(error, key)

    def _client(self) -> Any:
        note_use()
        return super()._client()

    def _options(self, url: str | None) -> dict[str, Any]:
        """Return how obstore connects to a URL. It does not retry by itself, as this class does that and counts it."""
        client: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=3),
            "read_timeout": timedelta(seconds=self.timeout_s),
            "timeout": timedelta(hours=1),
        }
        if url is not None and url.startswith("http://"):
            client["allow_http"] = True
            host = urlsplit(url).hostname or ""
            if host == "localhost" or host.startswith("127."):
                # A proxy of the environment can't reach this machine; one that excludes it is the way round.
                client |= {"proxy_url": url, "proxy_excludes": host}
        return {"client_options": client, "retry_config": {"max_retries": 0}}


class Walk:
    """Lists the objects below a prefix, page by page, and knows which page is the last.

    The client mistakes several answers for the end of a listing: an error document, the page of a proxy, "more"
    without a token. So this class begins an ended listing again, just before the last object. Only an answer that has
    this object, and nothing after it, is the end. After an error, the listing goes on in the same way. The order of
    keys is not used, as not all stores sort them.

    Args:
        url: of the store, for messages.
        prefix: the folder; "" for all.
    """

    def __init__(self, url: str, prefix: str) -> None:
        self._url = url
        self._prefix = prefix or None
        self._pages: Iterator[Any] | None = None
        self._last: tuple[str, bool] | None = None
        self._reached = True  # whether the current listing has come to the last returned object
        self._news = False  # whether it had objects after that one
        self._empty = 0

    def next_page(self, client: Any) -> list[tuple[str, int]]:
        """Return key and size of the next objects, or an empty list at the end.

        Args:
            client: of obstore.

        Raises:
            TemporaryError: the answer can't be right; the next call goes on after the last object that was returned.
        """
        while True:
            if self._pages is None:
                self._pages = self._begin(client)
            try:
                page = next(self._pages, None)
            except Exception:
                self._pages = None
                raise
            if page is None:
                self._pages = None
                if self._is_whole():
                    return []
            elif found := self._behind_last([(item["path"], item["size"]) for item in page]):
                return found

    def _begin(self, client: Any) -> Iterator[Any]:
        self._reached, self._news = self._last is None, False
        # A shorter key is a smaller one; the client takes none that ends with a dot or a slash.
        offset = self._last[0][:-1].rstrip("./") if self._last else ""
        return iter(client.list(self._prefix, offset=offset or None, chunk_size=_PAGE))

    def _behind_last(self, found: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Leave out the objects that were returned before."""
        start = 0
        while not self._reached and start < len(found):
            self._reached = _mark(*found[start]) == self._last
            start += 1
        if found := found[start:]:
            self._news, self._last = True, _mark(*found[-1])
        return found

    def _is_whole(self) -> bool:
        """Return whether the listing that has just ended proves that there are no more objects."""
        if not self._reached and self._last is not None:
            raise TemporaryError(
                f"the listing of {self._url} broke off at {self._last[0]!r}, and the answers that came since do not "
                "even have that: the store is out of order, or files are being removed; try again later"
            )
        if self._last is None:
            self._empty += 1
            return self._empty == _EMPTY
        return not self._news


def _mark(path: str, size: int) -> tuple[str, bool]:
    """Return what identifies an object: the marker of a folder may have the same path as a file."""
    return path, bool(size)
