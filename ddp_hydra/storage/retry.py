"""Decides how long to wait between the tries of something that failed, and when to stop trying."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.1


class Backoff:
    """Waits before each new try, longer each time, until the time is over or somebody gives up.

    Its time begins when it is made. The callers decide which errors to retry, and what to tell the user.

    Args:
        timeout_s: how long to try.
        sleep: waits so many seconds, and returns whether to give up. `wait` of a threading.Event is one.
        longest_pause_s: the longest wait.

    Attributes:
        deadline: when to stop trying, on the monotonic clock.
        tries: how many tries were made.
    """

    def __init__(
        self, timeout_s: float, sleep: Callable[[float], bool | None] = time.sleep, longest_pause_s: float = 5.0
    ) -> None:
        self._begin = time.monotonic()
        self.deadline = self._begin + timeout_s
        self.tries = 1
        self._sleep = sleep
        self._pause_s = FIRST_PAUSE_S
        self._longest_pause_s = longest_pause_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin

    def wait(self) -> bool:
        """Wait before the next try, and return True. Return False if there shall be no other try."""
        left_s = self.deadline - time.monotonic()
        # Unequal pauses keep many processes from coming back all at once.
        pause_s = min(left_s, self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311
        if left_s <= 0 or self._sleep(pause_s):
            return False
        self.tries += 1
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return True
