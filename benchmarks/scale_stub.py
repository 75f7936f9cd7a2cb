"""Runs a stub rank: everything that the rank task does, but no process behind it."""

from __future__ import annotations

import select
import time

import cloudpickle
from distributed import get_worker

from ddp_hydra import results
from ddp_hydra.rank import inbox, record_relay, return_values
from ddp_hydra.rank.spec import LaunchSpec
from ddp_hydra.record import End, Metrics, Record, Up


def records(n: int) -> None:
    """Stand for a function that sends `n` records; `run_rank` reads `n` from the call."""


def run_rank(launch_spec: LaunchSpec) -> None:
    """Stand in for `task.run_rank`: come up, receive the rendezvous address, send records one by one, end."""
    worker, rank = get_worker(), launch_spec.spec.rank
    box = inbox.of_rank(launch_spec.gang, rank)
    try:
        record_relay.publish(worker, launch_spec, Up(None if rank else ("127.0.0.1", 1)))
        while rank and not any("rendezvous" in message for message in box.take()):
            select.select([box], [], [], 1.0)
        _, (n,), _ = cloudpickle.loads(launch_spec.call)
        for step in range(n):
            metrics = Metrics({"train/loss": 0.5, "lr": 0.1}, 0, 32 * step)
            record = Record(metrics, rank, step, time.time(), launch_spec.attempt)
            worker.log_event(launch_spec.gang, record.encode())
        value = results.file_of("value", return_values.encode(rank))
        record_relay.publish(worker, launch_spec, End(value))
    finally:
        inbox.remove(launch_spec.gang, rank)
