"""Threads that fetch the next numbers of a known order."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import islice

_POLL_S = 0.2


class Prefetcher:
    """Fetches the next numbers of a known order in background threads, a few at a time.

    Args:
        fetch: called with a number. It returns whether it is finished with it; False means: no space yet, try again.
            It calls `note_space` as soon as the number has its space: space is given out in the known order.
        depth: how many numbers are fetched before they are needed.
        poll: called about every 0.2 seconds.
    """

    def __init__(self, fetch: Callable[[int], bool], depth: int, poll: Callable[[], None]) -> None:
        self.depth = depth
        self._fetch = fetch
        self._poll = poll
        self._changed = threading.Condition()
        self._places: dict[int, int] = {}  # of all numbers that are still needed
        self._waiting: dict[int, None] = {}  # the needed numbers that are not in use yet, in order
        self._fetched: set[int] = set()  # finished or under way
        self._asking: int | None = None  # the number that has no space yet
        self._paused_until = 0.0
        self._closing = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, once."""
        with self._changed:
            if self._threads or self._closing:
                return
            # Daemon threads that hold only a weak reference: a prefetcher that nobody closes lets its process end.
            arguments = (weakref.ref(self), self._changed)
            for _ in range(self.depth + 1):  # one thread may still fetch what is already in use
                self._threads.append(threading.Thread(target=_work, args=arguments, name="shard-prefetch", daemon=True))
        for thread in self._threads:
            thread.start()

    def expect(self, order: Sequence[int]) -> None:
        """Replace the order.

        Args:
            order: the numbers that will be needed, each once.
        """
        with self._changed:
            self._places = {number: place for place, number in enumerate(order)}
            self._waiting = dict.fromkeys(order)
            self._fetched = set()
            self._changed.notify_all()

    def note_started(self, number: int) -> None:
        """Note that a number is in use, or waited for."""
        with self._changed:
            self._waiting.pop(number, None)
            self._changed.notify_all()

    def note_done(self, number: int) -> None:
        """Note that a number is not needed any more."""
        with self._changed:
            self._waiting.pop(number, None)
            self._places.pop(number, None)
            self._paused_until = 0.0
            self._changed.notify_all()

    def note_space(self, number: int) -> None:
        """Note that a number has its space: the next one may ask for space."""
        with self._changed:
            if self._asking == number:
                self._asking = None
                self._changed.notify_all()

    def in_use(self) -> set[int]:
        """Return the numbers that are in use and still needed."""
        with self._changed:
            return self._places.keys() - self._waiting.keys()

    def needed(self) -> dict[int, int]:
        """Return all numbers that are still needed, with their places in the order."""
        with self._changed:
            return dict(self._places)

    def close(self) -> None:
        """Stop the threads and wait for them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _next(self) -> int | None:
        """Return the number to fetch now, or None; the caller holds the lock."""
        if self._asking is not None or time.monotonic() < self._paused_until:
            return None
        return next((number for number in islice(self._waiting, self.depth) if number not in self._fetched), None)

    def _note_fetched(self, number: int, finished: bool) -> None:
        self.note_space(number)
        with self._changed:
            if not finished:
                self._fetched.discard(number)
                self._paused_until = time.monotonic() + _POLL_S
            self._changed.notify_all()


def _work(reference: weakref.ref[Prefetcher], changed: threading.Condition) -> None:
    while (prefetcher := reference()) is not None:
        prefetcher._poll()
        with changed:
            if prefetcher._closing:
                return
            number = prefetcher._next()
            if number is None:
                del prefetcher
                changed.wait(_POLL_S)
                continue
            prefetcher._fetched.add(number)
            prefetcher._asking = number
        finished = False
        try:
            finished = prefetcher._fetch(number)
        finally:
            prefetcher._note_fetched(number, finished)
