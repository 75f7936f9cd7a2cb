"""Takes items from an iterator in a thread, some ahead of who needs them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Holds items that were taken from an iterator ahead of time.

    Args:
        items: the iterator; an error that it raises is raised where its item is waited for.
        depth: item -> number of items of its size to hold at most; 0 of the first: take each when it is waited for.
        stop: called before the end is waited for: it makes the iterator end soon.
    """

    def __init__(self, items: Iterator[Item], depth: Callable[[Item], int] | None, stop: Callable[[], None]) -> None:
        self.items, self.depth, self.stop = items, depth, stop
        self.held: deque[Item] = deque()
        self.has_ended = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.closed = False
        self.thread: threading.Thread | None = None
        if depth is not None:
            self.thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self.thread.start()

    def counts(self) -> tuple[int, bool]:
        """Return how many items are held, and whether no more will come."""
        with self.changed:
            return len(self.held), self.has_ended and self.error is None

    def wait_for(self, n: int) -> bool:
        """Wait until so many items are held; return False if fewer are left."""
        while self.thread is None and len(self.held) < n and not self.has_ended:
            self._take_one()
        with self.changed:
            self.changed.wait_for(lambda: len(self.held) >= n or self.has_ended)
            if len(self.held) < n and self.error is not None:
                raise self.error
            return len(self.held) >= n

    def take(self) -> Item:
        """Return the next item; there must be one."""
        assert self.wait_for(1)
        with self.changed:
            self.changed.notify_all()
            return self.held.popleft()

    def close(self) -> None:
        """Take no more items, and end the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.stop()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        while not self.has_ended:
            self._take_one()
            with self.changed:
                self.changed.wait_for(lambda: self.closed or not self._is_full())
                if self.closed:
                    return

    def _take_one(self) -> None:
        try:
            item = next(self.items)
        except StopIteration:
            self._end()
        except BaseException as error:
            self._end(error)
        else:
            with self.changed:
                self.held.append(item)
                self.changed.notify_all()

    def _end(self, error: BaseException | None = None) -> None:
        with self.changed:
            self.has_ended, self.error = True, error
            self.changed.notify_all()

    def _is_full(self) -> bool:
        assert self.depth is not None
        return bool(self.held) and len(self.held) >= self.depth(self.held[0])
