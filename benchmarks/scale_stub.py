"""Run a stub rank: everything that the rank task does, but no process behind it."""

from __future__ import annotations

import base64
import select
import time

import cloudpickle
from distributed import get_worker

from ddp_hydra.rank import inbox, launch_spec, return_values, task
from ddp_hydra.results import Record


def records(n: int) -> None:
    """Stand for a function that sends `n` records; `run_rank` reads `n` from the call."""


def run_rank(order: launch_spec.LaunchSpec) -> None:
    """Stand in for `task.run_rank`: come up, receive the rendezvous address, send records one by one, end."""
    worker, rank = get_worker(), order.spec.rank
    box = inbox.box(order.gang, rank)
    try:
        task.publish(worker, order, "up", {} if rank else {"rendezvous": ["127.0.0.1", 1]})
        while rank and not any("rendezvous" in message for message in box.take()):
            select.select([box], [], [], 1.0)
        _, (n,), _ = cloudpickle.loads(order.call)
        for step in range(n):
            said = {"metrics": {"train/loss": 0.5, "lr": 0.1}, "epoch": 0, "samples": 32 * step}
            record = Record("metrics", said, rank, step, time.time(), order.attempt)
            worker.log_event(order.gang, record.encode())
        value = base64.b64encode(return_values.encode(rank)).decode()
        task.publish(worker, order, "end", {"status": "ok", "value": value, "time_s": time.time()})
    finally:
        inbox.remove(order.gang, rank)
