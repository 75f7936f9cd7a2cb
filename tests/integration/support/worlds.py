"""A gang whose processes live through several worlds: a driver for tests, on the engine's own tasks and messages."""

from __future__ import annotations

import os
import queue
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
from distributed import Client

from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.dispatch import placement
from ddp_hydra.dispatch.attempt import Attempt
from ddp_hydra.dispatch.workers import WorkerClient
from ddp_hydra.rank import inbox
from ddp_hydra.rank.spec import GangSettings, JobSpec
from ddp_hydra.record import End, Log, Record, Up

WAIT_S = 60.0


class WorldGang:
    """Starts ranks on one worker, and brings their processes into one world after the other.

    Args:
        client: of the cluster.

    Attributes:
        ended: rank -> how it has ended in this world.
        outputs: what each rank has written.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.name = client, f"worlds-{os.urandom(4).hex()}"
        self.worker = min(workers_of(client))
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended: dict[int, End] = {}
        self.outputs: defaultdict[int, str] = defaultdict(str)  # a rank's text may end in the middle of a line

    @property
    def output(self) -> str:
        return "\n".join(self.outputs.values())

    def job(self, ranks: int, call: tuple[Any, ...], generation: int) -> JobSpec:
        settings = GangSettings(name="worlds", ranks=ranks, backend="gloo", threads=1, timeout_s=60, cwd="/")
        return JobSpec(
            gang=self.name,
            attempt=0,
            ranks=tuple(placement.plan({self.worker: "127.0.0.1"}, ranks, ranks)),
            call=cloudpickle.dumps(call),
            settings=settings,
            generation=generation,
            lives_on=True,
        )

    def start(self, ranks: int, *call: Any) -> None:
        job = self.job(ranks, call, 0)
        self.client.subscribe_topic(job.topic, self.events.put)
        self.workers = WorkerClient(self.client, job)
        self.future = Attempt.submit(self.workers, self.worker, job)  # type: ignore[arg-type]

    def form(self, ranks: int, places: Mapping[int, int], *call: Any) -> None:
        """Form the next world; `places` says of each new rank which one its process was."""
        job = self.job(ranks, call, 1)
        self.workers.specs = job.ranks
        self.ended.clear()
        self.send({"world": job.encode(), "places": dict(places)})

    def send(self, message: inbox.Message) -> None:
        answers = self.workers.call([self.worker], inbox.deliver, self.name, 0, None, message)
        assert answers == {self.worker: True}

    def read(self, until: Callable[[], bool]) -> None:
        while not until():
            try:
                _, message = self.events.get(timeout=WAIT_S)
            except queue.Empty:
                raise AssertionError(f"nothing more came of the ranks:\n{self.output}") from None
            for record in map(Record.decode, message.split(b"\n")):
                match record.data:
                    case Up(rendezvous) if rendezvous is not None:
                        self.workers.send({"rendezvous": rendezvous}, range(1, len(self.workers.specs)))
                    case End() as end:
                        self.ended[record.rank] = end
                    case Log(text):
                        self.outputs[record.rank] += text

    def values(self) -> list[Any]:
        self.read(lambda: len(self.ended) == len(self.workers.specs))
        ends = [self.ended[rank] for rank in range(len(self.workers.specs))]
        assert all(end.value is not None for end in ends), self.output
        return [self.workers.returned(rank, end.value) for rank, end in enumerate(ends) if end.value is not None]

    def close(self) -> None:
        self.workers.send({"stop": True}, range(len(self.workers.specs)))
        self.client.cancel([self.future], force=True)
        self.client.unsubscribe_topic(self.name)
