"""The gang: one pinned task per rank, started together, watched, and stopped together.

As a library:

    values = dispatch.run(client, train, "resnet18", lr=0.1)      # every worker, inside a process group
    values = dispatch.Gang(client, ranks=4, backend="gloo").run(train, "resnet18", lr=0.1)
"""

from __future__ import annotations

import base64
import contextlib
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client, Future

from ddp_hydra import placement, transfer, values
from ddp_hydra.errors import JobFailed, RankFailed, RecordError
from ddp_hydra.outcome import Failure, explain, root_cause
from ddp_hydra.placement import RankSpec
from ddp_hydra.project import Project
from ddp_hydra.rank_host import mailbox, relay, spool
from ddp_hydra.reservation import reserved
from ddp_hydra.results import Record

SETTLE_S = 0.4
"""How long a mere symptom waits for its cause to be heard."""
END_S = 5.0
"""How long ranks that were told to end are waited for."""
CALL_S = 2.0
"""How long a worker may take to answer a call."""
ACKNOWLEDGE_BYTES = relay.WINDOW_BYTES // 4


def run(client: Client, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on every worker, each call one rank of a process group.

    Args:
        client: of the Dask cluster.
        fn: the function, or "module:name" to import it on the ranks only.
        args: passed to it.
        kwargs: passed to it.

    Returns:
        What the ranks returned, in order of rank: plain data, arrays and tensors.

    Raises:
        RankFailed: a rank raised, exited or was killed; the message names the first.
        ClusterError: the workers are held by other jobs.
    """
    return Gang(client).run(fn, *args, **kwargs)


@dataclass
class Gang:
    """How a gang is to be dispatched.

    Args:
        client: of the Dask cluster.
        ranks: number of ranks; None for one on each worker.
        name: shown by Dask's dashboard and `ps`; made unique.
        backend: gloo, nccl, or auto (by device).
        project: packed project space that the ranks import from.
        on_record: called with each record, on the calling thread, in each rank's order.
        threads: CPU threads per rank; 0 shares each host's cores out.
        timeout_s: of the ranks' collectives.
        queue_timeout_s: how long to wait for workers that other jobs hold.
        start_timeout_s: how long the ranks may take to come up.
        port_range: ports allowed for the rendezvous; None for any free one.
        files: files of the client that rank 0 needs; where there are any, `fn` is called with files={name: path there}.
    """

    client: Client
    ranks: int | None = None
    name: str = "gang"
    backend: str = "auto"
    project: Project | None = None
    on_record: Callable[[Record], None] = field(default=lambda record: None, repr=False)
    threads: int = 0
    timeout_s: float = 1800.0
    queue_timeout_s: float = 86400.0
    start_timeout_s: float = 300.0
    port_range: tuple[int, int] | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    attempt: Attempt | None = field(default=None, init=False, repr=False)

    def run(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on each rank; see `dispatch.run`."""
        name = f"{self.name}-{secrets.token_hex(4)}"
        with reserved(self.client, name, self.ranks, self.queue_timeout_s) as workers:
            self.attempt = Attempt(self, name, placement.plan(workers))
            try:
                if self.files:
                    kwargs["files"] = self.attempt.send(self.files)
                with self.attempt.submitted(cloudpickle.dumps((fn, args, kwargs))):
                    return self.attempt.watch()
            finally:
                self.attempt.clean_up()
                self.attempt = None

    def fetch(self, record: Record, target: Path) -> None:
        """Bring the file of a record home; for the writers, while the gang runs."""
        assert self.attempt is not None, "fetch belongs into on_record"
        self.attempt.fetch(record, target)

    def order(self, name: str, spec: RankSpec, call: bytes) -> relay.Order:
        """What the worker of one rank is told."""
        return relay.Order(
            gang=name,
            attempt=0,
            spec=spec,
            call=call,
            project=self.project,
            backend=self.backend,
            timeout_s=self.timeout_s,
            threads=self.threads,
            ports=self.port_range,
            cwd=str(Path.cwd()),
        )


class Attempt:
    """One start of a gang, seen from the client."""

    def __init__(self, gang: Gang, name: str, specs: list[RankSpec]) -> None:
        self.gang, self.name, self.specs = gang, name, specs
        self.client = gang.client
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.futures: list[Future] = []
        self.values: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self.ended: set[int] = set()
        self.lost: set[str] = set()
        self.unacknowledged = dict.fromkeys(range(len(specs)), 0)
        self.stop_sent = False

    @contextlib.contextmanager
    def submitted(self, call: bytes) -> Iterator[None]:
        """Submit one task per rank; at the end, however it comes, leave nothing of them behind."""
        with contextlib.ExitStack() as stack:
            for topic in (self.name, "all"):
                self.client.subscribe_topic(topic, self.events.put)
                stack.callback(self.unsubscribe, topic)
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

    def unsubscribe(self, topic: str) -> None:
        """Stop listening."""
        if self.client.status == "running":
            self.client.unsubscribe_topic(topic)

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
        self.started: set[int] = set()
        deadline = time.monotonic() + self.gang.start_timeout_s
        while len(self.ended) < len(self.specs):
            self.handle_next(timeout_s=0.5)
            if not self.started and time.monotonic() > deadline:
                self.failures.append(self.late())
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

    def late(self) -> Failure:
        """No rank came up in time."""
        message = (
            f"no rank had started after dispatch.start_timeout_s={self.gang.start_timeout_s:g}: the workers are busy "
            "with other Dask tasks, or cannot import torch; see the workers' logs"
        )
        return Failure("start", 0, self.specs[0].host, message)

    def drain(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Handle events until all ranks have ended, or `enough`, or the time of `until` has come."""
        while len(self.ended) < len(self.specs) and not enough() and time.monotonic() < until:
            self.handle_next(timeout_s=0.05)

    def handle_next(self, timeout_s: float) -> None:
        """Handle the next event, if one comes."""
        try:
            _, message = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(message, dict):
            if message.get("action") == "remove-worker":
                self.on_worker_lost(message["worker"])
            return
        if isinstance(message, (bytes, str)):
            data = message if isinstance(message, bytes) else message.encode()
            for line in data.split(b"\n"):
                self.on_record(Record.decode(line), len(line))

    def on_record(self, record: Record, size: int) -> None:
        """Act on a record of the relay's, pass on all others, and tell the rank that it was read."""
        if not 0 <= record.rank < len(self.specs):
            raise RecordError(f"a record claims to come from rank {record.rank} of {len(self.specs)}")
        self.started.add(record.rank)
        if record.kind == "start" and "rendezvous" in record.data:
            others = {spec.rank: {"rendezvous": record.data["rendezvous"]} for spec in self.specs[1:]}
            self.tell(others)
        elif record.kind == "end":
            self.on_end(record)
        else:
            self.gang.on_record(record)
            self.unacknowledged[record.rank] += size
            if self.unacknowledged[record.rank] > ACKNOWLEDGE_BYTES:
                self.tell({record.rank: {"acknowledged": self.unacknowledged[record.rank]}})
                self.unacknowledged[record.rank] = 0

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
            path = Path(folder) / "value"
            self.fetch(record, path, record.data["value_file"])
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
        if letters:
            workers = [self.specs[rank].worker for rank in letters]
            self.call(mailbox.deliver, self.name, letters, workers=workers)

    def call(self, function: Callable[..., Any], *args: Any, workers: list[str] | None = None) -> None:
        """Run a short function on workers. One that is gone is not waited for: Dask would try for half a minute."""
        reachable = [address for address in workers or [spec.worker for spec in self.specs] if address not in self.lost]
        if reachable:
            run = {"workers": reachable, "on_error": "ignore", "callback_timeout": CALL_S}
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                self.client.sync(self.client._run, function, *args, **run)

    def fetch(self, record: Record, target: Path, file: Mapping[str, Any] | None = None) -> None:
        """Bring a spooled file home; that it is gone there lets the rank know."""
        spec = self.specs[record.rank]
        transfer.fetch(self.client, spec.worker, self.name, spec.rank, file or record.data, target)

    def send(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Make files of the client readable for rank 0; returns their paths there."""
        first = self.specs[0]
        return {
            name: transfer.send(self.client, first.worker, self.name, first.rank, path) for name, path in files.items()
        }
