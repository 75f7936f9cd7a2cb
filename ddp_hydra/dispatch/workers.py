"""The workers of one attempt, as the client reaches them; one that is gone is never waited for."""

from __future__ import annotations

import base64
import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed import Client

from ddp_hydra import heartbeat
from ddp_hydra.dispatch import file_transfer
from ddp_hydra.errors import RecordError
from ddp_hydra.rank import inbox, outbox, return_values
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.results import Record

CALL_S = 2.0
"""How long a worker may take to answer a call."""


class WorkerClient:
    """Letters to the ranks of an attempt, and files from and to them.

    Args:
        client: of the Dask cluster.
        name: of the attempt.
        specs: the ranks' places.
    """

    def __init__(self, client: Client, name: str, specs: list[RankSpec]) -> None:
        self.client, self.name, self.specs = client, name, specs
        scheduler = client.scheduler_info(n_workers=-1)
        self.scheduler, workers = scheduler["address"], scheduler["workers"]
        self.folders = {spec.worker: workers.get(spec.worker, {}).get("local_directory", "") for spec in specs}
        self.lost: set[str] = set()
        self.is_cut_off = False

    @property
    def is_reachable(self) -> bool:
        """Whether there still is a scheduler."""
        return self.client.status == "running" and not self.is_cut_off

    def scheduler_answers(self) -> bool:
        """Ask the scheduler for a sign of life."""
        assert self.client.scheduler is not None
        try:
            self.client.sync(self.client.scheduler.identity, n_workers=0, callback_timeout=CALL_S)
        except (OSError, TimeoutError):
            return False
        return True

    def finish(self, ranks: Iterable[int], reason: str) -> None:
        """Have ranks make a checkpoint at their next step, and end."""
        self.tell({rank: {"finish": heartbeat.REASONS.index(reason)} for rank in ranks})

    def stop(self, ranks: Iterable[int], finish_checkpoint: bool = False) -> None:
        """Tell ranks to end.

        Args:
            ranks: which.
            finish_checkpoint: a checkpoint that is under way is completed first.
        """
        self.tell({rank: {"stop": True, "finish_checkpoint": finish_checkpoint} for rank in ranks})

    def tell(self, letters: Mapping[int, inbox.Message]) -> None:
        """Leave messages for ranks, on all their workers at once."""
        by_worker = {self.specs[rank].worker: (rank, dict(message)) for rank, message in letters.items()}
        self.call(list(by_worker), inbox.deliver, self.name, by_worker)

    def clear(self) -> None:
        """Empty the spools."""
        self.call(list(self.folders), outbox.clear, self.name)

    def call(self, workers: list[str], function: Callable[..., Any], *args: Any) -> None:
        """Run a short function on workers. One that is gone is not waited for: Dask would try for half a minute."""
        reachable = [address for address in workers if address not in self.lost]
        if reachable:
            run = {"workers": reachable, "on_error": "ignore", "callback_timeout": CALL_S}
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                self.client.sync(self.client._run, function, *args, **run)

    def fetch(self, record: Record, target: Path, file: Mapping[str, Any] | None = None) -> None:
        """Bring a spooled file home; that it is gone there lets the rank know."""
        spec = self.specs[record.rank]
        folder = self.folders[spec.worker]
        if spec.worker in self.lost and not outbox.path(folder, self.name, spec.rank).is_dir():
            raise OSError(f"its worker {spec.worker} is lost")
        is_lost = lambda: spec.worker in self.lost  # noqa: E731
        file_transfer.fetch(
            self.client, spec.worker, folder, self.name, spec.rank, file or record.data, target, is_lost
        )

    def drop(self, record: Record) -> None:
        """Remove a spooled file that nobody wants; that it is gone there lets the rank know."""
        spec = self.specs[record.rank]
        if spec.worker not in self.lost:
            where = (self.folders[spec.worker], self.name, spec.rank)
            with contextlib.suppress(OSError):  # lost just now
                file_transfer.drop(self.client, spec.worker, *where, record.data, lambda: spec.worker in self.lost)

    def returned(self, record: Record) -> Any:
        """Decode what a rank returned.

        Raises:
            RecordError: it is malformed.
        """
        try:
            if "value" in record.data:
                return return_values.decode(base64.b64decode(record.data["value"]))
            with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
                path, file = Path(folder) / "value", record.data["value_file"]
                self.fetch(record, path, file)
                file_transfer.verify(path, file["size"], file["sha256"])
                return return_values.decode(path.read_bytes())
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"what rank {record.rank} returned cannot be read ({error!r:.200})") from None

    def send(self, rank: int, files: Mapping[str, Path]) -> dict[str, str]:
        """Make files of the client readable for a rank; returns their paths there.

        Raises:
            OSError: its worker does not answer, or a file cannot be read or written.
        """
        worker = self.specs[rank].worker
        return {name: file_transfer.send(self.client, worker, self.name, rank, path) for name, path in files.items()}
