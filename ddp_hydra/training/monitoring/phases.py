"""Measures the time that the loop spends in each phase that it reports to `heartbeat.at`."""

from __future__ import annotations

import time
from collections import defaultdict

from ddp_hydra import heartbeat


class Phases:
    """Counts the seconds that this rank spends in each phase, until the next `heartbeat.connect`.

    For a GPU that is the time to launch its work, not to finish it.

    Attributes:
        spent_s: phase -> seconds.
    """

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "", time.perf_counter()
        heartbeat.on_phase(self._enter)

    def close(self) -> None:
        """End the phase under way; count none after it."""
        self._enter("", 0)

    def _enter(self, phase: str, step: int) -> None:
        now = time.perf_counter()
        if self._phase:
            self.spent_s[self._phase] += now - self._since
        self._phase, self._since = phase, now
