"""Assigns ranks to workers, by their addresses and hosts only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddp_hydra.cluster.scheduler_plugin import natural
from ddp_hydra.rank.spec import RankSpec


def plan(workers: Mapping[str, str]) -> list[RankSpec]:
    """Number the ranks host by host, so that neighbours in rank share a host.

    Args:
        workers: worker address -> host.
    """
    by_host: dict[str, list[str]] = {}
    for address in sorted(workers, key=natural):
        by_host.setdefault(workers[address], []).append(address)
    specs: list[RankSpec] = []
    for node_rank, (host, addresses) in enumerate(by_host.items()):
        for local_rank, address in enumerate(addresses):
            rank = len(specs)
            specs.append(
                RankSpec(rank, len(workers), local_rank, len(addresses), node_rank, address, host, len(by_host))
            )
    return specs


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0-3, 7" for {0, 1, 2, 3, 7}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
