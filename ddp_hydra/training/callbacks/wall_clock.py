"""Stops at a time of day."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddp_hydra.errors import ConfigError
from ddp_hydra.training.callbacks.base import Callback, View


class WallClock(Callback):
    """Saves a checkpoint and stops at a time of day, by the clock of rank 0's host.

    Args:
        at: that time, "07:30".

    Raises:
        ConfigError: it is not a time of day.
    """

    def __init__(self, at: str) -> None:
        try:
            time = datetime.strptime(str(at), "%H:%M").time()
        except ValueError:
            raise ConfigError(f"at={at!r} is not a time of day: give hours and minutes, '07:30'") from None
        now = datetime.now().astimezone()
        self.end = now.replace(hour=time.hour, minute=time.minute, second=0, microsecond=0)
        if self.end <= now:
            self.end += timedelta(days=1)

    def on_step(self, run: View) -> None:
        """Stop when it is time."""
        if run.rank == 0 and datetime.now().astimezone() >= self.end:
            run.stop(f"it is {self.end:%H:%M}", done=False)
