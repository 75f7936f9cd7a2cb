"""Reaches the workers of one attempt from the client; a worker that is lost is never waited for."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, Future

from ddp_hydra import heartbeat
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.dispatch import file_transfer
from ddp_hydra.errors import RecordError
from ddp_hydra.rank import inbox, outbox, return_values
from ddp_hydra.rank.spec import JobSpec, RankSpec
from ddp_hydra.record import File, Record

CALL_S = 2.0
"""Seconds that a worker may take to answer a call."""
LAUNCH_S = 30.0
"""Seconds that a worker may take to pass the next attempt on to its task. Without an answer, the attempt is submitted
again, and both tasks would run its ranks."""


class WorkerClient:
    """Sends messages and files to the ranks of an attempt, and fetches their files.

    Args:
        client: of the Dask cluster.
        job: of the attempt.

    Attributes:
        futures: the Dask tasks that run the ranks, by their workers' addresses.
    """

    def __init__(self, client: Client, job: JobSpec) -> None:
        self.client, self.gang, self.name, self.number = client, job.gang, job.topic, job.attempt
        self.specs: Sequence[RankSpec] = job.ranks
        self.scheduler, workers = client.scheduler_info(n_workers=0)["address"], workers_of(client)
        self.folders = {spec.worker: workers.get(spec.worker, {}).get("local_directory", "") for spec in self.specs}
        self.settings = job.settings
        self.caller = file_transfer.WorkerCaller(client)
        self.futures: dict[str, Future] = {}
        self.lost: set[str] = set()
        self.is_cut_off = False

    @property
    def is_reachable(self) -> bool:
        return self.client.status == "running" and not self.is_cut_off

    def scheduler_answers(self) -> bool:
        assert self.client.scheduler is not None
        try:
            self.client.sync(self.client.scheduler.identity, n_workers=0, callback_timeout=CALL_S)
        except (OSError, TimeoutError):
            return False
        return True

    def finish(self, ranks: Iterable[int], reason: str) -> None:
        self.send({"finish": heartbeat.REASONS.index(reason)}, ranks)

    def stop(self, ranks: Iterable[int], finish_checkpoint: bool = False) -> None:
        self.send({"stop": True, "finish_checkpoint": finish_checkpoint}, ranks)

    def send(self, message: inbox.Message, ranks: Iterable[int]) -> None:
        """Send a message to the workers of some ranks, all at once; the workers' other ranks get it, too."""
        workers = dict.fromkeys(self.specs[rank].worker for rank in ranks)
        self.call(list(workers), inbox.deliver, self.gang, self.number, None, dict(message))

    def launch(self, workers: Iterable[str], job: JobSpec) -> set[str]:
        """Have tasks that wait for another attempt start its ranks; return the workers whose tasks will."""
        message = {"job": job.encode()}
        answers = self.call(list(workers), inbox.deliver, self.gang, self.number, None, message, timeout_s=LAUNCH_S)
        return {address for address, is_there in answers.items() if is_there is True}

    def acknowledge(self, rank: int, size: int) -> None:
        self.call([self.specs[rank].worker], inbox.deliver, self.gang, self.number, rank, {"acknowledged": size})

    def clear(self) -> None:
        """Empty the outboxes of the attempt."""
        if self.is_reachable:
            self.call(list(self.folders), outbox.clear, self.name)

    def call(
        self, workers: list[str], function: Callable[..., Any], *args: Any, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Run a short function on workers, but not on lost ones: Dask would try for half a minute.

        Returns:
            Worker address -> what it returned, for those that have answered.
        """
        reachable = [address for address in workers if address not in self.lost]
        if reachable:
            run = {"workers": reachable, "on_error": "ignore", "callback_timeout": timeout_s or CALL_S}
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                return dict(self.client.sync(self.client._run, function, *args, **run))
        return {}

    def call_outbox(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        worker = self.specs[rank].worker
        is_lost = lambda: worker in self.lost  # noqa: E731
        return self.caller.call(worker, function, self.name, rank, *args, is_lost=is_lost)

    def source(self, rank: int, file: File) -> Path:
        folder = outbox.path(self.folders[self.specs[rank].worker], self.name, rank)
        return folder / Path(str(file.source)).name

    def fetch(self, record: Record, target: Path) -> None:
        """Fetch a file from its rank's outbox; its removal there tells the rank that it has arrived."""
        rank, file, worker = record.rank, record.data, self.specs[record.rank].worker
        assert isinstance(file, File)
        source = self.source(rank, file)
        if worker in self.lost and not os.access(source.parent, os.X_OK):
            raise OSError(f"its worker {worker} is lost")
        file_transfer.fetch(source, file, target, partial(self.call_outbox, rank))

    def drop(self, record: Record) -> None:
        """Remove a file that nobody wants from its rank's outbox; the rank may be waiting for that."""
        rank, file = record.rank, record.data
        assert isinstance(file, File)
        if self.specs[rank].worker not in self.lost:
            with contextlib.suppress(OSError):  # lost just now
                file_transfer.drop(self.source(rank, file), file, partial(self.call_outbox, rank))

    def returned(self, rank: int, value: File) -> Any:
        """Decode a rank's return value.

        Raises:
            RecordError: it is malformed.
        """
        if value.inline is not None:
            try:
                data = base64.b64decode(value.inline)
            except ValueError as error:
                raise RecordError(f"what rank {rank} returned cannot be read ({error!r:.200})") from None
        else:
            with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
                path = Path(folder) / "value"
                self.fetch(Record(value, rank), path)
                data = path.read_bytes()
        if len(data) != value.size or hashlib.sha256(data).hexdigest() != value.sha256:
            raise RecordError(f"value arrived damaged: {len(data)} of {value.size} bytes, with another sha256")
        return return_values.decode(data)

    def send_files(self, rank: int, files: Mapping[str, Path]) -> dict[str, str]:
        """Send files of the client, and checkpoints, to a rank's host; return their paths there.

        Raises:
            OSError: its worker does not answer, or a file cannot be read or written.
        """
        worker = self.specs[rank].worker
        return {name: file_transfer.send(self.caller, worker, self.name, rank, path) for name, path in files.items()}
