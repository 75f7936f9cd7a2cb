"""Decides when to log by the clock."""

from __future__ import annotations

import time


class LogClock:
    """Tells when some seconds have passed since the last log.

    Args:
        every_s: those seconds; None: never.
        growth: each interval is so many times as long as the one before.
    """

    def __init__(self, every_s: float | None, growth: float = 1.0) -> None:
        self.interval_s, self.growth = every_s, growth
        self.began = time.monotonic()

    def is_due(self) -> bool:
        """Return whether it is time to log."""
        return self.interval_s is not None and time.monotonic() - self.began >= self.interval_s

    def restart(self) -> None:
        """Begin the next interval: something was logged."""
        if self.interval_s is not None and self.is_due():
            self.interval_s *= self.growth
        self.began = time.monotonic()
