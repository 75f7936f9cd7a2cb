"""Workers that come late, leave again, are replaced, or don't come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ddp_hydra.errors import ClusterError

POLL_S = 0.05
ANSWER_S = 5.0
"""How long the scheduler may take to answer, and a manager to say what it knows."""


def wait_for_workers(
    client: Any,
    n_workers: int,
    timeout_s: float,
    ask: Callable[[], str] = lambda: "",
    hint: str = "",
    refused: Callable[[], str] = lambda: "",
) -> None:
    """Wait until so many workers are there at the same time.

    Args:
        client: of the cluster.
        n_workers: how many; those that are paused or on their way out do not count.
        timeout_s: how long to wait.
        ask: what whoever starts the workers says of those that don't come; asked when the time is up.
        hint: where to look; said where nothing else is known.
        refused: why they will not come, however long one waits; asked all the time.

    Raises:
        ClusterError: saying how many came, why not all, and what to type; or that they were refused.
    """
    begin = time.monotonic()
    while True:
        states = _states(client)
        if states is not None and states["running"] >= n_workers:
            return
        if refusal := refused():
            raise ClusterError(refusal)
        if client.status == "closed" or time.monotonic() - begin > timeout_s:
            break
        time.sleep(POLL_S)
    waited_s = time.monotonic() - begin
    came = states["running"] if states else 0
    others = [f"{count} more {state}" for state, count in (states or {}).items() if state != "running"]
    said = ["the scheduler does not answer any more"] if states is None else []
    said += [*others, *filter(None, [_within(ANSWER_S, ask)])]
    raise ClusterError(
        f"{came} of {n_workers} workers came in {waited_s:.0f} s: "
        f"{'; '.join(said) or hint or 'the logs of the cluster may say why'}. Ask for fewer with "
        f"cluster.n_workers={came or 1}, or wait longer with cluster.wait_timeout_s={_longer(timeout_s)}"
    )


def count(client: Any) -> int:
    """How many workers are there and at work."""
    return (_states(client) or Counter())["running"]


def _states(client: Any) -> Counter[str] | None:
    """How many workers are in which state; None where the scheduler does not answer."""
    try:  # `scheduler_info` would return what was true when it answered last
        info = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_S)
    except (AttributeError, OSError, TimeoutError):
        return None
    return Counter(str(worker.get("status", "running")) for worker in info["workers"].values())


def _within(timeout_s: float, ask: Callable[[], str]) -> str:
    """What somebody says, unless that takes too long or goes wrong."""
    answers: list[str] = []

    def call() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # it was only to make a sentence better
            answers.append(f"and who starts them says nothing ({error!r:.200})")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else ""


def _longer(timeout_s: float) -> int:
    return max(60, round(3 * timeout_s))
