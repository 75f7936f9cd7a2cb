"""Workers held for a gang, so that two jobs never share one.

The book is kept on the scheduler, whose event loop runs one function at a time: checking and taking is one
step. A holder is a client; the scheduler knows which clients are connected, so a dead one holds nothing. No lease
has to be renewed and no lock is left behind. The scheduler also tells a gang which of its workers are lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

from ddp_hydra import placement
from ddp_hydra.errors import ClusterError

log = logging.getLogger(__name__)
POLL_S = 0.05
"""How often the first in the queue asks; the second half as often, and so on."""
RENEW_POLL_S = 0.05
GROW_S = 10.0
"""How long a cluster that is too small may take to grow."""
LATE_S = 2.0
ABSENT_S = 10.0
"""Who has not asked for so long has left the queue."""
ANSWER_S = 10.0
"""How long the scheduler may take to answer."""
PING_S = 2.0
"""How long a worker that was silent may take to show that it is back."""


class Reservation:
    """Workers held for the attempts of one gang. Use it in a `with` block.

    Args:
        client: who holds them.
        name: the gang's name.
        ranks: how many; None for all workers of the cluster, whose number then stays.
        sweep: whose job it is; sweeps that wait for workers get them in turn.
    """

    def __init__(self, client: Client, name: str, ranks: int | None, sweep: str = "") -> None:
        self.client, self.name, self.ranks, self.sweep = client, name, ranks, sweep or name
        self.address = client.scheduler_info(n_workers=0)["address"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # One that cannot be told will notice that the client is gone.
        if self.client.status == "running":
            was_lost = isinstance(error, ClusterError)
            with contextlib.suppress(ClusterError):
                self._on_scheduler(give_back, self.name, answer_s=PING_S if was_lost else ANSWER_S)

    def take(self, topic: str, timeout_s: float) -> dict[str, str]:
        """Hold workers for the first attempt.

        Args:
            topic: where the attempt listens.
            timeout_s: how long to wait for others to let go of theirs.

        Returns:
            Worker address -> host.

        Raises:
            ClusterError: not enough workers came free in time.
        """
        begin, told = time.monotonic(), False
        while "workers" not in (answer := self._ask(topic, self.ranks, self.ranks)):
            waited_s = time.monotonic() - begin
            ahead = answer.pop("ahead")
            enough = answer["total"] >= answer["wanted"]
            if waited_s > (timeout_s if enough else min(timeout_s, GROW_S)):
                raise ClusterError(_too_few(enough=enough, waited_s=waited_s, **answer))
            if waited_s > 1 and not told:
                log.info("waiting for %(wanted)d workers: %(free)d of %(total)d are free", answer)
                told = True
            time.sleep(min(POLL_S * (1 + ahead), ABSENT_S / 4))
        self.ranks = len(answer["workers"])
        return answer["workers"]

    def renew(self, topic: str, silent: Collection[str], least: int | None, wait_s: float) -> dict[str, str]:
        """Hold workers for another attempt: those that are left, and replacements of those that are not.

        Args:
            topic: where the new attempt listens.
            silent: workers that were not heard any more; they are taken again only if they answer.
            least: with so many, go on when the others have not come in time; None for as many as before.
            wait_s: how long to wait for all.

        Raises:
            ClusterError: fewer than `least` are there.
        """
        assert self.ranks is not None, "take comes first"
        begin, told, silent = time.monotonic(), False, set(silent)
        least = min(least or self.ranks, self.ranks)
        while True:
            late = time.monotonic() - begin > wait_s
            silent -= set() if late else self._back(silent)
            answer = self._ask(topic, self.ranks, least if late else self.ranks, silent)
            if "workers" in answer:
                return answer["workers"]
            if late:
                raise ClusterError(
                    f"after dispatch.restart_wait_s={wait_s:g} s, {answer['free']} of {self.ranks} workers are there, "
                    f"and the job shall not go on with fewer than {least}: bring up workers and give resume=<run dir>, "
                    f"or allow fewer with dispatch.min_ranks={max(1, answer['free'])}"
                )
            if not told and time.monotonic() - begin > 1:
                log.warning("waiting for workers: %d of %d are there", answer["free"], self.ranks)
                told = True
            time.sleep(RENEW_POLL_S)

    def _ask(self, topic: str, wanted: int | None, least: int | None, silent: Collection[str] = ()) -> dict[str, Any]:
        return self._on_scheduler(
            take, self.name, self.client.id, self.sweep, topic, wanted=wanted, least=least, avoid=list(silent)
        )

    def _on_scheduler(self, function: Callable[..., Any], *args: Any, answer_s: float = ANSWER_S, **kwargs: Any) -> Any:
        run = {"callback_timeout": answer_s, **kwargs}
        try:
            return self.client.sync(self.client._run_on_scheduler, function, *args, **run)
        except (OSError, TimeoutError) as error:
            said = str(error) or f"nothing was heard for {answer_s:g} s"
            raise ClusterError(
                f"the scheduler {self.address} does not answer: {said}. Go on with resume=<run dir> once it is back"
            ) from None

    def _back(self, silent: Collection[str]) -> set[str]:
        """Those of the silent workers that answer again."""
        if not silent:
            return set()
        known = self.client.scheduler_info(n_workers=-1)["workers"]
        asked = [address for address in silent if address in known]
        if not asked:
            return set()
        run = {"workers": asked, "on_error": "ignore", "callback_timeout": PING_S}
        try:
            return set(self.client.sync(self.client._run, _ping, **run))
        except (OSError, ValueError, TimeoutError):
            return set()


def _ping() -> bool:
    return True


def _too_few(wanted: int, free: int, total: int, enough: bool, waited_s: float) -> str:
    if not enough:
        return (
            f"dispatch.ranks={wanted}, but the cluster has {total} workers: give cluster.n_workers={wanted} or "
            f"dispatch.ranks={total}"
        )
    return (
        f"{wanted} workers were wanted, {free} of {total} are free after {waited_s:.0f} s: the rest are held by other "
        f"jobs. Give dispatch.ranks={max(1, free)} or less, add workers, or wait longer with dispatch.queue_timeout_s"
    )


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
    chosen = placement.choose(free, min(wanted, len(free)))
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


def holders(scheduler: Any) -> list[str]:
    """The clients that hold workers, once for each gang."""
    return [entry["holder"] for entry in _book(scheduler).values() if entry["holder"] in scheduler.clients]


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
