"""The Dask task that runs the ranks of one worker: it starts them, watches them, and reports how each has ended.

One thread serves all ranks of the worker. After a failure, the task waits for the gang's next attempt. It never raises
because of a rank: the end records say what happened.
"""

from __future__ import annotations

import select
import selectors
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from distributed import Worker, get_worker

from ddp_hydra.errors import ConfigError, DiskFull, Failure
from ddp_hydra.rank import inbox, outbox
from ddp_hydra.rank.rank_process import TICK_S, RankContext, RankProcess
from ddp_hydra.rank.record_relay import FLUSH_S
from ddp_hydra.rank.spec import JobSpec, RankSpec
from ddp_hydra.record import Beat, End
from ddp_hydra.storage import retry

T = TypeVar("T")


class Stopped(Exception):
    """The ranks were stopped before their processes were started."""


@dataclass(frozen=True)
class PickledCall:
    """Calls a function when it is unpickled.

    A scheduler unpickles each task that it passes on. The task that it sees is the unpickling of these bytes, so the
    scheduler needs no ddp_hydra.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def run_ranks(data: bytes) -> None:
    """Run the ranks of one worker to their ends; after a failure, also in the gang's next attempts."""
    job: JobSpec | None = JobSpec.decode(data)
    assert job is not None
    worker, gang, attempt = get_worker(), job.gang, job.attempt
    box = inbox.of_task(gang, worker.address)
    is_cancelled = partial(_is_cancelled, worker, worker.get_current_task())
    try:
        while job is not None:
            attempt = job.attempt
            waits = WorkerTask(worker, job, box, is_cancelled).run()
            job = next_attempt(box, attempt, is_cancelled) if waits else None
    finally:
        # After the last record: a worker that closes waits for this.
        inbox.remove(gang, worker.address, attempt)


def next_attempt(box: inbox.Inbox, attempt: int, is_cancelled: Callable[[], bool]) -> JobSpec | None:
    """Wait for the gang's next attempt; return None if there is none, or if the worker closes."""
    while not is_cancelled():
        messages = box.take(attempt + 1)
        for _, message in messages:
            if "job" in message:
                for rank, other in messages:
                    if other is not message:  # for the ranks that are started now
                        box.put(other, rank, attempt + 1)
                return JobSpec.decode(message["job"])
            if "preempted" in message or "stop" in message:  # the worker closes
                return None
        select.select([box], [], [], TICK_S)
    return None


def _is_cancelled(worker: Worker, key: Any) -> bool:
    """Return whether Dask has cancelled a task: the client is gone, or gave up."""
    task = worker.state.tasks.get(key)
    return task is None or task.state in ("cancelled", "released")


def not_started(error: Exception) -> End:
    if isinstance(error, Stopped):
        return End(stopped=True)
    mistake = isinstance(error, (ConfigError, DiskFull))  # another attempt would fail in the same way
    message = f"could not be started: {'' if mistake else f'{type(error).__name__}: '}{error}"
    trace = "" if mistake else traceback.format_exc()  # no file descriptors, a full disk, no torch
    return End(failure=Failure("start", message=message, traceback=trace, time_s=time.time(), mistake=mistake))


class WorkerTask(RankContext):
    """Serves the ranks of one worker, in one attempt, until all have ended: `ranks` has those that have not."""

    def __init__(self, worker: Worker, job: JobSpec, box: inbox.Inbox, is_cancelled: Callable[[], bool]) -> None:
        super().__init__(worker, job, is_cancelled)
        self.box = box
        self.specs = [spec for spec in job.ranks if spec.worker == worker.address]
        self.ranks: dict[int, RankProcess] = {}
        self.is_closing = False

    def run(self) -> bool:
        """Run the ranks to their ends; return whether the task waits for another attempt."""
        try:
            with selectors.DefaultSelector() as self.selector:
                self.selector.register(self.box, selectors.EVENT_READ, self.on_inbox)
                self.run_ranks()
        except Exception as error:  # of ours, or of the host
            for spec in self.specs:
                self.sender.say_end(spec.rank, not_started(error))
        self.sender.flush(at_once=True)
        is_over = all(end.value is not None for end in self.sender.ended.values())
        return self.job.settings.max_restarts > 0 and not is_over and not self.is_closing

    def run_ranks(self) -> None:
        try:
            self.make_room()
            for spec in self.specs:
                self.start(spec)
            self.sender.flush(at_once=True)
            while self.ranks:
                self.serve()
        finally:
            for rank in self.ranks.values():
                rank.stack.close()
        if self.is_cancelled():  # nobody will fetch the ranks' files
            outbox.clear(self.job.topic, self.worker)

    def start(self, spec: RankSpec) -> None:
        """Start one rank; one that can't be started ends at once."""
        rank = None
        try:
            rank = RankProcess(self, spec)
            rank.start()
        except Exception as error:
            if rank is not None:
                rank.stack.close()
            self.sender.say_end(spec.rank, not_started(error))
        else:
            self.ranks[spec.rank] = rank

    def serve(self) -> None:
        waits = FLUSH_S if self.sender.buffer else min(rank.pause_s for rank in self.ranks.values())
        events = self.selector.select(waits)
        for key, _ in events:
            key.data()
        sources, is_urgent = {key.fileobj for key, _ in events}, False
        for number, rank in list(self.ranks.items()):
            if rank.look(sources):
                del self.ranks[number]
                end = rank.end()
                rank.stack.close()
                self.sender.say_end(number, end)
                is_urgent = True
        self.sender.flush(at_once=is_urgent)

    def on_inbox(self) -> None:
        for number, message in self.box.take(self.job.attempt):
            self.is_closing |= "preempted" in message
            if "world" in message:
                self.form(JobSpec.decode(message["world"]), message["places"])
                continue
            for rank in self.ranks.values() if number is None else filter(None, [self.ranks.get(number)]):
                rank.on_message(message)

    def form(self, job: JobSpec, places: Mapping[int, int]) -> None:
        """Bring the ranks of this worker into the gang's next world; start those that no process can become.

        Args:
            job: of the next world.
            places: new rank -> the rank that its process was; all processes that still run are among them.
        """
        self.job, former, self.ranks = job, self.ranks, {}
        self.specs = [spec for spec in job.ranks if spec.worker == self.worker.address]
        for spec in self.specs:
            self.sender.ended.pop(spec.rank, None)
            if spec.rank in places:
                self.ranks[spec.rank] = former[places[spec.rank]]
                self.ranks[spec.rank].launch_again(job, spec)
            else:
                outbox.folder(self.worker, job.topic, spec.rank)
                self.start(spec)
        self.sender.flush(at_once=True)

    # -- before the ranks start ----------------------------------------------------------------------------

    def make_room(self) -> None:
        local, packed = Path(self.worker.local_directory), self.job.project
        if packed is not None:
            self.project = self.with_room(lambda: packed.unpack(local))
        for spec in self.specs:
            self.with_room(partial(outbox.folder, self.worker, self.job.topic, spec.rank))

    def with_room(self, action: Callable[[], T]) -> T:
        """Write into the worker's folder; if the disk is full, send heartbeats and try again, for a while."""
        folder, first = Path(self.worker.local_directory), self.specs[0].rank
        retry_s, describe = self.job.settings.retry_s, partial(retry.describe_full_folder, folder)
        return retry.retry_while_full(action, describe, retry_s, partial(self.sender.warn, first), self.wait)

    def wait(self, seconds: float) -> None:
        for spec in self.specs:
            self.sender.say(spec.rank, Beat(phase="join", first=True))
        self.sender.flush(at_once=True)
        time.sleep(seconds)
        messages = self.box.take(self.job.attempt)
        if self.is_cancelled() or any("stop" in message for _, message in messages):
            raise Stopped
        for rank, message in messages:  # for later
            self.box.put(message, rank, self.job.attempt)
