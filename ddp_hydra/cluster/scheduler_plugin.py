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
from distributed.metrics import time as scheduler_time

LATE_S = 2.0
ABSENT_S = 10.0
"""Who has not asked for so long has left the queue."""
SUSPENDED_S = 600.0
"""A client that has sent no heartbeat for so long is taken for suspended: it loses its workers to those who wait."""
CONFIRM_S = 15.0
"""How long it is watched before: a scheduler that slept itself has still to read what its clients sent."""


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
    who came first. A gang lets later ones of other sweeps pass as often as its own sweep has gangs at work, and no
    more, so it is not kept waiting for ever. Otherwise nobody overtakes, so a gang of many is not kept waiting by
    gangs of few; but one that is larger than the cluster keeps nobody waiting.

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
    running = {
        address: worker.host
        for address, worker in dask_scheduler.workers.items()
        if worker.status.name == "running" and address not in avoid
    }
    total, now = len(running), time.monotonic()
    wanted = wanted or max(1, total)
    least = min(wanted, least or wanted)
    free = _free(running, gang, book)
    if len(free) < least and _dismiss_suspended(gang, dask_scheduler, now):
        free = _free(running, gang, book)
    if gang not in book:  # one that starts again keeps what it holds, and waits for nobody
        queue.setdefault(gang, {"since": now, "sweep": sweep, "passed": 0})
        queue[gang] |= {"asked": now, "holder": holder, "least": least}
    ahead = _ahead(gang, dask_scheduler, total, now)
    if ahead or len(free) < least:
        return {"wanted": wanted, "free": len(free), "total": total, "ahead": ahead}
    if gang in queue:
        _note_turn(queue.pop(gang), queue)
    chosen = choose(free, min(wanted, len(free)))
    _forget_topic(book.get(gang, {}).get("topic"), dask_scheduler)
    book[gang] = {"holder": holder, "sweep": sweep, "workers": list(chosen), "topic": topic}
    return {"workers": chosen}


def _free(running: Mapping[str, str], gang: str, book: Mapping[str, Any]) -> dict[str, str]:
    """Those of the running workers that no other gang holds."""
    held = {address for other, entry in book.items() if other != gang for address in entry["workers"]}
    return {address: host for address, host in running.items() if address not in held}


def _dismiss_suspended(gang: str, scheduler: Any, now: float) -> bool:
    """Disconnect clients that hold workers and are suspended (SIGSTOP, a laptop that sleeps); say whether there were.

    Dask's clients send heartbeats, so nothing else has to be renewed. To its ranks it is as if the client had died.
    """
    silent_s = scheduler_time() - SUSPENDED_S
    holders = {entry["holder"] for other, entry in _book(scheduler).items() if other != gang}
    late = {holder for holder in holders if scheduler.clients[holder].last_seen < silent_s}
    watched = scheduler._ddp_hydra_watched = {
        holder: scheduler._ddp_hydra_watched.get(holder, now) for holder in sorted(late)
    }
    dismissed = [holder for holder, since in watched.items() if now - since > CONFIRM_S]
    for holder in dismissed:
        scheduler.remove_client(holder)  # the tasks of its ranks are released, and the guard takes back its workers
        scheduler.client_comms[holder].abort()
    return bool(dismissed)


def _note_turn(winner: Mapping[str, Any], queue: Mapping[str, Any]) -> None:
    """Note, with those who came before, that a gang of another sweep has had its turn first."""
    for entry in queue.values():
        if entry["since"] < winner["since"] and entry["sweep"] != winner["sweep"]:
            entry["passed"] += 1


def _ahead(gang: str, scheduler: Any, total: int, now: float) -> int:
    """How many come before a gang in the queue."""
    queue = scheduler._ddp_hydra_queue
    for other, entry in list(queue.items()):
        if entry["holder"] not in scheduler.clients or now - entry["asked"] > ABSENT_S:
            del queue[other]
    if gang not in queue:
        return 0
    holding = Counter(entry["sweep"] for entry in _book(scheduler).values())

    def turn(name: str) -> tuple[int, float]:
        entry = queue[name]
        return max(0, holding[entry["sweep"]] - entry["passed"]), entry["since"]

    order = sorted(queue, key=turn)
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


class ReservationPlugin(SchedulerPlugin):
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
        scheduler._ddp_hydra_book, scheduler._ddp_hydra_queue, scheduler._ddp_hydra_watched = {}, {}, {}
        scheduler.add_plugin(ReservationPlugin(scheduler), name="ddp_hydra")
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
