"""Watches the ranks of torchrun from the process of rank 0, as a client watches ranks on Dask."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import msgspec

from ddp_hydra.console.signals import SIGNALS, Interrupts, print_line
from ddp_hydra.dispatch.attempt import END_S, Attempt
from ddp_hydra.dispatch.gang import Gang
from ddp_hydra.dispatch.torchrun_server import Server
from ddp_hydra.dispatch.watchdog import Watchdog
from ddp_hydra.dispatch.workers import WorkerClient
from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import inbox, outbox
from ddp_hydra.rank.spec import JobSpec, RankSpec
from ddp_hydra.rank.torchrun_channel import GANG
from ddp_hydra.rank.torchrun_task import TorchrunTask
from ddp_hydra.record import End, Preempted, Record

KILLED = "torchrun was killed, so its ranks were stopped: go on with resume=<run dir>"
BURST_S = 2.0
"""Seconds in which a second signal counts as the same: a process gets Ctrl-C from the terminal and from torchrun."""


class TorchrunInterrupts(Interrupts):
    """Notes the signals of the user, and of torchrun when it is told to end."""

    since = float("-inf")

    def _on_signal(self, number: int, frame: Any) -> None:
        if time.monotonic() - self.since > BURST_S:
            self.since = time.monotonic()
            self.reason = reason_of(number)
            super()._on_signal(number, frame)


def reason_of(number: int) -> str:
    return "preemption" if number == SIGNALS[1] else "interrupt"


class TorchrunWorkers(WorkerClient):
    """Reaches the processes that torchrun has started.

    Args:
        server: connected with the processes of other ranks.
        own: the task of rank 0.
        specs: the ranks' places.
    """

    def __init__(self, server: Server, own: TorchrunTask, specs: list[RankSpec]) -> None:
        self.client: Any = server
        self.own, self.name, self.specs = own, GANG, specs
        self.folders = {spec.worker: "" for spec in specs} | {specs[0].worker: own.own_worker.local_directory}
        self.lost: set[str] = set()

    def scheduler_answers(self) -> bool:
        """Return True: this process is what a scheduler would be."""
        return True

    def send(self, message: inbox.Message, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank == 0:
                self.own.box.put(message)
            else:
                self.client.send(rank, {"message": dict(message)})

    def acknowledge(self, rank: int, size: int) -> None:
        self.send({"acknowledged": size}, [rank])

    def call_outbox(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        is_lost = lambda: self.specs[rank].worker in self.lost  # noqa: E731
        if function is outbox.read:
            name, offset = args
            return self.client.call(rank, "read", is_lost, name=name, offset=offset)
        return self.client.call(rank, "remove", is_lost, name=args[0])


class TorchrunWatchdog(Watchdog):
    """Checks ranks without Dask."""

    left = "its process was killed, or its host is gone; what torchrun says there tells how it ended"
    unheard = "it"

    def check_tasks(self) -> None:
        """Check for ranks that did not come in time, and whether torchrun is still there.

        Raises:
            ClusterError: it was killed.
        """
        assert isinstance(self.workers, TorchrunWorkers)
        if self.workers.own.has_lost_torchrun:
            raise ClusterError(KILLED)
        self.check_late(
            f"did not come in cluster.wait_timeout_s={self.settings.start_timeout_s:g}: look at what torchrun says on "
            "its host"
        )


class TorchrunAttempt(Attempt):
    """Watches the ranks that torchrun has started once.

    Args:
        gang: its settings.
        own: the task of rank 0.
        attempt: number of the gang's start.
        numbers, run_dir: see `TorchrunGang`.
        on_give_up: called when the user ends the job at once.
    """

    watchdog_class = TorchrunWatchdog

    def __init__(
        self,
        gang: Gang,
        own: TorchrunTask,
        attempt: int,
        numbers: Mapping[str, int],
        run_dir: str,
        on_give_up: Callable[[], None],
    ) -> None:
        self.own, self.numbers, self.run_dir, first = own, numbers, run_dir, own.spec
        specs = [replace(first, rank=rank, worker=f"rank {rank}", host="a host") for rank in range(first.world_size)]
        specs[0] = first
        self.server = Server(first, self.put, self.note_host, self.note_loss)
        job = JobSpec(gang=GANG, attempt=attempt, ranks=tuple(specs), settings=gang.settings)
        super().__init__(gang.client, job, gang.interrupts, gang.read, gang.stop, on_give_up, {})

    def reach_workers(self) -> WorkerClient:
        return TorchrunWorkers(self.server, self.own, self.specs)

    @contextmanager
    def submitted(self, job: JobSpec) -> Iterator[None]:
        """Have rank 0 make its call, and listen to all ranks inside the block; after it, none of them trains."""
        own = Thread(target=self.own.run_to_end, name="ddp_hydra-rank-task", daemon=True)
        self.own.own_worker.send_by(self.put)
        self.server.thread.start()
        server = self.server.describe() | {"run_dir": self.run_dir}
        self.own.give(job.settings, job.call, self.number, server=server, numbers=dict(self.numbers))
        own.start()
        try:
            yield
        finally:
            try:
                if not self.rank_states.is_over:
                    self.stop()
                    self.drain(until=time.monotonic() + END_S)
            finally:
                self.own.give_up()
                own.join()

    def on_record(self, record: Record, size: int) -> None:
        """Act on a record of a worker's task; queue all other records for their reader."""
        if isinstance(record.data, Preempted):
            self.interrupts.reason = record.data.reason
            if not self.interrupts.wanted and (notice := self.interrupts.notice()):
                print_line(f"rank {record.rank} was told to end: {notice}")
            self.interrupts.wanted = True
            return
        own = msgspec.structs.replace(record, attempt=self.number)  # the others do not know the number
        super().on_record(own, size)

    def on_end(self, rank: int, end: End) -> None:
        """Note how a rank ended.

        Raises:
            ClusterError: torchrun was killed, which rank 0's task has noticed before the watchdog.
        """
        if self.own.has_lost_torchrun and not self.is_stopping:
            raise ClusterError(KILLED)
        super().on_end(rank, end)

    # -- on the server's thread ----------------------------------------------------------------------------

    def put(self, lines: bytes) -> None:
        self.events.put((GANG, lines))

    def note_host(self, rank: int, host: str) -> None:
        self.specs[rank] = replace(self.specs[rank], host=host)

    def note_loss(self, rank: int) -> None:
        self.events.put((GANG, {"action": "remove-worker", "worker": self.specs[rank].worker}))
