"""Assigns ranks to workers, by their addresses and hosts only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ddp_hydra.cluster.scheduler_plugin import natural
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
    groups: dict[str, list[RankSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.worker, []).append(spec)
    return groups


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0-3, 7" for {0, 1, 2, 3, 7}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
