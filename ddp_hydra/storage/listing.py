"""Lists objects until the listing is complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp_hydra.storage.base import TemporaryError

_PAGE = 1000
_EMPTY = 2
"""A listing must be empty this many times before it counts as empty."""


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

    def next_page(self, store: Any) -> list[tuple[str, int]]:
        """Return key and size of the next objects, or an empty list at the end.

        Args:
            store: of obstore.

        Raises:
            TemporaryError: the answer can't be right; the next call goes on after the last object that was returned.
        """
        while True:
            if self._pages is None:
                self._pages = self._begin(store)
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

    def _begin(self, store: Any) -> Iterator[Any]:
        self._reached, self._news = self._last is None, False
        # A shorter key is a smaller one; the client takes none that ends with a dot or a slash.
        offset = self._last[0][:-1].rstrip("./") if self._last else ""
        return iter(store.list(self._prefix, offset=offset or None, chunk_size=_PAGE))

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
