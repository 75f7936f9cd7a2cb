"""Runs stub ranks: everything that a worker's task does for its ranks, but no processes behind it."""

from __future__ import annotations

import select
import time

import cloudpickle
from distributed import get_worker

from ddp_hydra import results
from ddp_hydra.rank import inbox, spec
from ddp_hydra.rank.record_relay import RecordSender
from ddp_hydra.rank.spec import JobSpec
from ddp_hydra.record import Beat, End, Metrics, Record, Up


def records(n: int) -> None:
    """Stand for a function that sends `n` records; `run_ranks` reads `n` from the call."""


def run_ranks(data: bytes) -> None:
    """Stand in for `task.run_ranks`: come up, receive the rendezvous address, send beats and records, end."""
    job, worker = JobSpec.decode(data), get_worker()
    ranks = [spec.rank for spec in job.ranks]
    box = inbox.of_task(job.gang, worker.address)
    sender = RecordSender(worker, job.topic, job.attempt)
    try:
        for rank in ranks:
            sender.say(rank, Up(None if rank else ("127.0.0.1", 1)))
        sender.flush(at_once=True)
        while ranks[-1] and not any("rendezvous" in message for _, message in box.take(job.attempt)):
            select.select([box], [], [], 1.0)
        _, (n,), _ = cloudpickle.loads(job.call)
        for rank in ranks:
            sender.say(rank, Beat(phase="start", first=True))
        for step in range(n):
            metrics = Metrics({"train/loss": 0.5, "lr": 0.1}, 0, 32 * step)
            for rank in ranks:
                sender.buffer.append(Record(metrics, rank, step, time.time(), job.attempt).encode())
            sender.flush()
        for rank in ranks:
            sender.say_end(rank, End(results.file_of("value", spec.encode(rank))))
        sender.flush(at_once=True)
    finally:
        inbox.remove(job.gang, worker.address, job.attempt)
