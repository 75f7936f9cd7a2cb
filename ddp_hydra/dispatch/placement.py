"""Assigns ranks to workers, by their addresses and hosts only."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributed import Client

from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.cluster.scheduler_plugin import natural
from ddp_hydra.rank.environment import seen_gpus
from ddp_hydra.rank.spec import RankSpec


def plan(workers: Mapping[str, str], slots: int = 1, ranks: int | None = None) -> list[RankSpec]:
    """Number the ranks host by host and worker by worker, so that neighbours in rank share a host.

    Args:
        workers: worker address -> host.
        slots: the most ranks of a worker.
        ranks: number of ranks; None for as many as the workers take.
    """
    by_host: dict[str, list[str]] = {}
    for address in sorted(workers, key=natural):
        by_host.setdefault(workers[address], []).append(address)
    places = [(host, address) for host, addresses in by_host.items() for address in addresses for _ in range(slots)]
    places = places[:ranks]
    on_host = Counter(host for host, _ in places)
    node_ranks = {host: number for number, host in enumerate(on_host)}
    seen: Counter[str] = Counter()
    specs: list[RankSpec] = []
    for rank, (host, address) in enumerate(places):
        place = rank, len(places), seen[host], on_host[host], node_ranks[host]
        specs.append(RankSpec(*place, address, host, len(on_host)))
        seen[host] += 1
    return specs


def by_worker(specs: Iterable[RankSpec]) -> dict[str, list[RankSpec]]:
    """Return the ranks of each worker; they follow one another."""
    return {worker: list(own) for worker, own in itertools.groupby(specs, key=lambda spec: spec.worker)}


# -- ranks of each worker --------------------------------------------------------------------------------

log = logging.getLogger(__name__)
ANSWER_S = 10.0
"""Seconds that the workers may take to answer. One that does not answer takes one rank."""


def slots_of_workers(client: Client, given: int | str) -> int:
    """Return how many ranks each worker holds: the number given, or with "auto" as many as each has GPUs."""
    if given != "auto":
        return int(given)
    workers = workers_of(client)
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
