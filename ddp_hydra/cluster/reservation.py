"""Reserves workers for a gang, so that two jobs never share one.

The reservations are kept on the scheduler. Its event loop runs one function at a time, so checking and reserving is
one step. Workers are reserved for a client. The scheduler knows which clients are connected, so a dead client holds
nothing; and it knows by their heartbeats which are suspended, so they do not hold workers for ever. Nothing has to be
renewed, and no lock is left behind. The scheduler also tells a gang which of its workers are lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from typing import Any, Self

from distributed import Client

from ddp_hydra.cluster.connection import BySource, workers_of
from ddp_hydra.cluster.scheduler_plugin import ABSENT_S, FRONT, release, reserve_or_wait
from ddp_hydra.errors import ClusterError

log = logging.getLogger(__name__)
WAIT_S = 0.25
"""Seconds that a request of the first in the queue waits for workers."""
POLL_S = 0.05
"""Seconds between two requests of a gang further behind, times the number of gangs ahead of it."""
RENEW_POLL_S = 0.05
GROW_S = 10.0
"""Seconds that a cluster that is too small may take to grow."""
ANSWER_S = 10.0
"""Seconds that the scheduler may take to answer."""
PING_S = 2.0
"""Seconds that a silent worker may take to answer a ping."""


class Reservation:
    """Holds workers for the attempts of one gang. Use it in a `with` block.

    Args:
        client: that holds them.
        name: of the gang.
        wanted: how many workers; None for all of the cluster. Later attempts get as many.
        slots: ranks of each worker, for messages.
        expected: how many workers the cluster had when it was connected to. None in `wanted` waits for at least these.
        sweep: name of the gang's sweep; sweeps that wait for workers get them in turn.
        check: called while it waits; may raise.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        wanted: int | None,
        sweep: str = "",
        check: Callable[[], None] = lambda: None,
        slots: int = 1,
        expected: int = 0,
    ) -> None:
        self.check, self.slots, self.expected = check, slots, expected
        self.client, self.name, self.wanted, self.sweep = client, name, wanted, sweep or name
        self.address = client.scheduler_info(n_workers=0)["address"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A scheduler that cannot be reached now will notice that the client is gone.
        if self.client.status == "running":
            was_lost = isinstance(error, ClusterError)
            with contextlib.suppress(ClusterError):
                self._on_scheduler(release, self.name, answer_s=PING_S if was_lost else ANSWER_S)

    def reserve(
        self, topic: str, timeout_s: float, restart_wait_s: float = GROW_S, least: int | None = None
    ) -> dict[str, str]:
        """Reserve workers for the first attempt of this process.

        Args:
            timeout_s: how long to wait for workers that other gangs hold.
            restart_wait_s: how long lost workers may take to come back.
            least: this many are enough when the others have not come in time, because ranks of another process have
                run before; None for all.
        """
        begin = enough_at = time.monotonic()
        is_logged, is_lost, enough, most = False, False, self.wanted, self.expected
        while "workers" not in (answer := self._first_answer(topic, begin + timeout_s, enough)):
            self.check()
            now, total = time.monotonic(), answer["total"]
            ahead, grows = answer.pop("ahead"), answer.pop("grows")
            waited_s, is_lost, most = now - begin, is_lost or total < most, max(most, total)
            if are_there := total >= (enough or answer["wanted"]):
                enough_at = now
            grow_s = min(timeout_s, restart_wait_s if is_lost else GROW_S)
            if (waited_s > timeout_s) if are_there or grows else (now - enough_at > grow_s):
                if least and enough != least and total >= least:
                    enough = least
                    continue
                if is_lost and not are_there:
                    raise self._not_back(total, answer["wanted"], least, now - enough_at)
                raise ClusterError(_too_few(enough=are_there, waited_s=waited_s, slots=self.slots, **answer))
            if waited_s > 1 and not is_logged:
                log.info("waiting for %(wanted)d workers: %(free)d of %(total)d are free", answer)
                is_logged = True
            if ahead >= FRONT:
                time.sleep(min(POLL_S * ahead, ABSENT_S / 4))
        self.wanted = self.wanted or len(answer["workers"])
        return answer["workers"]

    def renew(self, topic: str, silent: Collection[str], least: int | None, wait_s: float) -> dict[str, str]:
        """Reserve workers for another attempt: those that are left, and replacements of lost ones.

        Args:
            silent: workers that went silent; they are reserved again only if they answer.
            least: this many are enough when the others have not come in time; None for as many as before.
        """
        assert self.wanted is not None, "reserve comes first"
        begin, is_logged, silent = time.monotonic(), False, set(silent)
        least = min(least or self.wanted, self.wanted)
        while True:
            self.check()
            late = time.monotonic() - begin > wait_s
            silent -= set() if late else self._answering(silent)
            answer = self._request(topic, least if late else self.wanted, silent)
            if "workers" in answer:
                return answer["workers"]
            if late:
                raise self._not_back(answer["free"], self.wanted, least, wait_s)
            if not is_logged and time.monotonic() - begin > 1:
                log.warning("waiting for workers: %d of %d are there", answer["free"], self.wanted)
                is_logged = True
            time.sleep(RENEW_POLL_S)

    def _not_back(self, there: int, wanted: int, least: int | None, wait_s: float) -> ClusterError:
        found = f"after dispatch.restart_wait_s={wait_s:.0f} s, {there} of {wanted} workers are there"
        if least is None:  # no rank has run
            fewer = f"dispatch.ranks={there * self.slots}" if self.wanted else f"cluster.n_workers={there}"
            return ClusterError(f"{found}: start {f'more, or give {fewer}' if there else 'some'}")
        return ClusterError(
            f"{found}, fewer than {least}: resume it later, or give dispatch.min_ranks={max(1, there) * self.slots}"
        )

    def _first_answer(self, topic: str, until: float, least: int | None) -> dict[str, Any]:
        """Ask for workers while nothing runs yet: a busy scheduler is asked again while the client is connected."""
        while True:
            try:
                return self._request(topic, least, wait_s=WAIT_S)
            except ClusterError as error:
                is_late = isinstance(error.__cause__, TimeoutError)
                if not is_late or self.client.status != "running" or time.monotonic() > until:
                    raise
            self.check()

    def _request(
        self, topic: str, least: int | None, silent: Collection[str] = (), wait_s: float = 0.0
    ) -> dict[str, Any]:
        asked = self.name, self.client.id, self.sweep, topic, self.wanted, least, list(silent), self.expected
        return self._on_scheduler(reserve_or_wait, *asked, wait_s=wait_s)

    def _on_scheduler(self, function: Callable[..., Any], *args: Any, answer_s: float = ANSWER_S, **kwargs: Any) -> Any:
        run = {"callback_timeout": answer_s, **kwargs}
        try:
            return self.client.sync(self.client._run_on_scheduler, BySource(function), *args, **run)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"nothing was heard for {answer_s:g} s"
            raise ClusterError(f"the scheduler {self.address} does not answer: {reason}") from error

    def _answering(self, silent: Collection[str]) -> set[str]:
        if not silent:
            return set()
        known = workers_of(self.client)
        asked = [address for address in silent if address in known]
        if not asked:
            return set()
        run = {"workers": asked, "on_error": "ignore", "callback_timeout": PING_S}
        try:
            return set(self.client.sync(self.client._run, os.getpid, **run))
        except (OSError, ValueError, TimeoutError):
            return set()


def _too_few(wanted: int, free: int, total: int, enough: bool, waited_s: float, slots: int) -> str:
    asked = f"{wanted} workers of {slots} ranks are wanted" if slots > 1 else f"dispatch.ranks={wanted}"
    if not enough:
        if not total:
            return f"{asked}, but the cluster has no workers: start some, as with cluster.n_workers={wanted}"
        return (
            f"{asked}, but there are {total} workers: give cluster.n_workers={wanted} or dispatch.ranks={total * slots}"
        )
    held = (
        f"{wanted} workers were wanted, {free} of {total} are free after {waited_s:.0f} s, the rest held by other jobs"
    )
    return f"{held}. Give dispatch.ranks={max(1, free) * slots} or less, or a longer dispatch.queue_timeout_s"
