"""Threads that fetch what is needed next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

_TICK_S = 0.2


class Prefetcher:
    """Fetches the next things of a known order in the background, a few at a time.

    Args:
        fetch: called with a number; says whether that is settled, or is to be tried again later.
        depth: how many things beyond those in use, or waited for, are fetched.
        tick: called now and then.
    """

    def __init__(self, fetch: Callable[[int], bool], depth: int, tick: Callable[[], None]) -> None:
        self.depth = depth
        self._fetch = fetch
        self._tick = tick
        self._changed = threading.Condition()
        self._order: list[int] = []
        self._places: dict[int, int] = {}
        self._started: set[int] = set()
        self._done: set[int] = set()
        self._settled: set[int] = set()
        self._under_way: set[int] = set()
        self._with_room: set[int] = set()
        self._without_room: set[int] = set()
        self._first = 0
        self._closing = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, once."""
        with self._changed:
            if self._threads or self._closing:
                return
            me = weakref.ref(self)
            for _ in range(self.depth + 1):  # one may still be at what is waited for now
                # Daemons, which know us only weakly: who forgets to close keeps no process from ending.
                arguments = (me, self._changed)
                self._threads.append(threading.Thread(target=_work, args=arguments, name="look-ahead", daemon=True))
        for thread in self._threads:
            thread.start()

    def expect(self, order: Sequence[int]) -> None:
        """Take a new order in place of the last one: each number once."""
        with self._changed:
            self._order = list(order)
            self._places = {number: place for place, number in enumerate(self._order)}
            self._started, self._done, self._settled, self._first = set(), set(), set(), 0
            self._changed.notify_all()

    def note_started(self, number: int) -> None:
        """Say that something is in use, or waited for."""
        with self._changed:
            self._started.add(number)
            self._changed.notify_all()

    def note_done(self, number: int) -> None:
        """Say that something is not needed any more."""
        with self._changed:
            self._started.add(number)
            self._done.add(number)
            self._changed.notify_all()

    def take_turn(self, number: int) -> bool:
        """Wait until all that is needed earlier has its room; say whether it has.

        Called while something is fetched: where there is not room for all, what comes next is to get it, and not
        what happened to ask first.
        """
        with self._changed:
            while not self._closing:
                place = self._places.get(number, 0)
                pending = {other for other in self._under_way if self._places.get(other, place) < place}
                pending -= self._with_room
                if not pending:
                    break
                if pending & self._without_room:
                    return False
                self._changed.wait(_TICK_S)
            return True

    def note_room(self, number: int) -> None:
        """Say that what is fetched has its room."""
        with self._changed:
            self._with_room.add(number)
            self._changed.notify_all()

    def in_use(self) -> set[int]:
        """Return what is in use and expected to be so for some time."""
        with self._changed:
            return (self._started - self._done) & self._places.keys()

    def places(self) -> dict[int, int]:
        """Return the place in line of all that is still needed."""
        with self._changed:
            return {number: place for number, place in self._places.items() if number not in self._done}

    def close(self) -> None:
        """Stop the threads and wait for them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _next(self) -> int | None:
        """Return what is to be fetched now; the lock is held."""
        while self._first < len(self._order) and self._order[self._first] in self._started:
            self._first += 1
        ahead = 0
        for place in range(self._first, len(self._order)):
            number = self._order[place]
            if number in self._started:
                continue
            if ahead == self.depth:
                return None
            ahead += 1
            if number in self._without_room:
                return None
            if number not in self._settled and number not in self._under_way:
                return number
        return None

    def _step(self, number: int) -> None:
        settled = False
        try:
            settled = self._fetch(number)
        finally:
            with self._changed:
                self._with_room.discard(number)
                (self._settled if settled else self._without_room).add(number)
                self._changed.notify_all()
                if not settled and not self._closing:
                    self._changed.wait(_TICK_S)
                self._without_room.discard(number)
                self._under_way.discard(number)


def _work(me: weakref.ref[Prefetcher], changed: threading.Condition) -> None:
    while (prefetch := me()) is not None:
        prefetch._tick()
        with changed:
            if prefetch._closing:
                return
            number = prefetch._next()
            if number is None:
                del prefetch
                changed.wait(_TICK_S)
                continue
            prefetch._under_way.add(number)
        prefetch._step(number)
