"""Where the time of the loop goes, by the phases that `pulse.at` tells anyway."""

from __future__ import annotations

import time
from collections import defaultdict

from ddp_hydra import heartbeat


class Phases:
    """Counts the seconds of each phase of this rank, from now on until the next `pulse.connect`.

    On a GPU it is the time until the work was given to it, not until that was done.

    Attributes:
        spent_s: phase -> seconds.
    """

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "", time.perf_counter()
        heartbeat.on_phase(self._enter)

    def close(self) -> None:
        """Count the phase under way up to now, and none after it."""
        self._enter("", 0)

    def _enter(self, phase: str, step: int) -> None:
        now = time.perf_counter()
        if self._phase:
            self.spent_s[self._phase] += now - self._since
        self._phase, self._since = phase, now
