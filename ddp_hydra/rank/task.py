"""The Dask task that runs the ranks of one worker: it starts them, watches them, and reports how each has ended.

One thread serves all ranks of the worker. The task never raises because of a rank: the end records say what happened.
"""

from __future__ import annotations

import selectors
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from distributed import Worker, get_worker

from ddp_hydra.errors import ConfigError, DiskFull, Failure
from ddp_hydra.rank import inbox, outbox
from ddp_hydra.rank.launcher import RankContext
from ddp_hydra.rank.rank_process import RankProcess
from ddp_hydra.rank.record_relay import FLUSH_S, RecordSender
from ddp_hydra.rank.spec import LaunchSpec, RankSpec
from ddp_hydra.record import Beat, End, Notice
from ddp_hydra.storage import retry

T = TypeVar("T")


class Stopped(Exception):
    """The ranks were stopped before their processes were started."""


@dataclass(frozen=True)
class PickledTask:
    """Runs the ranks when it is unpickled.

    A scheduler unpickles each task that it passes on. The task that it sees is the unpickling of these bytes, so the
    scheduler needs no ddp_hydra.

    Args:
        launch_spec: all that the worker needs.
    """

    launch_spec: LaunchSpec

    def __reduce__(self) -> tuple[Any, ...]:
        return run_ranks, (self.launch_spec,)


def run_ranks(launch_spec: LaunchSpec) -> None:
    """Run the ranks of one worker to their ends."""
    worker = get_worker()
    sender = RecordSender(worker, launch_spec.gang, launch_spec.attempt)
    try:
        with ExitStack() as stack:
            WorkerTask(worker, launch_spec, sender, stack).run()
    except Exception as error:  # of ours, or of the host
        for spec in launch_spec.specs:
            sender.say_end(spec.rank, not_started(error))
    finally:
        sender.flush(at_once=True)
        inbox.remove(launch_spec.gang, worker.address)  # after the last record: a worker that closes waits for this


def not_started(error: Exception, what: str = "could not be started") -> End:
    """Return the end of a rank that has no process, or that could not be watched."""
    if isinstance(error, Stopped):
        return End(stopped=True)
    if isinstance(error, (ConfigError, DiskFull)):  # another attempt would fail in the same way
        return End(failure=Failure("start", message=f"{what}: {error}", time_s=time.time(), mistake=True))
    message = f"{what}: {type(error).__name__}: {error}"  # no file descriptors, a full disk, no torch
    return End(failure=Failure("start", message=message, traceback=traceback.format_exc(), time_s=time.time()))


class WorkerTask:
    """Serves the ranks of one worker until all have ended.

    Args:
        worker: the Dask worker.
        launch_spec: of its ranks.
        sender: of their records.
        stack: closes, when all have ended, what is opened here.

    Attributes:
        ranks: the ranks that have not ended, by number.
        context: what the ranks share.
    """

    def __init__(self, worker: Worker, launch_spec: LaunchSpec, sender: RecordSender, stack: ExitStack) -> None:
        self.worker, self.launch_spec, self.sender = worker, launch_spec, sender
        self.dask_key = worker.get_current_task()
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.box = inbox.of_task(launch_spec.gang, worker.address)
        self.selector.register(self.box, selectors.EVENT_READ, self.on_inbox)
        self.ranks: dict[int, RankProcess] = {}
        self.context = RankContext(worker, launch_spec, sender, self.selector, self.is_cancelled)

    def run(self) -> None:
        """Start the ranks, and serve them until all have ended."""
        try:
            self.make_room()
            for spec in self.launch_spec.specs:
                self.start(spec)
            self.sender.flush(at_once=True)
            while self.ranks:
                self.serve()
        finally:
            for rank in self.ranks.values():
                rank.close()
        if self.is_cancelled():  # nobody will fetch the ranks' files
            outbox.clear(self.launch_spec.gang, self.worker)

    def start(self, spec: RankSpec) -> None:
        """Start one rank; one that can't be started ends at once."""
        rank = None
        try:
            rank = RankProcess(self.context, spec)
            rank.start()
        except Exception as error:
            if rank is not None:
                rank.close()
            self.sender.say_end(spec.rank, not_started(error))
        else:
            self.ranks[spec.rank] = rank

    def serve(self) -> None:
        """Wait for the next events, act on them, and look at each rank."""
        waits = FLUSH_S if self.sender.buffer else min(rank.pause_s for rank in self.ranks.values())
        events = self.selector.select(waits)
        for key, _ in events:
            key.data()
        sources, is_urgent = {key.fileobj for key, _ in events}, False
        for number, rank in list(self.ranks.items()):
            if rank.look(sources):
                del self.ranks[number]
                end = rank.end()
                rank.close()
                self.sender.say_end(number, end)
                is_urgent = True
        self.sender.flush(at_once=is_urgent)

    def on_inbox(self) -> None:
        """Act on the messages of the client."""
        for number, message in self.box.take():
            for rank in self.ranks.values() if number is None else filter(None, [self.ranks.get(number)]):
                rank.on_message(message)

    def is_cancelled(self) -> bool:
        """Return whether Dask has cancelled this task: the client is gone, or gave up."""
        task = self.worker.state.tasks.get(self.dask_key)
        return task is None or task.state in ("cancelled", "released")

    # -- before the ranks start ----------------------------------------------------------------------------

    def make_room(self) -> None:
        """Unpack the project, and make the folders of the ranks, before any of the ranks has to be served."""
        local, packed = Path(self.worker.local_directory), self.launch_spec.project
        if packed is not None:
            self.context.project = self.with_room(lambda: packed.unpack(local))
        for spec in self.launch_spec.specs:
            self.with_room(partial(outbox.folder, self.worker, self.launch_spec.gang, spec.rank))

    def with_room(self, action: Callable[[], T]) -> T:
        """Write into the worker's folder; if the disk is full, send heartbeats and try again.

        Raises:
            DiskFull: there was no room in time.
            Stopped: the client stopped the ranks meanwhile.
        """
        folder, first = Path(self.worker.local_directory), self.launch_spec.specs[0].rank

        def warn(sentence: str) -> None:
            self.sender.say(first, Notice(sentence))

        return retry.retry_while_full(
            action, lambda: retry.describe_full_folder(folder), self.launch_spec.retry_s, warn, self.wait
        )

    def wait(self, seconds: float) -> None:
        """Wait before the processes are started.

        Raises:
            Stopped: the client stopped the ranks meanwhile.
        """
        for spec in self.launch_spec.specs:
            self.sender.say(spec.rank, Beat(phase="join", first=True))
        self.sender.flush(at_once=True)
        time.sleep(seconds)
        messages = self.box.take()
        if self.is_cancelled() or any("stop" in message for _, message in messages):
            raise Stopped
        for rank, message in messages:  # for later
            self.box.put(message, rank)
