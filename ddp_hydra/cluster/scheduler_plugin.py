"""Keeps, on the scheduler, which gang has reserved which workers; ends a cluster whose client was killed.

The scheduler's event loop runs one function at a time, so no lock is needed. The module is sent there as text, see
`BySource`, because a scheduler needs no ddp_hydra. So it imports only the standard library and Dask.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time as scheduler_time
from tornado.ioloop import PeriodicCallback

LATE_S = 2.0
"""Seconds after which a last message of a client has arrived."""
ABSENT_S = 10.0
"""A gang that has not asked for this many seconds has left the queue."""
AGAIN_S = 2.0
"""A gang that starts again has given up when it has not asked for this many seconds."""
SUSPENDED_S = 600.0
"""A client without a heartbeat for this many seconds counts as suspended, and loses its workers to gangs that wait."""
CONFIRM_S = 15.0
"""Seconds that a silent client is watched before: a scheduler that was suspended has to read its heartbeats first."""
ADAPTED_S = 30.0
"""A cluster that has asked for its target within this many seconds adapts its size."""
RETIRE_S = 30.0
"""Seconds that ranks may take to save before their worker is retired."""
FRONT = 2
"""How many gangs of the queue are woken when workers become free; those behind them ask now and then."""
PLANNED = ("worker-close-gracefully", "retire-workers")
"""Beginnings of Dask's reasons for the end of a worker that was planned: its lifetime is over, or nobody needs it."""


def reserve(
    gang: str,
    holder: str,
    sweep: str,
    topic: str,
    wanted: int | None,
    least: int | None,
    avoid: Collection[str] = (),
    expected: int = 0,
    dask_scheduler: Any = None,
) -> dict[str, Any]:
    """Reserve workers if enough are free; those that the gang holds count as free. Runs on the scheduler.

    A gang that finds too few waits in a queue. Sweeps with the fewest running gangs come first, and among equals the
    gang that came first. A gang is passed by later gangs of other sweeps as often as its own sweep has running gangs,
    and not more often, so it does not wait for ever. Otherwise nobody overtakes, so small gangs do not keep a large one
    waiting. A gang that is larger than the cluster keeps nobody waiting.

    Args:
        wanted: how many workers; None for all.
        expected: for None, at least as many as this.

    Returns:
        The reserved "workers" (address -> host); or, where the gang has to wait, how many are "wanted", "free", in
        "total", how many gangs are "ahead" of it, and whether the cluster "grows" with what is asked of it.
    """
    reservations, queue = _reservations(dask_scheduler), dask_scheduler._ddp_hydra_queue
    for other, entry in list(reservations.items()):
        if entry["holder"] not in dask_scheduler.clients:
            release(other, dask_scheduler)
    running = {
        address: worker.host
        for address, worker in dask_scheduler.workers.items()
        if worker.status.name == "running" and address not in avoid
    }
    total, now = len(running), time.monotonic()
    wanted = wanted or max(1, expected, total)
    least = min(wanted, least or wanted)
    free = _free(running, gang, reservations)
    if len(free) < least and _dismiss_suspended(gang, dask_scheduler, now):
        free = _free(running, gang, reservations)
    room = len(free)
    if gang not in reservations:  # a gang that starts again keeps its workers, and waits for nobody
        queue.setdefault(gang, {"since": now, "sweep": sweep, "passed": 0})
        queue[gang] |= {"asked": now, "holder": holder, "least": least}
        room = max(0, room - _lacking(running, reservations, now))
    ahead = _ahead(gang, dask_scheduler, total, now)
    if ahead or room < least:
        if gang in reservations:
            reservations[gang] |= {"asked": now, "wanted": wanted}
        grows = now - dask_scheduler._ddp_hydra_adapted < ADAPTED_S
        return {"wanted": wanted, "free": room, "total": total, "ahead": ahead, "grows": grows}
    if gang in queue:
        _note_turn(queue.pop(gang), queue)
    chosen = choose(free, min(wanted, room))
    if gang in reservations:
        _forget_topic(reservations[gang]["topic"], dask_scheduler)
    reservations[gang] = {"holder": holder, "sweep": sweep, "workers": list(chosen), "topic": topic}
    if hasattr(dask_scheduler, "handlers"):
        # The client subscribes, too, but by its stream. The first records of tasks that live on would overtake that.
        dask_scheduler.subscribe_topic(topic, holder)
    return {"workers": chosen}


async def reserve_or_wait(
    gang: str, *args: Any, wait_s: float, dask_scheduler: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Reserve workers; if too few are free, wait for more, and try once again. Runs on the scheduler."""
    kwargs["dask_scheduler"] = dask_scheduler
    answer = reserve(gang, *args, **kwargs)
    if "workers" not in answer and answer["ahead"] < FRONT:
        woken = asyncio.ensure_future(dask_scheduler._ddp_hydra_change.wait())
        await asyncio.wait([woken], timeout=wait_s)
        woken.cancel()
        if gang in dask_scheduler._ddp_hydra_queue:  # else it has given up, and would never release them
            answer = reserve(gang, *args, **kwargs)
    return answer


def ask_for_workers(client: str, n_workers: int, dask_scheduler: Any = None) -> None:
    _reservations(dask_scheduler)
    dask_scheduler._ddp_hydra_asked[client] = n_workers


def _demand(scheduler: Any) -> int:
    """Return how many workers gangs hold and wait for: they submit their tasks to workers that are there alone."""
    scheduler._ddp_hydra_asked = {
        client: n for client, n in scheduler._ddp_hydra_asked.items() if client in scheduler.clients
    }
    reservations = _reservations(scheduler).values()
    held = sum(max(len(entry["workers"]), entry.get("wanted", 0)) for entry in reservations)  # lost ones are replaced
    queued = sum(entry["least"] for entry in scheduler._ddp_hydra_queue.values())
    return max(held + queued, *scheduler._ddp_hydra_asked.values(), 0)


def _wake_up(scheduler: Any) -> None:
    scheduler._ddp_hydra_change.set()
    scheduler._ddp_hydra_change = asyncio.Event()


def _free(running: Mapping[str, str], gang: str, reservations: Mapping[str, Any]) -> dict[str, str]:
    held = {address for other, entry in reservations.items() if other != gang for address in entry["workers"]}
    return {address: host for address, host in running.items() if address not in held}


def _lacking(running: Mapping[str, str], reservations: Mapping[str, Any], now: float) -> int:
    """Return how many workers gangs lack that start again: the next ones are for them, not for the queue."""
    again = [entry for entry in reservations.values() if now - entry.get("asked", -ABSENT_S) < AGAIN_S]
    return sum(max(0, entry["wanted"] - sum(worker in running for worker in entry["workers"])) for entry in again)


def _dismiss_suspended(gang: str, scheduler: Any, now: float) -> bool:
    """Disconnect clients that hold workers and are suspended (SIGSTOP, a laptop that sleeps).

    Dask's clients send heartbeats, so they need no other sign of life. For its ranks, such a client has died.
    """
    silent_s = scheduler_time() - SUSPENDED_S
    holders = {entry["holder"] for other, entry in _reservations(scheduler).items() if other != gang}
    late = {holder for holder in holders if scheduler.clients[holder].last_seen < silent_s}
    watched = scheduler._ddp_hydra_watched = {
        holder: scheduler._ddp_hydra_watched.get(holder, now) for holder in sorted(late)
    }
    dismissed = [holder for holder, since in watched.items() if now - since > CONFIRM_S]
    for holder in dismissed:
        _dismiss(holder, scheduler)
    return bool(dismissed)


def _dismiss(client: str, scheduler: Any) -> None:
    scheduler.remove_client(client)  # releases the tasks of its ranks; the plugin releases its workers
    scheduler.client_comms[client].abort()


def _note_turn(winner: Mapping[str, Any], queue: Mapping[str, Any]) -> None:
    """Note, for gangs that came before the winner, that a gang of another sweep has passed them."""
    for entry in queue.values():
        if entry["since"] < winner["since"] and entry["sweep"] != winner["sweep"]:
            entry["passed"] += 1


def _ahead(gang: str, scheduler: Any, total: int, now: float) -> int:
    queue = scheduler._ddp_hydra_queue
    for other, entry in list(queue.items()):
        if entry["holder"] not in scheduler.clients or now - entry["asked"] > ABSENT_S:
            del queue[other]
    if gang not in queue:
        return 0
    holding = Counter(entry["sweep"] for entry in _reservations(scheduler).values())

    def turn(name: str) -> tuple[int, float]:
        entry = queue[name]
        return max(0, holding[entry["sweep"]] - entry["passed"]), entry["since"]

    order = sorted(queue, key=turn)
    return sum(queue[name]["least"] <= total for name in order[: order.index(gang)])


def release(gang: str, dask_scheduler: Any = None) -> None:
    entry = _reservations(dask_scheduler).pop(gang, None)
    dask_scheduler._ddp_hydra_queue.pop(gang, None)
    _wake_up(dask_scheduler)
    if entry is not None:
        _forget_topic(entry["topic"], dask_scheduler)


def _forget_topic(topic: str, scheduler: Any) -> None:
    topics = getattr(scheduler._broker, "_topics", {})
    topics.pop(topic, None)
    scheduler._ddp_hydra_forgotten.append(topic)
    # The client's end of its subscription, which goes another way than this call, may create the topic once more.
    scheduler.loop.call_later(LATE_S, topics.pop, topic, None)


class ReservationPlugin(SchedulerPlugin):
    """Reports a lost worker to its gang, in the gang's topic; releases the workers of a lost client."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.own_adaptive_target: Any = None
        self.own_retire_workers: Any = None

    def adaptive_target(self, target_duration: Any = None) -> int:
        self.scheduler._ddp_hydra_adapted = time.monotonic()
        return max(self.own_adaptive_target(target_duration), _demand(self.scheduler))

    async def retire_workers(
        self, *args: Any, stimulus_id: str | None = None, close_workers: bool = False, remove: bool = True, **which: Any
    ) -> dict[str, Any]:
        """Retire workers as Dask does, but after their gangs have saved; the workers take no new tasks meanwhile."""
        stimulus_id = stimulus_id or f"retire-workers-{scheduler_time()}"
        retired: dict[str, Any] = await self.own_retire_workers(*args, **which, stimulus_id=stimulus_id, remove=False)
        until, topics = time.monotonic() + RETIRE_S, []
        for entry in _reservations(self.scheduler).values():
            for worker in retired.keys() & set(entry["workers"]):
                topics.append(entry["topic"])
                self.scheduler.log_event(entry["topic"], {"action": "retire-worker", "worker": worker, "planned": True})

        def are_used() -> bool:
            workers = [self.scheduler.workers[worker] for worker in retired if worker in self.scheduler.workers]
            tasks = [task for worker in workers for task in (*worker.processing, *worker.has_what)]
            return any(str(task.key).startswith(tuple(topics)) for task in tasks)

        while are_used() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        more = {"stimulus_id": stimulus_id, "close_workers": close_workers, "remove": remove}
        return dict(await self.own_retire_workers(list(retired), **more))

    def log_event(self, topic: str, msg: Any) -> None:
        """Drop a record that was sent to the client, and a topic that a late record has created once more.

        Dask would keep the last thousand records of each topic in memory.
        """
        if topic in self.scheduler._ddp_hydra_forgotten:
            self.scheduler._broker._topics.pop(topic, None)
        elif any(entry["topic"] == topic for entry in _reservations(self.scheduler).values()):
            self.scheduler._broker.truncate(topic)

    def add_worker(self, scheduler: Any, worker: str) -> None:
        _wake_up(scheduler)

    def remove_worker(self, scheduler: Any, worker: str, stimulus_id: str = "", **_: Any) -> None:
        message = {"action": "remove-worker", "worker": worker, "planned": stimulus_id.startswith(PLANNED)}
        for entry in _reservations(scheduler).values():
            if worker in entry["workers"]:
                scheduler.log_event(entry["topic"], message)

    def remove_client(self, scheduler: Any, client: str) -> None:
        for gang, entry in list(_reservations(scheduler).items()):
            if entry["holder"] == client:
                release(gang, scheduler)


def _reservations(scheduler: Any) -> dict[str, dict[str, Any]]:
    if not hasattr(scheduler, "_ddp_hydra_reservations"):
        scheduler._ddp_hydra_reservations, scheduler._ddp_hydra_queue, scheduler._ddp_hydra_watched = {}, {}, {}
        scheduler._ddp_hydra_change = asyncio.Event()
        scheduler._ddp_hydra_forgotten = deque(maxlen=1000)
        scheduler._ddp_hydra_asked, scheduler._ddp_hydra_adapted = {}, -math.inf
        plugin = ReservationPlugin(scheduler)
        # A stand-in for a scheduler has no handlers.
        for name in ("adaptive_target", "retire_workers") if hasattr(scheduler, "handlers") else ():
            setattr(plugin, f"own_{name}", getattr(scheduler, name))
            setattr(scheduler, name, getattr(plugin, name))
            scheduler.handlers[name] = getattr(plugin, name)
        scheduler.add_plugin(plugin, name="ddp_hydra")
    return scheduler._ddp_hydra_reservations


def choose(free: Mapping[str, str], n: int) -> dict[str, str]:
    """Choose `n` of the free workers, on as few hosts as possible.

    If some hosts have enough free workers for the rest, the one with the fewest is chosen; otherwise all free workers
    of the host with the most.
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
    """Return a sort key under which `:8786` comes before `:10000`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


log = logging.getLogger(__name__)
NAME = "ddp_hydra-idle-shutdown"


def set_up(client: str | None, timeout_s: float, dask_scheduler: Any = None) -> None:
    """Have the cluster end when a client has been away for too long. Runs on the scheduler.

    Args:
        client: its id; None to keep the cluster running.
        timeout_s: how long it may be away, for a broken connection may come back.
    """
    before = dask_scheduler.periodic_callbacks.pop(NAME, None)
    if before is not None:
        before.stop()
    if client is not None:
        check = IdleShutdown(dask_scheduler, client, timeout_s).check
        callback = PeriodicCallback(check, 1000 * min(5.0, timeout_s / 4))
        dask_scheduler.periodic_callbacks[NAME] = callback
        callback.start()


def count_other_jobs(client: str, dask_scheduler: Any = None) -> int:
    return sum(holder != client for holder in holders(dask_scheduler))


def is_connected(client: str, silence_s: float = math.inf, dask_scheduler: Any = None) -> bool:
    """Return whether a client is connected; disconnect one without a heartbeat for so long. Runs on the scheduler."""
    found = dask_scheduler.clients.get(client)
    if found is not None and scheduler_time() - found.last_seen > silence_s:
        _dismiss(client, dask_scheduler)
    return client in dask_scheduler.clients


def delete_topics(topics: list[str], dask_scheduler: Any = None) -> None:
    """Delete the messages of topics after a delay, so that a client can still read the last. Runs on the scheduler."""
    for topic in topics:
        dask_scheduler.loop.call_later(LATE_S, dask_scheduler._broker._topics.pop, topic, None)


def holders(scheduler: Any) -> list[str]:
    reservations = getattr(scheduler, "_ddp_hydra_reservations", {})
    return [entry["holder"] for entry in reservations.values() if entry["holder"] in scheduler.clients]


class IdleShutdown:
    """Ends the cluster when a client is away for too long and nobody uses the workers."""

    def __init__(self, scheduler: Any, client: str, timeout_s: float) -> None:
        self.scheduler, self.client, self.timeout_s = scheduler, client, timeout_s
        self.seen = time.monotonic()
        self.is_over = False

    async def check(self) -> None:
        if self.client in self.scheduler.clients or holders(self.scheduler):
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > self.timeout_s and not self.is_over:
            self.is_over = True
            log.warning("the client that started this cluster has been gone for %g s: it ends now", self.timeout_s)
            await end(self.scheduler)


async def end(scheduler: Any) -> None:
    for plugin in list(scheduler.plugins.values()):
        gateway = getattr(getattr(plugin, "service", None), "gateway", None)
        if gateway is not None:  # dask-gateway's own way also ends machines that have not connected yet
            await gateway.shutdown()
            return
    await scheduler.close(reason="its client is gone")
