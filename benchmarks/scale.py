"""Measures the cost of each rank for client and scheduler: gangs of up to 4,096 stub ranks, no processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import psutil
from distributed import Client

from benchmarks import commands, report, scale_stub
from benchmarks.report import Figure, Goal
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.config import project
from ddp_hydra.dispatch import Gang
from ddp_hydra.rank import task

SLOTS = 8
"""Ranks of each worker."""
WORKERS = (4, 32, 512)
FROM = 32
"""Where the fixed cost of a gang is small enough to see what each rank costs."""
RECORDS = 200
"""Records of each rank, where a gang sends some."""
PER_PROCESS = 64
"""Workers in one process."""


@dataclass(frozen=True)
class Cost:
    """Holds the costs of one gang.

    Args:
        wall_s: from the dispatch to the last rank's end.
        client_s: CPU time of the client.
        scheduler_s: CPU time of the scheduler.
    """

    wall_s: float
    client_s: float
    scheduler_s: float


def measure(repeats: int) -> Iterator[Figure]:
    """Dispatch gangs of all sizes, without records and with."""
    packed = project.pack(commands.ROOT)
    dispatch: dict[int, list[Cost]] = {n: [] for n in WORKERS}
    records: dict[int, list[Cost]] = {n: [] for n in WORKERS}
    with workers(max(WORKERS)) as (client, scheduler), mock.patch.object(task, "run_ranks", scale_stub.run_ranks):
        run(client, scheduler, packed, max(WORKERS), 1)  # everything once, before anything is measured
        for _ in range(repeats):
            for n in WORKERS:
                dispatch[n].append(run(client, scheduler, packed, n, 0))
                records[n].append(run(client, scheduler, packed, n, RECORDS))
                report.progress(f"{n * SLOTS} ranks: {dispatch[n][-1]}, with records {records[n][-1]}")
    yield from figures(dispatch, records)


def figures(dispatch: dict[int, list[Cost]], records: dict[int, list[Cost]]) -> Iterator[Figure]:
    """Return the figures: the costs of the largest gang, and how the cost of each rank grows with the gang."""
    most, linear = max(WORKERS), Goal(1.2, at_most=True)
    goals = {"wall": Goal(10.0, at_most=True), "scheduler": Goal(5.0, at_most=True)}
    for part in ("wall", "client", "scheduler"):
        whole = [getattr(cost, f"{part}_s") for cost in dispatch[most]]
        yield report.times(f"dispatch, {part}, {most * SLOTS} ranks on {most} workers", whole, goal=goals.get(part))
        each = {
            n: report.times(
                f"dispatch, {part}, {n * SLOTS} ranks",
                [1e3 * getattr(cost, f"{part}_s") / n / SLOTS for cost in costs],
                unit="ms/rank",
            )
            for n, costs in dispatch.items()
        }
        yield from each.values()
        yield report.ratio(f"{part}: {most * SLOTS} / {FROM * SLOTS} ranks", each[most], each[FROM], linear)
    for part, goal in (("client", None), ("scheduler", Goal(2.1, at_most=True))):
        yield report.times(
            f"record, {part}, {most * SLOTS} ranks",
            [
                1e6 * (getattr(loud, f"{part}_s") - getattr(quiet, f"{part}_s")) / most / SLOTS / RECORDS
                for loud, quiet in zip(records[most], dispatch[most], strict=True)
            ],
            unit="us",
            goal=goal,
        )


def run(client: Client, scheduler: psutil.Process, packed: project.Project, n: int, records: int) -> Cost:
    """Run one gang of stubs on `n` workers."""
    begin, client_s, scheduler_s = time.perf_counter(), time.process_time(), cpu_s(scheduler)
    heard: Counter[int] = Counter()
    settings = {"ranks": n * SLOTS, "ranks_per_worker": SLOTS, "name": "scale", "project": packed}
    gang = Gang(client, on_record=lambda record: heard.update([record.rank]), **settings)
    assert gang.run(scale_stub.records, records) == list(range(n * SLOTS))
    assert heard.total() == n * SLOTS * records, heard.total()
    return Cost(time.perf_counter() - begin, time.process_time() - client_s, cpu_s(scheduler) - scheduler_s)


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process so far."""
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def workers(n: int) -> Iterator[tuple[Client, psutil.Process]]:
    """Run a scheduler in a process of its own, and `n` workers in a few more."""
    with ExitStack() as stack:
        scheduler = start(stack, sys.executable, "-m", "benchmarks.scale_workers")
        assert scheduler.stdout is not None
        address = scheduler.stdout.readline().strip()
        for first in range(0, n, PER_PROCESS):
            start(stack, sys.executable, "-m", "benchmarks.scale_workers", address, str(min(PER_PROCESS, n - first)))
        client = stack.enter_context(Scheduler(address).client())
        client.wait_for_workers(n, timeout=120)
        yield client, psutil.Process(scheduler.pid)


def start(stack: ExitStack, *command: str) -> subprocess.Popen[str]:
    """Start a process that ends with its stdin."""
    variables = os.environ | {"DASK_LOGGING__DISTRIBUTED": "critical"}  # as all end at once, they miss each other
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return stack.enter_context(subprocess.Popen(command, cwd=commands.ROOT, env=variables, text=True, **pipes))


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=5)
