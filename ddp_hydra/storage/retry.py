"""Trying again what may work the next time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ddp_hydra.storage.base import StaleCredentialsError, TemporaryError
from ddp_hydra.storage.counters import Traffic

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


def retrying(
    action: Callable[[], T],
    retry_timeout_s: float,
    traffic: Traffic,
    closing: threading.Event,
    renew: Callable[[], bool],
    error: Exception,
) -> T:
    """Do something that failed until it works, waiting longer and longer.

    Args:
        action: what to do.
        retry_timeout_s: how long after the first failure it is tried again.
        traffic: counts the retries.
        closing: ends the waiting.
        renew: called after stale credentials; whether others may be had.
        error: why it failed, a TemporaryError or StaleCredentialsError.

    Raises:
        TemporaryError: it did not work in time.
        Exception: what `action` raised, where trying again does not help.
    """
    wait_s, give_up = FIRST_WAIT_S, time.monotonic() + retry_timeout_s
    while True:
        stale = isinstance(error, StaleCredentialsError)
        if time.monotonic() + wait_s > give_up or (stale and not renew()):
            raise error from None
        # Unequal waits keep many readers from coming back all at once.
        if closing.wait(wait_s * random.uniform(0.5, 1.0)):  # noqa: S311
            raise TemporaryError("the reader was closed while it waited for the store")
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        traffic.add(retries=1)
        try:
            return action()
        except (TemporaryError, StaleCredentialsError) as again:
            error = again
