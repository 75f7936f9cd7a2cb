"""A run's folder in a store has one writer: its owner's token is there, and each write holds only while it is."""

from __future__ import annotations

import logging
import secrets
import threading
from typing import IO

from ddp_hydra.errors import TakenOver
from ddp_hydra.storage.bucket import Changed
from ddp_hydra.storage.results_root import Store

OWNER = "owner"
"""The object with the token of the driver that may write."""
TRIES = 5

log = logging.getLogger(__name__)


class Fenced:
    """A store for one owner. Another that takes it over ends this one's writing.

    Small objects replace only what this one has put there or seen since it was the owner (If-Match, If-None-Match).
    For large ones, whose names are new each time or which only grow, the owner is looked up before.

    Args:
        store: the run's folder.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.url, self.token = store, store.url, secrets.token_hex(8)
        self.lost = False
        self._conditional = True
        self._tags: dict[str, str | None] = {}
        self._lock = threading.RLock()

    def owner(self) -> str | None:
        """Return what is the owner's object now, for `take`; None where nobody has been."""
        return self.store.tag(OWNER)

    def take(self, before: str | None) -> None:
        """Become the owner.

        Args:
            before: what `owner` has returned, before it was decided.

        Raises:
            TakenOver: somebody was quicker.
        """
        content = f"{self.token}\n".encode()
        try:
            self.store.put_if(OWNER, content, before)
            self.store.put_if(OWNER, content, None)  # which a store that keeps conditions refuses
        except Changed:
            if self.store.get(OWNER) == content:
                return
            raise self._taken_over() from None
        except NotImplementedError:
            self.store.put(OWNER, content)
        self._conditional = False
        log.warning(
            "%s takes no conditional writes (If-None-Match): that only one driver writes there is looked up before "
            "each write, but not enforced by the store",
            self.url,
        )

    def check(self) -> None:
        """Make sure that we are the owner.

        Raises:
            TakenOver: somebody else is.
        """
        if self.lost or self.store.get(OWNER).decode(errors="replace").strip() != self.token:
            raise self._taken_over()

    def _taken_over(self) -> TakenOver:
        self.lost = True
        return TakenOver(
            f"another driver has taken over {self.url}: this one ends, and writes nothing more there; see python -m "
            f"ddp_hydra attach run={self.url}"
        )

    def put(self, name: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Put an object there, as the owner; raises as `check`, too."""
        if self.lost or not isinstance(content, bytes) or not self._conditional:
            self.check()
            self.store.put(name, content, size)
            return
        with self._lock:
            for _ in range(TRIES):
                if name not in self._tags:
                    tag = self.store.tag(name)
                    self.check()  # after that: nobody who was the owner later has put it there
                    self._tags[name] = tag
                try:
                    self._tags[name] = self.store.put_if(name, content, self._tags[name])
                    return
                except Changed:  # by who was the owner before, or by a try of our own whose answer was lost
                    del self._tags[name]
        raise ConnectionError(f"{self.url}/{name} changes all the time")

    def delete(self, name: str) -> None:
        """Remove an object, as the owner."""
        self.check()
        with self._lock:
            self._tags.pop(name, None)
            self.store.delete(name)

    def get(self, name: str) -> bytes:
        """Return the content of a small object."""
        return self.store.get(name)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of an object."""
        return self.store.read(name, start, end)

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if there is none."""
        return self.store.size(name)

    def tag(self, name: str) -> str | None:
        """Return what tells this content of an object from others."""
        return self.store.tag(name)

    def put_if(self, name: str, content: bytes, tag: str | None) -> str:
        """Put an object there where it is still the one of a tag."""
        self.check()
        return self.store.put_if(name, content, tag)


class Below:
    """A folder inside of a fenced one.

    Args:
        fenced: the run's folder.
        name: of the folder in it.
    """

    def __init__(self, fenced: Fenced, name: str) -> None:
        self._fenced, self._name, self.url = fenced, name, f"{fenced.url}/{name}"

    def put(self, name: str, content: bytes | IO[bytes], size: int = 0) -> None:
        """Put an object there."""
        self._fenced.put(f"{self._name}/{name}", content, size)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._fenced.delete(f"{self._name}/{name}")

    def get(self, name: str) -> bytes:
        """Return the content of a small object."""
        return self._fenced.get(f"{self._name}/{name}")

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of an object."""
        return self._fenced.read(f"{self._name}/{name}", start, end)

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if there is none."""
        return self._fenced.size(f"{self._name}/{name}")

    def tag(self, name: str) -> str | None:
        """Return what tells this content of an object from others."""
        return self._fenced.tag(f"{self._name}/{name}")

    def put_if(self, name: str, content: bytes, tag: str | None) -> str:
        """Put an object there where it is still the one of a tag."""
        return self._fenced.put_if(f"{self._name}/{name}", content, tag)
