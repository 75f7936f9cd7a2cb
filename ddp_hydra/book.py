"""Who holds which workers: kept on the scheduler, whose event loop runs one function at a time.

It is sent there as text, see `shipped.py`: a scheduler needs no ddp_hydra. So it imports the standard library and Dask
only.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

LATE_S = 2.0
ABSENT_S = 10.0
"""Who has not asked for so long has left the queue."""


def take(
    gang: str,
    holder: str,
    sweep: str,
    topic: str,
    wanted: int | None,
    least: int | None,
    avoid: Collection[str] = (),
    dask_scheduler: Any = None,
) -> dict[str, Any]:
    """Take workers where enough are free; what the gang held before counts as free. Runs on the scheduler.

    Who finds too few waits in a queue: first the sweeps that have the fewest gangs at work, and among equals
    who came first. Nobody overtakes, so a gang of many is not kept waiting by gangs of few; but one that is larger
    than the cluster keeps nobody waiting.

    Args:
        gang: who takes them.
        holder: the client's id.
        sweep: whose gang it is.
        topic: where to tell of lost workers.
        wanted: how many; None for all.
        least: so many will do.
        avoid: addresses that are not to be taken.
        dask_scheduler: given by Dask.
    """
    book, queue = _book(dask_scheduler), dask_scheduler._ddp_hydra_queue
    for other, entry in list(book.items()):
        if entry["holder"] not in dask_scheduler.clients:
            give_back(other, dask_scheduler)
    held = {address for other, entry in book.items() if other != gang for address in entry["workers"]}
    running = {
        address: worker.host
        for address, worker in dask_scheduler.workers.items()
        if worker.status.name == "running" and address not in avoid
    }
    free = {address: host for address, host in running.items() if address not in held}
    total, now = len(running), time.monotonic()
    wanted = wanted or max(1, total)
    least = min(wanted, least or wanted)
    if gang not in book:  # one that starts again keeps what it holds, and waits for nobody
        queue.setdefault(gang, {"since": now, "sweep": sweep})
        queue[gang] |= {"asked": now, "holder": holder, "least": least}
    ahead = _ahead(gang, dask_scheduler, total, now)
    if ahead or len(free) < least:
        return {"wanted": wanted, "free": len(free), "total": total, "ahead": ahead}
    queue.pop(gang, None)
    chosen = choose(free, min(wanted, len(free)))
    _forget_topic(book.get(gang, {}).get("topic"), dask_scheduler)
    book[gang] = {"holder": holder, "sweep": sweep, "workers": list(chosen), "topic": topic}
    return {"workers": chosen}


def _ahead(gang: str, scheduler: Any, total: int, now: float) -> int:
    """How many come before a gang in the queue."""
    queue = scheduler._ddp_hydra_queue
    for other, entry in list(queue.items()):
        if entry["holder"] not in scheduler.clients or now - entry["asked"] > ABSENT_S:
            del queue[other]
    if gang not in queue:
        return 0
    holding = Counter(entry["sweep"] for entry in _book(scheduler).values())
    order = sorted(queue, key=lambda name: (holding[queue[name]["sweep"]], queue[name]["since"]))
    return sum(queue[name]["least"] <= total for name in order[: order.index(gang)])


def give_back(gang: str, dask_scheduler: Any = None) -> None:
    """Let go of a gang's workers, and of the records that the scheduler still keeps of it."""
    entry = _book(dask_scheduler).pop(gang, None)
    dask_scheduler._ddp_hydra_queue.pop(gang, None)
    if entry is not None:
        _forget_topic(entry["topic"], dask_scheduler)


def _forget_topic(topic: str | None, scheduler: Any) -> None:
    broker = getattr(scheduler, "_broker", None)
    if broker is not None and topic is not None:
        broker._topics.pop(topic, None)
        # A last word of the client's, which goes another way than this call, may make the topic once more.
        scheduler.loop.call_later(LATE_S, broker._topics.pop, topic, None)


class Guard(SchedulerPlugin):
    """Tells a gang, in its own topic, that a worker of its is lost, and takes back what a lost client held.

    Args:
        scheduler: of the cluster.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: Any) -> None:
        """Called by Dask when the client has been sent a record: the last thousand would stay in its memory."""
        if any(entry["topic"] == topic for entry in _book(self.scheduler).values()):
            self.scheduler._broker.truncate(topic)

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        """Called by Dask."""
        for entry in _book(scheduler).values():
            if worker in entry["workers"]:
                scheduler.log_event(entry["topic"], {"action": "remove-worker", "worker": worker})

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Called by Dask."""
        for gang, entry in list(_book(scheduler).items()):
            if entry["holder"] == client:
                give_back(gang, scheduler)


def _book(scheduler: Any) -> dict[str, dict[str, Any]]:
    if not hasattr(scheduler, "_ddp_hydra_book"):
        scheduler._ddp_hydra_book, scheduler._ddp_hydra_queue = {}, {}
        scheduler.add_plugin(Guard(scheduler), name="ddp_hydra")
    return scheduler._ddp_hydra_book


def choose(free: Mapping[str, str], n: int) -> dict[str, str]:
    """Take `n` of the free workers on as few hosts as can be.

    A host that alone has room for the rest is taken, the tightest first; otherwise the emptiest host is used up.

    Args:
        free: worker address -> host.
        n: workers wanted, at most `len(free)`.
    """
    assert n <= len(free), (n, len(free))
    by_host: dict[str, list[str]] = {}
    for address in sorted(free, key=natural):
        by_host.setdefault(free[address], []).append(address)
    chosen: dict[str, str] = {}
    while len(chosen) < n:
        missing = n - len(chosen)
        roomy = [host for host in by_host if len(by_host[host]) >= missing]
        pick = min if roomy else max
        host = pick(roomy or by_host, key=lambda host: len(by_host[host]))
        chosen.update(dict.fromkeys(by_host.pop(host)[:missing], host))
    return chosen


def natural(text: str) -> list[Any]:
    """Sort key under which `:8786` comes before `:10000`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
