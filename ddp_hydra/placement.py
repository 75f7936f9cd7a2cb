"""Which worker hosts which rank: pure arithmetic over the scheduler's list of workers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's place in its gang.

    Args:
        rank: global rank, 0 … world_size - 1.
        world_size: number of ranks in the gang.
        local_rank: rank among those of the same host.
        local_world_size: number of ranks on that host.
        node_rank: number of the host, in order of rank.
        worker: address of the Dask worker that starts the rank.
        host: the host's address, as the other workers reach it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    worker: str
    host: str


def plan(workers: Mapping[str, str]) -> list[RankSpec]:
    """Number the ranks host by host, so that neighbours in rank share a host.

    Args:
        workers: worker address -> host.
    """
    by_host: dict[str, list[str]] = {}
    for address in sorted(workers, key=natural):
        by_host.setdefault(workers[address], []).append(address)
    return [
        RankSpec(rank, len(workers), local_rank, len(by_host[host]), node_rank, address, host)
        for rank, (node_rank, host, local_rank, address) in enumerate(
            (node_rank, host, local_rank, address)
            for node_rank, (host, addresses) in enumerate(by_host.items())
            for local_rank, address in enumerate(addresses)
        )
    ]


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


def ranges(numbers: Iterable[int]) -> str:
    """Say 0-3, 7 for {0, 1, 2, 3, 7}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
