"""One start of a gang, seen from the client: submitted, watched, and ended without a trace."""

from __future__ import annotations

import base64
import contextlib
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Future

from ddp_hydra import transfer, values
from ddp_hydra.errors import ClusterError, JobFailed, RankFailed, RecordError
from ddp_hydra.outcome import Failure, explain, root_cause
from ddp_hydra.placement import RankSpec, ranges
from ddp_hydra.rank_host import mailbox, relay, spool
from ddp_hydra.results import Record

if TYPE_CHECKING:
    from ddp_hydra.dispatch import Gang

SETTLE_S = 0.4
"""How long a mere symptom waits for its cause to be heard."""
END_S = 5.0
"""How long ranks that were told to end are waited for."""
CALL_S = 2.0
"""How long a worker may take to answer a call."""
ACKNOWLEDGE_BYTES = relay.WINDOW_BYTES // 4


class Attempt:
    """One start of a gang, seen from the client."""

    def __init__(self, gang: Gang, name: str, specs: list[RankSpec]) -> None:
        self.gang, self.name, self.specs = gang, name, specs
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
        self.started: set[int] = set()
        self.reader_failed = False
        self.unacknowledged = dict.fromkeys(range(len(specs)), 0)

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
                    self.gang.order(self.name, spec, call),
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
        if self.client.status == "running":
            if len(self.ended) < len(self.specs):
                self.stop()
                self.drain(until=time.monotonic() + END_S)
            self.client.cancel(self.futures, force=True)
        self.futures.clear()

    def clean_up(self) -> None:
        """Empty the spools."""
        if self.client.status == "running":
            self.call(spool.clear, self.name)

    # -- watching ------------------------------------------------------------------------------------------

    def watch(self) -> list[Any]:
        """Handle what the ranks say until all have ended.

        Returns:
            Their values, in order of rank.

        Raises:
            RankFailed: at least one did not end well.
        """
        deadline = time.monotonic() + self.gang.start_timeout_s
        while len(self.ended) < len(self.specs):
            if not self.handle_next(timeout_s=0.5):
                self.check_tasks(deadline)
            if self.failures:
                self.settle()
                raise self.error()
        return [self.values[spec.rank] for spec in self.specs]

    def settle(self) -> None:
        """Stop the others, and hear all of them out: the first failure to be heard need not be the cause."""
        self.drain(until=time.monotonic() + SETTLE_S, enough=self.cause_is_known)
        self.stop()
        self.drain(until=time.monotonic() + END_S)

    def cause_is_known(self) -> bool:
        """Whether some failure is more than an echo."""
        return not all(failure.is_symptom for failure in self.failures)

    def error(self) -> JobFailed:
        """The one error that names the first cause."""
        cause, symptoms = root_cause(self.failures)
        return RankFailed(explain(cause, symptoms), cause, symptoms)

    def check_tasks(self, deadline: float) -> None:
        """In a quiet moment, look for what no record tells: a task that failed or never began, a lost scheduler.

        Raises:
            ClusterError: the scheduler is gone.
        """
        running = [pair for pair in zip(self.specs, self.futures, strict=True) if pair[0].rank not in self.ended]
        # Dask's client cancels all its tasks when it loses the scheduler, or when somebody restarts the cluster.
        if self.client.status == "closed" or any(future.status in ("cancelled", "lost") for _, future in running):
            raise ClusterError(
                f"the scheduler {self.scheduler} is lost, or was restarted; its workers stop the ranks. Go on with "
                "resume=<run dir> once it is back"
            )
        for spec, future in running:
            if future.status == "error":
                reason = future.exception()
                message = f"its task ended before it did: {reason!r}; is ddp_hydra installed on worker {spec.worker}?"
                self.failures.append(Failure("start", spec.rank, spec.host, message))
                self.ended.add(spec.rank)
        late = [spec.rank for spec in self.specs if spec.rank not in self.started]
        if late and time.monotonic() > deadline:
            message = (
                f"rank {ranges(late)} of {len(self.specs)} had not started after dispatch.start_timeout_s="
                f"{self.gang.start_timeout_s:g}: the workers are busy with other Dask tasks, or stuck"
            )
            self.failures.append(Failure("start", late[0], self.specs[late[0]].host, message))

    def drain(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Handle events until all ranks have ended, or `enough`, or the time of `until` has come."""
        while len(self.ended) < len(self.specs) and not enough() and time.monotonic() < until:
            self.handle_next(timeout_s=0.05)

    def handle_next(self, timeout_s: float) -> bool:
        """Handle the next event; False where none came in time."""
        try:
            _, message = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if isinstance(message, bytes):
            for line in message.split(b"\n"):
                self.on_record(Record.decode(line), len(line))
        elif isinstance(message, dict) and message.get("action") == "remove-worker":
            self.on_worker_lost(message["worker"])
        return True

    def on_record(self, record: Record, size: int) -> None:
        """Act on a record of the relay's, pass on all others, and tell the rank that it was read."""
        if not 0 <= record.rank < len(self.specs):
            raise RecordError(f"a record claims to come from rank {record.rank} of {len(self.specs)}")
        self.started.add(record.rank)
        if record.kind == "up":
            if "rendezvous" in record.data:
                self.tell(dict.fromkeys(range(1, len(self.specs)), record.data))
        elif record.kind == "end":
            self.on_end(record)
        else:
            self.read(record)
            self.unacknowledged[record.rank] += size
            if self.unacknowledged[record.rank] > ACKNOWLEDGE_BYTES:
                self.tell({record.rank: {"acknowledged": self.unacknowledged[record.rank]}})
                self.unacknowledged[record.rank] = 0

    def read(self, record: Record) -> None:
        """Give a record to its reader; one that has failed (a full disk, say) is not asked again."""
        if not self.reader_failed:
            self.reader_failed = True
            self.gang.on_record(record)
            self.reader_failed = False

    def on_end(self, record: Record) -> None:
        """Note how a rank ended."""
        if record.rank in self.ended:
            return
        spec = self.specs[record.rank]
        failure = Failure.from_end(record.data, spec.rank, spec.host, record.attempt)
        if failure is not None:
            self.failures.append(failure)
        elif record.data["status"] == "ok":
            self.values[spec.rank] = self.value_of(record)
        self.ended.add(record.rank)

    def value_of(self, record: Record) -> Any:
        """Decode what a rank returned."""
        if "value" in record.data:
            return values.decode(base64.b64decode(record.data["value"]))
        with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
            path, file = Path(folder) / "value", record.data["value_file"]
            self.fetch(record, path, file)
            transfer.verify(path, file["size"], file["sha256"])
            return values.decode(path.read_bytes())

    def on_worker_lost(self, address: str) -> None:
        """A worker has left the cluster; the rank that it hosted is gone with it."""
        self.lost.add(address)
        for spec in self.specs:
            if spec.worker == address and spec.rank not in self.ended:
                message = f"its worker {address} left the cluster (killed, out of memory, or its host is gone)"
                self.failures.append(Failure("lost", spec.rank, spec.host, message, time_s=time.time()))
                self.ended.add(spec.rank)

    # -- talking to the workers ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Tell all ranks that still run to end."""
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
        transfer.fetch(self.client, spec.worker, folder, self.name, spec.rank, file or record.data, target)

    def send(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Make files of the client readable for rank 0; returns their paths there."""
        first = self.specs[0]
        return {
            name: transfer.send(self.client, first.worker, self.name, first.rank, path) for name, path in files.items()
        }
