"""Workers held for a gang, so that two jobs never share one.

The book is kept on the scheduler, whose event loop runs one function at a time: checking and taking is one
step. A holder is a client; the scheduler knows which clients are connected, so a dead one holds nothing, and by their
heartbeats which are suspended, so these hold nothing for ever. No lease has to be renewed and no lock is left behind.
The scheduler also tells a gang which of its workers are lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from distributed import Client

from ddp_hydra.cluster.by_source import Shipped
from ddp_hydra.cluster.scheduler_plugin import ABSENT_S, give_back, take
from ddp_hydra.errors import ClusterError

log = logging.getLogger(__name__)
POLL_S = 0.05
"""How often the first in the queue asks; the second half as often, and so on."""
RENEW_POLL_S = 0.05
GROW_S = 10.0
"""How long a cluster that is too small may take to grow."""
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
            return self.client.sync(self.client._run_on_scheduler, Shipped(function), *args, **run)
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
