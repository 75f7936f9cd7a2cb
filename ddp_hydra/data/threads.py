"""Tells which data sets several threads may read at once, and has threads make items ahead of a loop."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

Item = TypeVar("Item")

_METHODS = frozenset([
    "__call__", "__getitem__", "__getitems__", "__iter__", "collate", "draw", "expect", "fetch", "forward",
    "make_image", "of_jpeg", "of_rank", "sample_target", "target",
])  # fmt: skip
"""Methods that make samples."""
_PARTS = ("transform", "target_transform", "collate", "collate_fn")


def is_thread_safe(data: Any) -> bool:
    # The class says so, by `thread_safe = True`; the transforms that it holds must say so, too. A subclass that
    # defines a method that makes samples says it anew.
    if not getattr(data, "thread_safe", False):
        return False
    own = getattr(data, "__dict__", {})
    if "thread_safe" not in own:
        for cls in type(data).__mro__:
            if "thread_safe" in vars(cls):
                break
            if not _METHODS.isdisjoint(vars(cls)):
                return False
    return all(is_thread_safe(part) for name in _PARTS if (part := own.get(name)) is not None)


def cores_per_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Lookahead(Generic[Item]):
    """The results of calls, in their order, which threads make ahead of the loop that takes them.

    Args:
        calls: each makes an item, or returns `END`. An error is raised where its item is waited for.
        threads: number of threads; 0: an item is made where it is waited for.
        depth: number of items made ahead at most.
        depth_of: item -> depth from then on; None: it stays.
        here: returns whether the next item is made where it is waited for.
        stop: called before the threads are waited for: it makes calls end soon.
    """

    END: Any = object()

    def __init__(
        self,
        calls: Iterable[Callable[[], Item]],
        threads: int,
        depth: int = 1,
        *,
        depth_of: Callable[[Item], int] | None = None,
        here: Callable[[], bool] = lambda: False,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.calls, self.depth, self.depth_of = iter(calls), depth, depth_of
        self.here, self.stop = here, stop
        self.pool = ThreadPoolExecutor(threads, "loader") if threads else None
        self.held: deque[Future[Item]] = deque()
        self._fill(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Item]:
        while self.wait_for(1):
            yield self.take()

    def wait_for(self, n: int) -> bool:
        # Wait until n items are made. Return False if there are fewer.
        self._fill(n)
        return len(self.held) >= n and all(self.held[number].result() is not self.END for number in range(n))

    def take(self) -> Item:
        assert self.wait_for(1)
        item = self.held.popleft().result()
        if self.depth_of is not None:
            self.depth = self.depth_of(item)
        self._fill(0)
        return item

    def counts(self) -> tuple[int, bool]:
        # Return how many items are made, and whether there are no more.
        for number, made in enumerate(self.held):
            if not made.done() or made.exception() is not None:
                return number, False
            if made.result() is self.END:
                return number, True
        return len(self.held), False

    def close(self) -> None:
        self.stop()
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def _fill(self, n: int) -> None:
        while True:
            pool = None if self.here() else self.pool
            if len(self.held) >= (max(n, self.depth) if pool else n) or (call := next(self.calls, None)) is None:
                return
            self.held.append(pool.submit(call) if pool else _called(call))


def _called(call: Callable[[], Item]) -> Future[Item]:
    made: Future[Item] = Future()
    try:
        made.set_result(call())
    except BaseException as error:
        made.set_exception(error)
    return made
