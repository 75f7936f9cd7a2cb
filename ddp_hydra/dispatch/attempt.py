"""One start of a gang, as the client sees it: its ranks are submitted, watched, and ended without a trace.

Their records are read on a thread of its own. Fetching a checkpoint, or waiting for room on a full disk, may take a
minute. Meanwhile the client must still notice that a rank dies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client, Future
from msgspec import structs

from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.cluster.scheduler_plugin import SUSPENDED_S
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.console.text import MESSAGE_CHARS, printable, ranges, shorten
from ddp_hydra.dispatch import placement
from ddp_hydra.dispatch.health import HealthMonitor, RankStates, waits
from ddp_hydra.dispatch.workers import CALL_S, WorkerClient, WorkerSilent
from ddp_hydra.errors import ClusterError, ConfigError, Failure, RankFailed, RecordError, SchedulerLost
from ddp_hydra.heartbeat import SAVE_S
from ddp_hydra.rank import rank_process, record_relay, task
from ddp_hydra.rank.spec import JobSpec, RankSpec
from ddp_hydra.record import Beat, End, Notice, Preempted, Record, Stack, Up
from ddp_hydra.storage import retry

log = logging.getLogger(__name__)
SETTLE_S = 0.4
"""Seconds to wait for the cause of a failure that is only a symptom."""
END_S = 5.0
"""Seconds that stopped ranks may take to end."""
REST_S = 30.0
"""Seconds to read the last records of a failed attempt: there may be a checkpoint among them."""
PLANNED = "its worker {worker} was shut down as planned (dask worker --lifetime, SIGTERM, a smaller cluster)"
ACKNOWLEDGE_BYTES = record_relay.WINDOW_BYTES // 4
CHECK_S = 0.5
"""Seconds between two checks of what no record tells: tasks that failed, silent hosts, hangs, Ctrl-C."""
PENDING_S = 2.0
"""Seconds between two looks for the workers of ranks that have not started."""
LOOP_START_S = 0.5
"""Seconds after Ctrl-C in which the ranks may report that their loop has just begun."""
CLOSE_S = 5.0
"""Seconds that the end waits for the record that is being read."""
LEFT = "its worker {worker} left the cluster (killed, out of memory, or its host is gone)"


class RecordQueue:
    """Has records read in order, once it is started; stops at the first that cannot be read.

    Attributes:
        error: that `on_record` raised for the record `failed`.
        busy: the record that is being read, and since when.
    """

    def __init__(
        self,
        on_record: Callable[[Record], None],
        acknowledge: Callable[[int, int], None],
        on_error: Callable[[], None],
    ) -> None:
        self.on_record, self.acknowledge, self.on_error = on_record, acknowledge, on_error
        self.error: BaseException | None = None
        self.failed: Record | None = None
        self.busy: tuple[Record, float] | None = None
        self.waiting: queue.SimpleQueue[tuple[Record, int] | None] = queue.SimpleQueue()
        self.put_count = self.read_count = 0
        self.resume = threading.Event()
        self.closed = False
        self.thread = threading.Thread(target=self._read, name="ddp_hydra-record-queue", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def put(self, record: Record, size: int) -> None:
        self.put_count += 1
        self.waiting.put((record, size))

    def catch_up(self, until: float = math.inf) -> bool:
        """Wait until all queued records are read; return False if they are not, also if one could not be read."""
        while self.read_count < self.put_count and self.error is None and time.monotonic() < until:
            time.sleep(0.002)
        return self.read_count == self.put_count

    def skip_failed(self) -> None:
        log.warning("lost with its host: %s", self.error)
        self.error = self.failed = None
        self.resume.set()

    def close(self) -> None:
        """Read no more records; the one that is being read may still go on."""
        self.closed = True
        self.waiting.put(None)
        self.resume.set()
        self.thread.join(CLOSE_S)

    def _read(self) -> None:
        while (item := self.waiting.get()) is not None and not self.closed:
            record, size = item
            self.busy = record, time.monotonic()
            try:
                self.on_record(record)
                self.acknowledge(record.rank, size)
            except BaseException as error:
                self.resume.clear()
                self.error, self.failed = error, record
                self.on_error()
                if not self.closed:
                    self.resume.wait()
            self.busy = None
            self.read_count += 1


class Attempt:
    """One start of a gang, as the client sees it.

    Args:
        job: what the workers are sent, without the call.
        read: called with this attempt and each record that is not for it, on another thread.
        stop: asks a gang that runs in the background to end.
        on_give_up: called when the user ends the job at once.
        waiting: the tasks of the attempt before that wait for this one, by their workers' addresses.
    """

    def __init__(
        self,
        client: Client,
        job: JobSpec,
        interrupts: Interrupts,
        read: Callable[[Attempt, Record], None],
        stop: threading.Event,
        on_give_up: Callable[[], None],
        waiting: Mapping[str, Future],
    ) -> None:
        self.client, self.job, self.settings, self.specs = client, job, job.settings, list(job.ranks)
        self.interrupts, self.workers = interrupts, WorkerClient(client, job)
        timeouts = (getattr(job.settings, f"{name}_timeout_s") for name in ("hang", "first_step", "start"))
        self.health = HealthMonitor(*timeouts)
        self.rank_states = RankStates(self.specs, job.attempt, self.health)
        self.silent: set[str] = set()
        self.stacks: dict[int, str] = {}
        self.begun_at = self.asked_at = time.monotonic()
        self.interrupted_at: float | None = None
        self.finish_by: float | None = None
        self.number, self.name, self.stop_event, self.on_give_up = job.attempt, job.topic, stop, on_give_up
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.futures, self.waiting = self.workers.futures, dict(waiting)
        self.values: dict[int, Any] = {}
        self.leaving = set[str]()
        self.retiring: RankSpec | None = None
        self.is_stopping = False
        self.checked_at = 0.0
        self.slow_record: Record | None = None
        self.unacknowledged = dict.fromkeys(range(len(self.specs)), 0)
        self.records = RecordQueue(lambda record: read(self, record), self.acknowledge, lambda: self.events.put(None))

    def run(self, call: bytes, is_script: bool = False) -> list[Any]:
        """Run a pickled call on each rank, and read all records; return the ranks' values, in order of rank."""
        job = self.job = structs.replace(self.job, call=call, is_script=is_script)
        self.records.start()
        try:
            with self.submitted(job):
                try:
                    self.watch()
                    if self.retiring is not None and self.settings.max_restarts and not self.interrupts.wanted:
                        self.rank_states.fail(self.retiring, "lost", PLANNED.format(worker=self.retiring.worker))
                        raise self.rank_states.error()
                except RankFailed as failed:
                    self.read_rest(failed)
                    raise
                while not self.records.catch_up(until=time.monotonic() + CHECK_S):
                    self.check_reading()
            return [self.values[spec.rank] for spec in self.specs]
        except KeyboardInterrupt:
            self.on_give_up()
            raise
        finally:
            self.records.close()

    @contextlib.contextmanager
    def submitted(self, job: JobSpec) -> Iterator[None]:
        """Submit one task for each worker, where none waits for this attempt; leave no rank behind."""
        with contextlib.ExitStack() as stack:
            self.client.subscribe_topic(self.name, self.events.put)
            stack.callback(lambda: self.client.status == "running" and self.client.unsubscribe_topic(self.name))
            stack.callback(self.end_all)
            workers = placement.by_worker(self.specs)
            if self.waiting:
                self.launch_again(workers, job)
            for worker, specs in workers.items():
                if worker not in self.futures:
                    self.futures[worker] = self.submit(worker, structs.replace(job, ranks=tuple(specs)))
            yield

    def launch_again(self, workers: Mapping[str, Sequence[RankSpec]], job: JobSpec) -> None:
        """Have the tasks that wait for this attempt start its ranks; end those that have none."""
        again = tuple(spec for worker, specs in workers.items() if worker in self.waiting for spec in specs)
        reached = self.workers.launch({spec.worker for spec in again}, structs.replace(job, ranks=again))
        self.futures.update({worker: self.waiting.pop(worker) for worker in reached})
        self.release(self.waiting.values())
        self.waiting.clear()

    def submit(self, worker: str, job: JobSpec) -> Future:
        return self.client.submit(
            pickle.loads,
            pickle.dumps(task.PickledCall(task.run_ranks, (job.encode(),))),
            key=f"{self.name}-rank-{ranges(spec.rank for spec in job.ranks)}",
            workers=[worker],
            allow_other_workers=False,  # Dask would move the task from a busy worker to one of another job
            pure=False,
            retries=0,
        )

    def end_all(self) -> None:
        """Stop the ranks that still run, and wait for their end; release the tasks that wait for no other attempt."""
        try:
            if not self.rank_states.is_over and self.workers.is_reachable:
                self.stop()
                self.drain(until=time.monotonic() + END_S + self.job.stop_s)
        finally:  # also after a second Ctrl-C, or a malformed record
            self.waiting = {
                worker: future
                for worker, future in self.futures.items()
                if self.settings.max_restarts and worker not in self.workers.lost and future.status == "pending"
                if any(spec.worker == worker and spec.rank not in self.values for spec in self.specs)
            }
            self.release([future for worker, future in self.futures.items() if worker not in self.waiting])
            self.futures.clear()

    def release(self, futures: Collection[Future]) -> None:
        if futures and self.client.status == "running":
            self.client.cancel(list(futures), force=True)

    def was_planned(self, failure: Failure) -> bool:
        """Return whether a worker failed that had said before that it would be shut down."""
        return failure.kind == "lost" and self.specs[failure.rank].worker in self.leaving

    # -- watching ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Handle events until all ranks have ended, or one has failed."""
        while not self.rank_states.is_over:
            self.handle_next(CHECK_S)
            if time.monotonic() - self.checked_at > CHECK_S:
                self.interrupts.wanted |= self.stop_event.is_set()
                self.health.look(time.monotonic())
                self.check_records()
                self.check_interrupt()
                self.check_tasks()
                if self.events.empty():  # events that still wait may change the picture
                    self.check_silence()
                    self.check_hang()
                self.checked_at = time.monotonic()
            if self.rank_states.failures:
                self.settle()
                raise self.rank_states.error()

    def settle(self) -> None:
        """Stop the other ranks, and wait for their reports: the first failure to arrive need not be the cause."""
        begin = time.monotonic()
        self.drain(until=begin + SETTLE_S, enough=lambda: self.rank_states.cause_is_known)
        # A dead host reports nothing, and ranks that communicated with it report first.
        self.drain(
            begin + self.settings.lost_timeout_s + 1,
            enough=lambda: self.rank_states.cause_is_known or not self.overdue(),
        )
        self.stop(finish_checkpoint=all(failure.kind != "hung" for failure in self.rank_states.failures))
        end = time.monotonic() + END_S + self.job.stop_s
        self.drain(until=end, enough=lambda: bool(self.health.saving(self.rank_states.running)))
        if saving := self.health.saving(self.rank_states.running):
            log.warning("rank %s is writing a checkpoint: it gets up to %g s more for it", ranges(saving), SAVE_S)
            end += SAVE_S
        self.drain(until=end)

    def stop(self, finish_checkpoint: bool = False) -> None:
        self.is_stopping = True
        self.workers.send({"stop": True, "finish_checkpoint": finish_checkpoint}, self.rank_states.running)

    def drain(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        while not self.rank_states.is_over and not enough() and time.monotonic() < until:
            self.handle_next(0.05)
        for _ in range(self.events.qsize()):  # what has come while this process stood still
            if self.rank_states.is_over or enough():
                break
            self.handle_next(0.0)

    def read_rest(self, failed: RankFailed) -> None:
        """Read the last records of a failed attempt; records of a lost host are lost."""
        until = time.monotonic() + REST_S
        try:
            while not self.records.catch_up(time.monotonic() + CHECK_S) and time.monotonic() < until:
                self.check_reading()
        except Exception as error:
            failed.add_reason(f"and what came before could not be read: {error}")

    def check_reading(self) -> None:
        """Raise the error of a record; after the ranks' end, the first Ctrl-C ends the wait for a full disk."""
        self.check_records()
        if self.interrupts.wanted:
            self.on_give_up()

    def check_records(self) -> None:
        """Raise the error of a record that could not be read, unless it was about a file of a lost host."""
        records = self.records
        if records.error is None:
            self.check_reader()
            return
        failed = records.failed
        if failed is not None and failed.kind == "file":
            worker = self.specs[failed.rank].worker
            until = time.monotonic() + CALL_S
            while worker not in self.workers.lost and time.monotonic() < until:  # also when all ranks have ended
                self.handle_next(0.05)
            if isinstance(records.error.__cause__, WorkerSilent) and worker not in self.workers.lost:
                self.silent.add(worker)
                self.lose_worker(worker, f"its worker {worker} did not send a file: {records.error.__cause__}")
            if worker in self.workers.lost:
                records.skip_failed()
                return
        raise records.error

    def check_reader(self) -> None:
        """Excuse ranks that may be waiting for this process to read their records; warn if it takes long."""
        now = time.monotonic()
        record, since = self.records.busy or (None, now)
        if record is None or now - since < CHECK_S:
            return
        self.health.excuse(now)
        if now - since > self.settings.hang_timeout_s and record is not self.slow_record:
            self.slow_record = record
            log.warning(
                "this process has been busy with one record of rank %d (%s) for %.0f s, in on_record: ranks that have "
                "more to send wait for it",
                record.rank, record.kind, now - since,
            )  # fmt: skip

    # -- what no record tells ------------------------------------------------------------------------------

    def check_interrupt(self) -> None:
        """Ask the ranks to finish if the user wants to end.

        Raises:
            KeyboardInterrupt: the ranks are not in their loop, or did not finish in time.
        """
        if not self.interrupts.wanted:
            return
        if self.finish_by is None:
            self.interrupted_at = self.interrupted_at or time.monotonic()
            if not self.health.in_loop(self.rank_states.running):
                if time.monotonic() - self.interrupted_at < LOOP_START_S:
                    return
                raise KeyboardInterrupt
            self.finish_by = time.monotonic() + self.settings.grace_s
            self.health.is_ending = True
            self.workers.finish(self.rank_states.running, "interrupt")
        elif time.monotonic() > self.finish_by:
            raise KeyboardInterrupt

    def check_tasks(self) -> None:
        """Check for tasks that failed, were cancelled with the scheduler, or did not start in time."""
        running = [self.specs[rank] for rank in self.rank_states.running]
        futures = {spec.worker: self.workers.futures[spec.worker] for spec in running}
        # Dask's client cancels all its tasks when it loses the scheduler, or when somebody restarts the cluster.
        client = self.workers.client
        ended = ("closing", "closed")
        is_closed = client.status in ended
        if is_closed or any(future.status in ("cancelled", "lost") for future in futures.values()):
            # A client closes by itself when it has no scheduler any more, or when its own cluster closes.
            of_cluster = str(getattr(getattr(client, "cluster", None), "status", "")).rpartition(".")[2]
            if is_closed and client.scheduler_comm and of_cluster not in ended:
                self.workers.is_cut_off = True
                raise ClusterError(
                    "the client was closed, so its workers stop the ranks: close it after they have ended"
                )
            how = "is lost, or was restarted"
            if self.health.away_s > SUSPENDED_S:
                how = f"has given the workers to others: this program was suspended for {self.health.away_s:.0f} s"
            raise self.scheduler_lost(how)
        failed = {address: future for address, future in futures.items() if future.status == "error"}
        for spec in running:
            if spec.worker in failed:
                if isinstance(error := failed[spec.worker].exception(), ConfigError):  # another version of ddp_hydra
                    raise error
                reason = repr(error)[:MESSAGE_CHARS]
                message = f"its task ended before it did: {reason}; is ddp_hydra installed on worker {spec.worker}?"
                self.rank_states.fail(spec, "start", message)
        self.check_pending()
        late, limit_s = self.rank_states.late, self.settings.start_timeout_s
        if late and time.monotonic() - self.begun_at > limit_s:
            what = f"rank {ranges(late)} of {len(self.specs)} had not started after"
            message = f"{what} dispatch.start_timeout_s={limit_s:g}: the workers are busy with other tasks, or stuck"
            self.rank_states.fail(self.specs[late[0]], "start", message, ended=False)

    def check_pending(self) -> None:
        """Notice a worker that left before the scheduler could report it: its task would wait for ever."""
        now = time.monotonic()
        late = self.rank_states.late
        if not late or now - self.asked_at < PENDING_S:
            return
        self.asked_at = now
        known = workers_of(self.workers.client)
        for address in {self.specs[rank].worker for rank in late} - known.keys() - self.workers.lost:
            self.lose_worker(address, LEFT.format(worker=address))

    def scheduler_lost(self, how: str) -> SchedulerLost:
        self.workers.is_cut_off = True
        return SchedulerLost(f"the scheduler {self.workers.scheduler} {how}; its workers stop the ranks")

    def check_silence(self) -> None:
        """Give up workers that have been silent for too long.

        Raises:
            SchedulerLost: it is the scheduler that is silent.
        """
        limit_s = self.settings.lost_timeout_s
        silent = self.health.overdue(self.rank_states.running, time.monotonic(), limit_s)
        if silent and not self.workers.scheduler_answers():
            raise self.scheduler_lost(f"was not heard for {limit_s:g} s")
        for rank in silent:
            address = self.specs[rank].worker
            self.silent.add(address)
            what = f"nothing was heard from its worker {address} for dispatch.lost_timeout_s={limit_s:g}"
            self.lose_worker(address, f"{what}: its host is down, or cut off")

    def lose_worker(self, address: str, how: str) -> None:
        self.workers.lost.add(address)
        for spec in self.specs:
            if spec.worker == address and spec.rank not in self.rank_states.ended:
                self.rank_states.fail(spec, "lost", how)

    def overdue(self) -> list[int]:
        self.check_silence()
        return self.health.overdue(self.rank_states.running, time.monotonic(), 2.5 * rank_process.BEAT_S)

    def check_hang(self) -> None:
        """Report a hang as a failure: have all ranks print their stacks, and name the rank that holds up the others."""
        states, health, now, time_s = self.rank_states, self.health, time.monotonic(), time.time()
        if (hang := health.hang(states.running, now)) is None:
            return
        before = dict(health.heartbeats), dict(health.arrived_s)
        running = states.running
        self.workers.send({"stacks": True}, running)
        until = now + 2 * rank_process.STACK_S + CALL_S
        while not states.is_over and not self.stacks.keys() >= set(states.running) and time.monotonic() < until:
            self.handle_next(0.05)
        health.heartbeats, health.arrived_s = before  # a suspended rank was woken to print its stack, and has moved on
        waiting = [rank for rank in running if waits(self.stacks.get(rank, ""))]
        hang = self.health.hang(running, now, waiting) or hang
        stack = self.stacks.get(hang.rank, "")
        found = states.failure("hung", self.specs[hang.rank], hang.message, time_s=time_s, traceback=stack)
        states.failures.insert(0, found)

    # -- events --------------------------------------------------------------------------------------------

    def handle_next(self, timeout_s: float) -> None:
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return
        if event is None:  # a record could not be read: check at once
            self.checked_at = 0.0
            return
        _, message = event
        if isinstance(message, bytes):
            for line in message.split(b"\n"):
                self.on_record(Record.decode(line), len(line))
        elif isinstance(message, dict) and message.get("action") in ("remove-worker", "retire-worker"):
            address = message["worker"]
            if message.get("planned"):
                self.leaving.add(address)
            if message["action"] == "remove-worker" or not self.save_before_end(address):
                left = PLANNED if address in self.leaving else LEFT
                self.lose_worker(address, left.format(worker=address))

    def save_before_end(self, worker: str) -> bool:
        """Have the ranks save before a worker is retired, to go on in another attempt; return whether they can."""
        leaving = [spec for spec in self.specs if spec.worker == worker and spec.rank in self.rank_states.running]
        if leaving and self.health.in_loop(self.rank_states.running):
            self.retiring = leaving[0]
            self.workers.send({"preempted": True}, [self.retiring.rank])
        return self.retiring is not None

    def on_record(self, record: Record, size: int) -> None:
        """Act on a record of a worker's task; queue all other records for their reader."""
        if not 0 <= record.rank < len(self.specs):
            raise RecordError(f"a record claims to come from rank {record.rank} of {len(self.specs)}")
        self.rank_states.started.add(record.rank)
        self.health.note_message(record.rank, time.monotonic())
        match record.data:
            case Up(rendezvous):
                if rendezvous is not None:
                    self.workers.send({"rendezvous": rendezvous}, range(1, len(self.specs)))
            case Beat() as beat:
                self.health.note_heartbeat(record.rank, beat, time.monotonic())
            case Stack(text):
                self.stacks[record.rank] = printable(text)
            case Preempted():
                self.leaving.add(self.specs[record.rank].worker)
                self.workers.finish(self.rank_states.running, "preemption")
                self.health.is_ending = True
            case End() as end:
                self.on_end(record.rank, end)
            case data:
                if isinstance(data, Notice):
                    log.warning("rank %d: %s", record.rank, printable(shorten(data.text, MESSAGE_CHARS)))
                self.records.put(record, size)  # to be acknowledged in its turn

    def acknowledge(self, rank: int, size: int) -> None:
        """Tell a rank, now and then, how much the client has read; called on the reader's thread."""
        self.unacknowledged[rank] += size
        if self.unacknowledged[rank] > ACKNOWLEDGE_BYTES:
            self.workers.acknowledge(rank, self.unacknowledged[rank])
            self.unacknowledged[rank] = 0

    def on_end(self, rank: int, end: End) -> None:
        if self.rank_states.end(rank, end, was_stopped=self.is_stopping):
            if end.value is not None:
                try:
                    self.values[rank] = self.workers.returned(rank, end.value)
                except OSError as error:
                    self.lose(self.specs[rank], "could not send what it returned", error)
            self.health.note_heartbeat(rank, Beat(end.step, end.phase), time.monotonic())

    def send_files(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Send files of the client to rank 0's host, and folders to all workers; return the paths on rank 0's host."""
        first = self.specs[0]
        folders = {name: path for name, path in files.items() if path.is_dir()}
        for spec in {spec.worker: spec for spec in reversed(self.specs)}.values() if folders else ():
            if spec.host != first.host:  # a rank looks in its own worker's folder
                self._send_files(spec, folders)
        return self._send_files(first, files)

    def _send_files(self, spec: RankSpec, files: Mapping[str, Path]) -> dict[str, str]:
        try:
            return retry.retry_while_full(
                lambda: self.workers.send_files(spec.rank, files),
                lambda: f"the temporary folder {self.workers.folders[spec.worker]} of worker {spec.worker} is full",
                self.settings.retry_s,
                log.warning,
            )
        except OSError as error:
            self.lose(spec, "could not be given its files", error)
            raise self.rank_states.error() from None

    def lose(self, spec: RankSpec, what: str, error: OSError) -> None:
        """Note that a worker does not answer; raise the error if it is one of a file, here or there."""
        if error.errno is not None:
            raise error
        self.silent.add(spec.worker)
        self.rank_states.fail(spec, "lost", f"its worker {spec.worker} {what}: {error}")
