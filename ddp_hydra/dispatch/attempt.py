"""One start of a gang, seen from the client: submitted, watched, and ended without a trace."""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed import Future

from ddp_hydra.cluster.scheduler_plugin import SUSPENDED_S
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.console.text import MESSAGE_CHARS, plain, shorten
from ddp_hydra.dispatch.health import Hang, HealthMonitor, waits
from ddp_hydra.dispatch.placement import ranges
from ddp_hydra.dispatch.rank_states import RankStates
from ddp_hydra.dispatch.record_queue import Reader
from ddp_hydra.dispatch.settings import Settings
from ddp_hydra.dispatch.workers import CALL_S, WorkerClient
from ddp_hydra.errors import RankFailed, RecordError, SchedulerLost
from ddp_hydra.heartbeat import SAVE_S
from ddp_hydra.rank import task
from ddp_hydra.rank.failure import explain
from ddp_hydra.rank.launch_spec import LaunchSpec
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.results import Record
from ddp_hydra.storage import wait_for_space

log = logging.getLogger(__name__)
CHECK_S = 0.5
"""How often is looked for what no record tells."""
SETTLE_S = 0.4
"""How long a mere symptom waits for its cause to be heard."""
NEWS_S = 0.5
"""How long after Ctrl-C the ranks' loop is waited for that may have begun just now."""
END_S = 5.0
"""How long ranks that were told to end are waited for."""
REST_S = 30.0
"""How long the last records of a failed attempt may take: a checkpoint among them is worth it."""
ACKNOWLEDGE_BYTES = task.WINDOW_BYTES // 4


class Attempt:
    """One start of a gang, seen from the client.

    Args:
        settings: of the gang.
        number: which start it is.
        name: of this start; also the topic of its records.
        specs: the ranks' places.
        interrupts: whether the user wants to end.
        read: called with this attempt and each record that is not for it, on a thread of its own.
        launch_spec: returns what a worker is told: of (number, name, the rank's place, the pickled call).
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        name: str,
        specs: list[RankSpec],
        interrupts: Interrupts,
        read: Callable[[Attempt, Record], None],
        launch_spec: Callable[[int, str, RankSpec, bytes], LaunchSpec],
    ) -> None:
        self.settings, self.number, self.name, self.specs = settings, number, name, specs
        self.interrupts, self.read, self.launch_spec = interrupts, read, launch_spec
        self.client = settings.client
        self.workers = WorkerClient(settings.client, name, specs)
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.futures: list[Future] = []
        self.values: dict[int, Any] = {}
        self.silent: set[str] = set()
        self.stacks: dict[int, str] = {}
        self.wanted_at: float | None = None
        self.finish_by: float | None = None
        self.is_stopping = False
        self.begun = time.monotonic()
        self.checked = 0.0
        self.slow_record: Record | None = None
        self.health = HealthMonitor(
            settings.lost_timeout_s, settings.hang_timeout_s, settings.first_step_timeout_s, settings.start_timeout_s
        )
        self.rank_states = RankStates(specs, number, self.health)
        self.unacknowledged = dict.fromkeys(range(len(specs)), 0)

    def run(self, call: bytes) -> list[Any]:
        """Run a pickled call on each rank, and hear all that the ranks say.

        Returns:
            What the ranks returned, in order of rank.

        Raises:
            RankFailed: at least one did not end well.
        """
        self.reader = Reader(lambda record: self.read(self, record), self.acknowledge, lambda: self.events.put(None))
        try:
            with self.submitted(call):
                try:
                    self.watch()
                except RankFailed as failed:
                    self.read_rest(failed)
                    raise
                while not self.reader.catch_up(until=time.monotonic() + CHECK_S):
                    self.check_reader()
                    self.hurry()
            return [self.values[spec.rank] for spec in self.specs]
        except KeyboardInterrupt:
            self.settings.on_give_up()
            raise
        finally:
            self.reader.close()

    @contextlib.contextmanager
    def submitted(self, call: bytes) -> Iterator[None]:
        """Submit one task per rank; at the end, however it comes, leave nothing of them behind."""
        with contextlib.ExitStack() as stack:
            self.client.subscribe_topic(self.name, self.events.put)
            stack.callback(self.unsubscribe)
            stack.callback(self.end_all)
            for spec in self.specs:
                future = self.client.submit(
                    pickle.loads,
                    pickle.dumps(task.PickledTask(self.launch_spec(self.number, self.name, spec, call))),
                    key=f"{self.name}-rank-{spec.rank}",
                    workers=[spec.worker],
                    # Pinned to a dead worker, a task waits for ever; anywhere else it says at once that it is lost.
                    allow_other_workers=True,
                    pure=False,
                    retries=0,
                )
                self.futures.append(future)
            yield

    def unsubscribe(self) -> None:
        """Stop listening."""
        if self.client.status == "running":
            self.client.unsubscribe_topic(self.name)

    def end_all(self) -> None:
        """Stop what still runs, wait for it, and let go of the tasks."""
        try:
            if not self.rank_states.is_over and self.workers.is_reachable:
                self.stop()
                self.drain(until=time.monotonic() + END_S)
        finally:  # also at a second Ctrl-C, and whatever a rank has still to say
            if self.client.status == "running":
                self.client.cancel(self.futures, force=True)
            self.futures.clear()

    def clean_up(self) -> None:
        """Empty the spools."""
        if self.workers.is_reachable:
            self.workers.clear()

    # -- watching ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Handle what the ranks say until all have ended.

        Raises:
            RankFailed: at least one did not end well.
        """
        while not self.rank_states.is_over:
            self.handle_next(timeout_s=CHECK_S)
            if time.monotonic() - self.checked > CHECK_S:
                self.check()
                self.checked = time.monotonic()
            if self.rank_states.failures:
                self.settle()
                raise self.rank_states.error()

    def settle(self) -> None:
        """Stop the others, and hear all of them out: the first failure to be heard need not be the cause."""
        begin = time.monotonic()
        self.drain(until=begin + SETTLE_S, enough=lambda: self.rank_states.cause_is_known)
        # A host that is gone says nothing, and those who talked to it are heard first.
        self.drain(
            begin + self.settings.lost_timeout_s + 1,
            enough=lambda: self.rank_states.cause_is_known or not self.suspects(),
        )
        self.stop(finish_checkpoint=all(failure.kind != "hung" for failure in self.rank_states.failures))
        end = time.monotonic() + END_S
        self.drain(until=end, enough=lambda: bool(self.health.saving(self.rank_states.running)))
        if saving := self.health.saving(self.rank_states.running):
            log.warning("rank %s is writing a checkpoint: it gets up to %g s more for it", ranges(saving), SAVE_S)
            end += SAVE_S
        self.drain(until=end)

    def stop(self, finish_checkpoint: bool = False) -> None:
        """Tell all ranks that still run to end.

        Args:
            finish_checkpoint: those that are writing a checkpoint, when it is complete.
        """
        self.is_stopping = True
        self.workers.stop(self.rank_states.running, finish_checkpoint)

    def suspects(self) -> list[int]:
        """Ranks that have missed a beat or two."""
        self.check_silence()
        return self.health.overdue(self.rank_states.running, time.monotonic(), 2.5 * task.BEAT_S)

    def drain(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Handle events until all ranks have ended, or `enough`, or the time of `until` has come."""
        while not self.rank_states.is_over and not enough() and time.monotonic() < until:
            self.handle_next(timeout_s=0.05)

    def read_rest(self, failed: RankFailed) -> None:
        """Read what a failed attempt has said before; what is lost with a host is lost."""
        until = time.monotonic() + REST_S
        try:
            while not self.reader.catch_up(time.monotonic() + CHECK_S) and time.monotonic() < until:
                self.check_reader()
                self.hurry()
        except Exception as error:
            failed.add_reason(f"and what came before could not be read: {error}")

    def hurry(self) -> None:
        """Where the ranks have ended, a first Ctrl-C ends the waiting for a full disk."""
        if self.interrupts.wanted:
            self.settings.on_give_up()

    # -- what no record tells ------------------------------------------------------------------------------

    def check(self) -> None:
        """Look for a task that failed or never began, silence, hangs, a failed reader, and a user's Ctrl-C.

        Raises:
            SchedulerLost: it is gone.
            KeyboardInterrupt: the user wants to end, and nothing can be saved (any more).
        """
        self.health.look(time.monotonic())
        self.check_reader()
        self.check_interrupt()
        self.check_tasks()
        if self.events.empty():  # what is still to be heard may change the picture
            self.check_silence()
            self.check_progress()

    def check_reader(self) -> None:
        """Raise what the reader of the records has raised, unless it was about a file of a lost host."""
        if self.reader.error is None:
            self.watch_reader()
            return
        failed = self.reader.failed
        if failed is not None and failed.kind == "file":
            worker = self.specs[failed.rank].worker
            until = time.monotonic() + CALL_S
            while worker not in self.workers.lost and time.monotonic() < until:  # also when all ranks have ended
                self.handle_next(timeout_s=0.05)
            if worker in self.workers.lost:
                self.reader.forgive()
                return
        raise self.reader.error

    def watch_reader(self) -> None:
        """Count no standstill against ranks that may be waiting for the client to read on, and say so if it is long."""
        busy = self.reader.busy
        if busy is None or self.reader.busy_s < CHECK_S:
            return
        self.health.excuse(time.monotonic())
        record = busy[0]
        if self.reader.busy_s > self.settings.hang_timeout_s and record is not self.slow_record:
            self.slow_record = record
            log.warning(
                "this process has been busy with one record of rank %d (%s) for %.0f s, in on_record: ranks that have "
                "more to say wait for it",
                record.rank, record.kind, self.reader.busy_s,
            )  # fmt: skip

    def check_interrupt(self) -> None:
        """Have the ranks finish where the user wants to end."""
        if not self.interrupts.wanted:
            return
        if self.finish_by is None:
            self.wanted_at = self.wanted_at or time.monotonic()
            if not self.health.in_loop(self.rank_states.running):
                if time.monotonic() - self.wanted_at < NEWS_S:  # a rank may be there, and it is not known yet
                    return
                raise KeyboardInterrupt
            self.finish_by = time.monotonic() + self.settings.grace_s
            self.workers.finish(self.rank_states.running, "interrupt")
        elif time.monotonic() > self.finish_by:
            raise KeyboardInterrupt

    def check_tasks(self) -> None:
        """Look at the tasks: failed, not begun in time, or cancelled with the scheduler.

        Raises:
            SchedulerLost: it is gone.
        """
        running = [(self.specs[rank], self.futures[rank]) for rank in self.rank_states.running]
        # Dask's client cancels all its tasks when it loses the scheduler, or when somebody restarts the cluster.
        if self.client.status == "closed" or any(future.status in ("cancelled", "lost") for _, future in running):
            how = "is lost, or was restarted"
            if self.health.away_s > SUSPENDED_S:
                how = f"has given the workers to others: this program was suspended for {self.health.away_s:.0f} s"
            raise self.scheduler_lost(how)
        for spec, future in running:
            if future.status == "error":
                reason = repr(future.exception())[:MESSAGE_CHARS]
                message = f"its task ended before it did: {reason}; is ddp_hydra installed on worker {spec.worker}?"
                self.rank_states.fail(spec, "start", message)
        late = self.rank_states.late
        if late and time.monotonic() - self.begun > self.settings.start_timeout_s:
            message = (
                f"rank {ranges(late)} of {len(self.specs)} had not started after dispatch.start_timeout_s="
                f"{self.settings.start_timeout_s:g}: the workers are busy with other Dask tasks, or stuck"
            )
            self.rank_states.fail(self.specs[late[0]], "start", message, ended=False)

    def scheduler_lost(self, how: str) -> SchedulerLost:
        """What to say when there is no scheduler any more; nothing more is asked of it."""
        self.workers.is_cut_off = True
        return SchedulerLost(
            f"the scheduler {self.workers.scheduler} {how}; its workers stop the ranks. Go on with resume=<run dir> "
            "once it is back"
        )

    def check_silence(self) -> None:
        """Give up workers from which nothing is heard any more.

        Raises:
            SchedulerLost: it is the scheduler that is silent.
        """
        silent = self.health.silent(self.rank_states.running, time.monotonic())
        if silent and not self.workers.scheduler_answers():
            raise self.scheduler_lost(f"was not heard for {self.settings.lost_timeout_s:g} s")
        for rank in silent:
            address = self.specs[rank].worker
            self.silent.add(address)
            self.on_worker_lost(
                address,
                f"nothing was heard from its worker {address} for dispatch.lost_timeout_s="
                f"{self.settings.lost_timeout_s:g}: its host is down, or cut off",
            )

    def check_progress(self) -> None:
        """Treat a gang that makes no progress as failed."""
        hang = self.health.hang(self.rank_states.running, time.monotonic())
        if hang is not None:
            self.on_hang(hang)

    def on_hang(self, hang: Hang) -> None:
        """Have all ranks write their stacks into their logs, and name the one that holds up the others."""
        running, now, time_s, beats = self.rank_states.running, time.monotonic(), time.time(), dict(self.health.beats)
        self.workers.tell({rank: {"stacks": True} for rank in running})
        until = now + 2 * task.STACK_S + CALL_S
        self.drain(until, enough=lambda: self.stacks.keys() >= set(self.rank_states.running))
        self.health.beats = beats  # a suspended rank had to be woken for its stack, and went on
        waiting = [rank for rank in running if waits(self.stacks.get(rank, ""))]
        hang = self.health.hang(running, now, waiting) or hang
        stack = self.stacks.get(hang.rank, "")
        found = self.rank_states.failure("hung", self.specs[hang.rank], hang.message, time_s=time_s, traceback=stack)
        self.rank_states.failures.insert(0, found)

    # -- what records tell ---------------------------------------------------------------------------------

    def handle_next(self, timeout_s: float) -> bool:
        """Handle the next event; False where none came in time."""
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if event is None:  # somebody wants attention
            self.checked = 0.0
            return True
        _, message = event
        if isinstance(message, bytes):
            for line in message.split(b"\n"):
                self.on_record(Record.decode(line), len(line))
        elif isinstance(message, dict) and message.get("action") == "remove-worker":
            address = message["worker"]
            how = f"its worker {address} left the cluster (killed, out of memory, or its host is gone)"
            self.on_worker_lost(address, how)
        return True

    def on_record(self, record: Record, size: int) -> None:
        """Act on a record of the relay's; all others are for the reader."""
        if not 0 <= record.rank < len(self.specs):
            raise RecordError(f"a record claims to come from rank {record.rank} of {len(self.specs)}")
        self.rank_states.started.add(record.rank)
        self.health.hear(record.rank, time.monotonic())
        if record.kind == "up":
            if "rendezvous" in record.data:
                self.workers.tell(dict.fromkeys(range(1, len(self.specs)), record.data))
        elif record.kind == "beat":
            self.health.beat(record.rank, record.data, time.monotonic())
        elif record.kind == "stack":
            self.stacks[record.rank] = plain(str(record.data.get("text", "")))
        elif record.kind == "warning":
            text = plain(shorten(str(record.data.get("text", "")), MESSAGE_CHARS))
            log.warning("rank %d: %s", record.rank, text)
        elif record.kind == "preempted":
            self.workers.finish(self.rank_states.running, "preemption")
        elif record.kind == "end":
            self.on_end(record)
        else:
            self.reader.put(record, size)

    def acknowledge(self, rank: int, size: int) -> None:
        """Let a rank know that the client keeps up; called on the reader's thread."""
        self.unacknowledged[rank] += size
        if self.unacknowledged[rank] > ACKNOWLEDGE_BYTES:
            self.workers.tell({rank: {"acknowledged": self.unacknowledged[rank]}})
            self.unacknowledged[rank] = 0

    def on_end(self, record: Record) -> None:
        """Note how a rank ended."""
        if self.rank_states.end(record, was_stopped=self.is_stopping):
            if record.data.get("status") == "ok":
                self.values[record.rank] = self.workers.returned(record)
            self.health.beat(record.rank, {**record.data, "phase": record.data.get("phase", "end")}, time.monotonic())

    def on_worker_lost(self, address: str, how: str) -> None:
        """Give up a worker, and the rank that it hosted."""
        self.workers.lost.add(address)
        self.rank_states.lose(address, how)

    def send(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Make files of the client readable for rank 0; returns their paths there.

        Raises:
            RankFailed: its worker is gone.
        """
        first = self.specs[0]
        try:
            return wait_for_space.retry_while_full(
                lambda: self.workers.send(first.rank, files),
                lambda: f"the temporary folder {self.workers.folders[first.worker]} of worker {first.worker} is full",
                self.settings.retry_s,
                log.warning,
            )
        except OSError as error:
            if error.errno is not None:  # of a file, here or there
                raise
            self.silent.add(first.worker)
            failure = self.rank_states.failure(
                "lost", first, f"its worker {first.worker} could not be given its files: {error}"
            )
            raise RankFailed(explain(failure), failure) from None
