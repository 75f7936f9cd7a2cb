"""Lets only one driver at a time write to a run's folder in a store.

The folder contains its owner's token. Each write succeeds only while the token is there.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import Any

from ddp_hydra.errors import TakenOver
from ddp_hydra.storage.base import ObjectChangedError, Store

OWNER = "owner"
"""The object with the token of the driver that may write."""
TRIES = 5

log = logging.getLogger(__name__)


class FencedStore(Store):
    """Writes to a store as its owner, until another process acquires it.

    A small object is replaced only if nobody else has changed it since this process became the owner (If-Match,
    If-None-Match). Large objects have a new name each time or only grow, so the owner is just checked before.

    Args:
        store: the run's folder.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.url, self.setting = store, store.url, store.setting
        self.token = secrets.token_hex(8)
        self.lost = False
        self._conditional = True
        self._tags: dict[str, str | None] = {}
        self._lock = threading.RLock()

    def get(self, key: str, size: int | None = None) -> Any:
        return self.store.get(key, size)

    def get_range(self, key: str, start: int, end: int) -> Any:
        return self.store.get_range(key, start, end)

    def size(self, key: str) -> int:
        return self.store.size(key)

    def etag(self, key: str) -> str | None:
        return self.store.etag(key)

    def owner(self) -> str | None:
        """Return the tag of the owner's object, for `acquire`; None if there was no owner yet."""
        return self.store.etag(OWNER)

    def acquire(self, owner: str | None) -> None:
        """Become the owner, unless another process has since `owner`, the result of that method."""
        content = self.token.encode()
        try:
            outdated = self.store.put_if(OWNER, content, owner)
            content += b"\n"  # another content, and so another tag
            self.store.put_if(OWNER, content, outdated)
            self._conditional = self._refuses(None, content) and self._refuses(outdated, content)
        except ObjectChangedError:
            if self._token() != self.token:
                raise self._taken_over() from None
        except NotImplementedError:
            self.store.put(OWNER, content)
            self._conditional = False

    def _refuses(self, etag: str | None, content: bytes) -> bool:
        """Return whether the store refuses to write an object that hasn't this ETag any more."""
        try:
            self.store.put_if(OWNER, content, etag)
        except ObjectChangedError:
            return True
        return False

    def warn_if_unconditional(self) -> None:
        """Log that the store does not enforce that only its owner writes, if it doesn't."""
        if not self._conditional:
            log.warning(
                "%s takes no conditional writes: that one driver writes is looked up, but not enforced", self.url
            )

    def check(self) -> None:
        if self.lost or self._token() != self.token:
            raise self._taken_over()

    def _token(self) -> str:
        """Return the owner's token, "" if the run was removed."""
        try:
            return str(self.store.get(OWNER), errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _taken_over(self) -> TakenOver:
        self.lost = True
        return TakenOver(f"another driver has taken over {self.url}, or the run was removed: this one ends")

    def put(self, key: str, content: Any, size: int = 0) -> None:
        if self.lost or not isinstance(content, bytes) or not self._conditional:
            self.check()
            self.store.put(key, content, size)
            return
        with self._lock:
            for _ in range(TRIES):
                if key not in self._tags:
                    tag = self.store.etag(key)
                    self.check()  # after the tag was read, so that it is not the tag of a later owner's object
                    self._tags[key] = tag
                try:
                    self._tags[key] = self.store.put_if(key, content, self._tags[key])
                    return
                except ObjectChangedError:  # by the owner before us, or by our own write whose answer was lost
                    del self._tags[key]
        raise ConnectionError(f"{self.url}/{key} changes all the time")

    def delete(self, key: str) -> None:
        self.check()
        with self._lock:
            self._tags.pop(key, None)
            self.store.delete(key)

    def put_if(self, key: str, content: bytes, etag: str | None) -> str:
        self.check()
        return self.store.put_if(key, content, etag)
