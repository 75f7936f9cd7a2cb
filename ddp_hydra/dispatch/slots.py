"""Decides how many ranks a worker holds: `dispatch.ranks_per_worker`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Client

from ddp_hydra.rank.environment import seen_gpus

log = logging.getLogger(__name__)
ANSWER_S = 10.0
"""Seconds that the workers may take to answer. One that does not answer takes one rank."""


def of_workers(client: Client, given: int | str) -> int:
    """Return how many ranks each worker of a cluster holds.

    Args:
        client: of the cluster.
        given: a number; or "auto" for as many as each worker has GPUs, the same for all workers.
    """
    if given != "auto":
        return int(given)
    workers = client.scheduler_info(n_workers=-1)["workers"]
    known: dict[str, Any] = vars(client).setdefault("_ddp_hydra_gpus", {})
    if unknown := [address for address in workers if address not in known]:
        run = {"workers": unknown, "on_error": "return", "callback_timeout": ANSWER_S}
        try:
            known.update(client.sync(client._run, seen_gpus, **run))
        except (OSError, TimeoutError):
            log.debug("the workers did not say which GPUs they see")
    gpus = {address: known[address] for address in workers if isinstance(known.get(address), list)}
    numbers = by_gpus(gpus, {address: worker["host"] for address, worker in workers.items()})
    if len(set(numbers.values())) > 1:
        most = max(numbers.values())
        log.warning(
            "the workers see %d to %d GPUs each, so each holds %d ranks: give dispatch.ranks_per_worker=%d for more",
            min(numbers.values()), most, min(numbers.values()), most,
        )  # fmt: skip
    return min(numbers.values(), default=1)


def by_gpus(gpus: Mapping[str, Sequence[str]], hosts: Mapping[str, str]) -> dict[str, int]:
    """Return how many ranks each worker holds: its GPUs are shared with the workers of its host that see the same."""
    views = {address: (hosts[address], *sorted(seen)) for address, seen in gpus.items()}
    sharing = Counter(views.values())
    return {address: max(1, len(gpus[address]) // sharing[views[address]]) for address in gpus}
