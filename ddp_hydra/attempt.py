"""One start of a gang, seen from the client: submitted, watched, and ended without a trace."""

from __future__ import annotations

import base64
import contextlib
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Future

from ddp_hydra import pulse, transfer, values
from ddp_hydra.errors import ClusterError, JobFailed, RankFailed, RecordError
from ddp_hydra.outcome import Failure, explain, root_cause
from ddp_hydra.placement import RankSpec, ranges
from ddp_hydra.rank_host import mailbox, relay, spool
from ddp_hydra.reader import Reader
from ddp_hydra.results import Record
from ddp_hydra.vitals import Hang, Vitals, waits

if TYPE_CHECKING:
    from ddp_hydra.dispatch import Gang

CHECK_S = 0.2
"""How often is looked for what no record tells."""
SETTLE_S = 0.4
"""How long a mere symptom waits for its cause to be heard."""
END_S = 5.0
"""How long ranks that were told to end are waited for."""
REST_S = 30.0
"""How long the last records of a failed attempt may take: a checkpoint among them is worth it."""
CALL_S = 2.0
"""How long a worker may take to answer a call."""
ACKNOWLEDGE_BYTES = relay.WINDOW_BYTES // 4


class Attempt:
    """One start of a gang, seen from the client.

    Args:
        gang: what is started.
        number: which start it is.
        name: of this start; also the topic of its records.
        specs: the ranks' places.
    """

    def __init__(self, gang: Gang, number: int, name: str, specs: list[RankSpec]) -> None:
        self.gang, self.number, self.name, self.specs = gang, number, name, specs
        self.client = gang.client
        scheduler = self.client.scheduler_info(n_workers=-1)
        self.scheduler, workers = scheduler["address"], scheduler["workers"]
        self.folders = {spec.worker: workers.get(spec.worker, {}).get("local_directory", "") for spec in specs}
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.futures: list[Future] = []
        self.values: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self.ended: set[int] = set()
        self.lost: set[str] = set()
        self.silent: set[str] = set()
        self.started: set[int] = set()
        self.stacks: dict[int, str] = {}
        self.finish_by: float | None = None
        self.is_cut_off = self.is_stopping = False
        self.begun = time.monotonic()
        self.checked = 0.0
        self.vitals = Vitals(gang.lost_timeout_s, gang.hang_timeout_s, gang.first_step_timeout_s, gang.start_timeout_s)
        self.unacknowledged = dict.fromkeys(range(len(specs)), 0)

    def run(self, call: bytes) -> list[Any]:
        """Run a pickled call on each rank, and hear all that the ranks say.

        Returns:
            What the ranks returned, in order of rank.

        Raises:
            RankFailed: at least one did not end well.
        """
        self.reader = Reader(partial(self.gang.read, self), self.acknowledge, lambda: self.events.put(None))
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
            self.gang.on_give_up()
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
                    relay.run_rank,
                    self.gang.order(self.number, self.name, spec, call),
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
            if self.client.status == "running" and self.running and not self.is_cut_off:
                self.stop()
                self.drain(until=time.monotonic() + END_S)
        finally:  # also at a second Ctrl-C, and whatever a rank has still to say
            if self.client.status == "running":
                self.client.cancel(self.futures, force=True)
            self.futures.clear()

    def clean_up(self) -> None:
        """Empty the spools."""
        if self.client.status == "running" and not self.is_cut_off:
            self.call(spool.clear, self.name)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [spec.rank for spec in self.specs if spec.rank not in self.ended]

    # -- watching ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Handle what the ranks say until all have ended.

        Raises:
            RankFailed: at least one did not end well.
        """
        while self.running:
            self.handle_next(timeout_s=CHECK_S)
            if time.monotonic() - self.checked > CHECK_S:
                self.check()
                self.checked = time.monotonic()
            if self.failures:
                self.settle()
                raise self.error()

    def settle(self) -> None:
        """Stop the others, and hear all of them out: the first failure to be heard need not be the cause."""
        begin = time.monotonic()
        self.drain(until=begin + SETTLE_S, enough=self.cause_is_known)
        # A host that is gone says nothing, and those who talked to it are heard first.
        self.drain(begin + self.gang.lost_timeout_s + 1, enough=lambda: self.cause_is_known() or not self.suspects())
        self.stop()
        self.drain(until=time.monotonic() + END_S)

    def cause_is_known(self) -> bool:
        """Whether some failure is more than an echo."""
        return not all(failure.is_symptom for failure in self.failures)

    def suspects(self) -> list[int]:
        """Ranks that have missed a beat or two."""
        self.check_silence()
        return self.vitals.overdue(self.running, time.monotonic(), 2.5 * relay.BEAT_S)

    def error(self) -> JobFailed:
        """The one error that names the first cause."""
        cause, symptoms = root_cause(self.failures)
        return RankFailed(explain(cause, symptoms), cause, symptoms)

    def drain(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Handle events until all ranks have ended, or `enough`, or the time of `until` has come."""
        while self.running and not enough() and time.monotonic() < until:
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
        if self.gang.interrupts.wanted:
            self.gang.on_give_up()

    # -- what no record tells ------------------------------------------------------------------------------

    def check(self) -> None:
        """Look for a task that failed or never began, silence, hangs, a failed reader, and a user's Ctrl-C.

        Raises:
            ClusterError: the scheduler is gone.
            KeyboardInterrupt: the user wants to end, and nothing can be saved (any more).
        """
        self.vitals.look(time.monotonic())
        self.check_reader()
        self.check_interrupt()
        self.check_tasks()
        if self.events.empty():  # what is still to be heard may change the picture
            self.check_silence()
            self.check_progress()

    def check_reader(self) -> None:
        """Raise what the reader of the records has raised, unless it was about a file of a lost host."""
        if self.reader.error is None:
            return
        failed = self.reader.failed
        if failed is not None and failed.kind == "file":
            worker = self.specs[failed.rank].worker
            until = time.monotonic() + CALL_S
            while worker not in self.lost and time.monotonic() < until:  # also when all ranks have ended
                self.handle_next(timeout_s=0.05)
            if worker in self.lost:
                self.reader.forgive()
                return
        raise self.reader.error

    def check_interrupt(self) -> None:
        """Have the ranks finish where the user wants to end."""
        if not self.gang.interrupts.wanted:
            return
        if self.finish_by is None:
            if not self.vitals.in_loop(self.running):
                raise KeyboardInterrupt
            self.finish_by = time.monotonic() + self.gang.grace_s
            self.finish("interrupt")
        elif time.monotonic() > self.finish_by:
            raise KeyboardInterrupt

    def check_tasks(self) -> None:
        """Look at the tasks: failed, not begun in time, or cancelled with the scheduler.

        Raises:
            ClusterError: the scheduler is gone.
        """
        running = [(self.specs[rank], self.futures[rank]) for rank in self.running]
        # Dask's client cancels all its tasks when it loses the scheduler, or when somebody restarts the cluster.
        if self.client.status == "closed" or any(future.status in ("cancelled", "lost") for _, future in running):
            raise self.scheduler_lost("is lost, or was restarted")
        for spec, future in running:
            if future.status == "error":
                reason = future.exception()
                message = f"its task ended before it did: {reason!r}; is ddp_hydra installed on worker {spec.worker}?"
                self.failures.append(self.failure("start", spec, message))
                self.ended.add(spec.rank)
        late = [spec.rank for spec in self.specs if spec.rank not in self.started]
        if late and time.monotonic() - self.begun > self.gang.start_timeout_s:
            message = (
                f"rank {ranges(late)} of {len(self.specs)} had not started after dispatch.start_timeout_s="
                f"{self.gang.start_timeout_s:g}: the workers are busy with other Dask tasks, or stuck"
            )
            self.failures.append(self.failure("start", self.specs[late[0]], message))

    def scheduler_lost(self, how: str) -> ClusterError:
        """What to say when there is no scheduler any more; nothing more is asked of it."""
        self.is_cut_off = True
        return ClusterError(
            f"the scheduler {self.scheduler} {how}; its workers stop the ranks. Go on with resume=<run dir> once it "
            "is back"
        )

    def check_silence(self) -> None:
        """Give up workers from which nothing is heard any more.

        Raises:
            ClusterError: it is the scheduler that is silent.
        """
        silent = self.vitals.silent(self.running, time.monotonic())
        if silent and not self.scheduler_answers():
            raise self.scheduler_lost(f"was not heard for {self.gang.lost_timeout_s:g} s")
        for rank in silent:
            address = self.specs[rank].worker
            self.silent.add(address)
            self.on_worker_lost(
                address,
                f"nothing was heard from its worker {address} for dispatch.lost_timeout_s="
                f"{self.gang.lost_timeout_s:g}: its host is down, or cut off",
            )

    def scheduler_answers(self) -> bool:
        """Ask the scheduler for a sign of life."""
        assert self.client.scheduler is not None
        try:
            self.client.sync(self.client.scheduler.identity, n_workers=0, callback_timeout=CALL_S)
        except (OSError, TimeoutError):
            return False
        return True

    def check_progress(self) -> None:
        """Treat a gang that makes no progress as failed."""
        hang = self.vitals.hang(self.running, time.monotonic())
        if hang is not None:
            self.on_hang(hang)

    def on_hang(self, hang: Hang) -> None:
        """Have all ranks write their stacks into their logs, and name the one that holds up the others."""
        running, now, time_s, beats = self.running, time.monotonic(), time.time(), dict(self.vitals.beats)
        self.tell({rank: {"stacks": True} for rank in running})
        until = now + 2 * relay.STACK_S + CALL_S
        self.drain(until, enough=lambda: self.stacks.keys() >= set(self.running))
        self.vitals.beats = beats  # a suspended rank had to be woken for its stack, and went on
        waiting = [rank for rank in running if waits(self.stacks.get(rank, ""))]
        hang = self.vitals.hang(running, now, waiting) or hang
        found = self.failure("hung", self.specs[hang.rank], hang.message, traceback=self.stacks.get(hang.rank, ""))
        self.failures.insert(0, replace(found, time_s=time_s))

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
        self.started.add(record.rank)
        self.vitals.hear(record.rank, time.monotonic())
        if record.kind == "up":
            if "rendezvous" in record.data:
                self.tell(dict.fromkeys(range(1, len(self.specs)), record.data))
        elif record.kind == "beat":
            self.vitals.beat(record.rank, record.data, time.monotonic())
        elif record.kind == "stack":
            self.stacks[record.rank] = str(record.data.get("text", ""))
        elif record.kind == "preempted":
            self.finish("preemption")
        elif record.kind == "end":
            self.on_end(record)
        else:
            self.reader.put(record, size)

    def acknowledge(self, rank: int, size: int) -> None:
        """Let a rank know that the client keeps up; called on the reader's thread."""
        self.unacknowledged[rank] += size
        if self.unacknowledged[rank] > ACKNOWLEDGE_BYTES:
            self.tell({rank: {"acknowledged": self.unacknowledged[rank]}})
            self.unacknowledged[rank] = 0

    def on_end(self, record: Record) -> None:
        """Note how a rank ended."""
        if record.rank in self.ended:
            return
        spec = self.specs[record.rank]
        failure = Failure.from_end(record.data, spec.rank, spec.host, self.number)
        if record.data.get("status") == "stopped" and not self.is_stopping:
            failure = self.failure("lost", spec, f"it was stopped by its worker {spec.worker}, which is shut down")
        if failure is not None:
            self.failures.append(failure)
        elif record.data["status"] == "ok":
            self.values[spec.rank] = self.value_of(record)
        self.vitals.beat(record.rank, {**record.data, "phase": record.data.get("phase", "end")}, time.monotonic())
        self.ended.add(record.rank)

    def value_of(self, record: Record) -> Any:
        """Decode what a rank returned.

        Raises:
            RecordError: it is malformed.
        """
        try:
            if "value" in record.data:
                return values.decode(base64.b64decode(record.data["value"]))
            with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
                path, file = Path(folder) / "value", record.data["value_file"]
                self.fetch(record, path, file)
                transfer.verify(path, file["size"], file["sha256"])
                return values.decode(path.read_bytes())
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"what rank {record.rank} returned cannot be read ({error!r:.200})") from None

    def on_worker_lost(self, address: str, how: str) -> None:
        """A worker is gone, and with it the rank that it hosted."""
        self.lost.add(address)
        for spec in self.specs:
            if spec.worker == address and spec.rank not in self.ended:
                self.failures.append(self.failure("lost", spec, how))
                self.ended.add(spec.rank)

    def failure(self, kind: str, spec: RankSpec, message: str, **more: Any) -> Failure:
        """A failure that the rank itself cannot tell, with where it was last seen."""
        beat = self.vitals.beats.get(spec.rank)
        where: dict[str, Any] = {"step": beat.place.step, "phase": beat.place.phase} if beat else {}
        return Failure(kind, spec.rank, spec.host, message, time_s=time.time(), attempt=self.number, **where, **more)

    # -- talking to the workers ----------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """Have all ranks make a checkpoint at their next step, and end."""
        self.tell({rank: {"finish": pulse.REASONS.index(reason)} for rank in self.running})

    def stop(self) -> None:
        """Tell all ranks that still run to end."""
        self.is_stopping = True
        self.tell({spec.rank: {"stop": True} for spec in self.specs if spec.rank not in self.ended})

    def tell(self, letters: Mapping[int, mailbox.Message]) -> None:
        """Leave messages for ranks, on all their workers at once."""
        by_worker = {self.specs[rank].worker: (rank, dict(message)) for rank, message in letters.items()}
        self.call(mailbox.deliver, self.name, by_worker, workers=list(by_worker))

    def call(self, function: Callable[..., Any], *args: Any, workers: list[str] | None = None) -> None:
        """Run a short function on workers. One that is gone is not waited for: Dask would try for half a minute."""
        asked = [spec.worker for spec in self.specs] if workers is None else workers
        reachable = [address for address in asked if address not in self.lost]
        if reachable:
            run = {"workers": reachable, "on_error": "ignore", "callback_timeout": CALL_S}
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                self.client.sync(self.client._run, function, *args, **run)

    def fetch(self, record: Record, target: Path, file: Mapping[str, Any] | None = None) -> None:
        """Bring a spooled file home; that it is gone there lets the rank know."""
        spec = self.specs[record.rank]
        folder = self.folders[spec.worker]
        if spec.worker in self.lost and not spool.path(folder, self.name, spec.rank).is_dir():
            raise OSError(f"its worker {spec.worker} is lost")
        is_lost = lambda: spec.worker in self.lost  # noqa: E731
        transfer.fetch(self.client, spec.worker, folder, self.name, spec.rank, file or record.data, target, is_lost)

    def send(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Make files of the client readable for rank 0; returns their paths there.

        Raises:
            RankFailed: its worker is gone.
        """
        first = self.specs[0]
        try:
            return {
                name: transfer.send(self.client, first.worker, self.name, first.rank, path)
                for name, path in files.items()
            }
        except OSError as error:
            if error.errno is not None:  # of a file, here or there
                raise
            self.silent.add(first.worker)
            failure = self.failure("lost", first, f"its worker {first.worker} could not be given its files: {error}")
            raise RankFailed(explain(failure), failure) from None
