"""Waits for workers, which may come late, leave again, be replaced, or never come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ddp_hydra.errors import ClusterError

POLL_S = 0.05
ANSWER_S = 5.0
"""Seconds that the scheduler, or a cluster manager, may take to answer."""


def wait_for_workers(
    client: Any,
    n_workers: int,
    timeout_s: float,
    status: Callable[[], str] = lambda: "",
    hint: str = "",
    refusal: Callable[[], str] = lambda: "",
) -> None:
    """Wait until enough workers run at the same time.

    Args:
        client: of the cluster.
        n_workers: how many; workers that are paused or closing do not count.
        timeout_s: how long to wait.
        status: returns what the cluster knows of workers that do not come; called when the time is up.
        hint: advice, used if nothing else is known.
        refusal: returns why the workers will never come, or ""; called again and again.

    Raises:
        ClusterError: says how many came, why not all, and what to type; or that they were refused.
    """
    begin = time.monotonic()
    while True:
        states = _states(client)
        if states is not None and states["running"] >= n_workers:
            return
        if reason := refusal():
            raise ClusterError(reason)
        if client.status == "closed" or time.monotonic() - begin > timeout_s:
            break
        time.sleep(POLL_S)
    waited_s = time.monotonic() - begin
    came = states["running"] if states else 0
    others = [f"{count} more {state}" for state, count in (states or {}).items() if state != "running"]
    reasons = ["the scheduler does not answer any more"] if states is None else []
    reasons += [*others, *filter(None, [_call_within(ANSWER_S, status)])]
    raise ClusterError(
        f"{came} of {n_workers} workers came in {waited_s:.0f} s: "
        f"{'; '.join(reasons) or hint or 'the logs of the cluster may say why'}. Ask for fewer with "
        f"cluster.n_workers={came or 1}, or wait longer with cluster.wait_timeout_s={max(60, round(3 * timeout_s))}"
    )


def count(client: Any) -> int:
    """Return how many workers run."""
    return (_states(client) or Counter())["running"]


def _states(client: Any) -> Counter[str] | None:
    """Count the workers by state; None if the scheduler does not answer."""
    try:  # `scheduler_info` would return its last answer, which may be old
        info = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_S)
    except (AttributeError, OSError, TimeoutError):
        return None
    return Counter(str(worker.get("status", "running")) for worker in info["workers"].values())


def _call_within(timeout_s: float, status: Callable[[], str]) -> str:
    """Return the result of a call; "" if it takes too long."""
    answers: list[str] = []

    def call() -> None:
        try:
            answers.append(status())
        except Exception as error:  # it would only have added to the message
            answers.append(f"and the status of the cluster could not be read ({error!r:.200})")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else ""
