"""Reaches the workers of one attempt from the client; a worker that is lost is never waited for.

Files travel between ranks and the client by a move on one host, otherwise in pieces through Dask. A worker that sees
the client's disk writes large files there itself. Pieces go directly between the client and the worker where the client
reaches it, otherwise through the scheduler.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, Future
from distributed.core import rpc
from distributed.protocol import Serialized, deserialize
from distributed.protocol.pickle import dumps

from ddp_hydra import heartbeat
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.errors import RecordError
from ddp_hydra.rank import inbox, outbox, spec
from ddp_hydra.rank.spec import JobSpec, RankSpec
from ddp_hydra.record import File, Record

CALL_S = 2.0
"""Seconds that a worker may take to answer a call."""
LAUNCH_S = 30.0
"""Seconds that a worker may take to pass the next attempt on to its task. Without an answer, the attempt is submitted
again, and both tasks would run its ranks."""


class WorkerClient:
    """Sends messages and files to the ranks of an attempt, and fetches their files."""

    def __init__(self, client: Client, job: JobSpec) -> None:
        self.client, self.gang, self.name, self.number = client, job.gang, job.topic, job.attempt
        self.specs: Sequence[RankSpec] = job.ranks
        self.scheduler, workers = client.scheduler_info(n_workers=0)["address"], workers_of(client)
        self.folders = {spec.worker: workers.get(spec.worker, {}).get("local_directory", "") for spec in self.specs}
        self.settings = job.settings
        self.caller = WorkerCaller(client)
        self.futures: dict[str, Future] = {}  # the tasks that run the ranks, by their workers' addresses
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

        Returns what it returned, by the addresses of the workers that have answered.
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
        fetch(source, file, target, partial(self.call_outbox, rank))

    def drop(self, record: Record) -> None:
        """Remove a file that nobody wants from its rank's outbox; the rank may be waiting for that."""
        assert isinstance(record.data, File)
        if self.specs[record.rank].worker not in self.lost:
            with contextlib.suppress(OSError):  # lost just now
                self.call_outbox(record.rank, outbox.remove, str(record.data.source))

    def returned(self, rank: int, value: File) -> Any:
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
        return spec.decode(data)

    def send_files(self, rank: int, files: Mapping[str, Path]) -> dict[str, str]:
        """Send files of the client, and checkpoints, to a rank's host; return their paths there."""
        worker = self.specs[rank].worker
        return {name: send(self.caller, worker, self.name, rank, path) for name, path in files.items()}


PIECE_S = 60.0
"""Seconds that one piece of a file may take. A worker that goes silent meanwhile is noticed sooner."""
REACH_S = 2.0
"""Seconds in which a worker that the client reaches answers."""
PLAIN = ("dask", "msgpack")
"""Dask's ways to send bytes, texts and numbers; no pickles."""
log = logging.getLogger(__name__)


class WorkerSilent(OSError):
    """A worker does not answer, or is gone."""


def fetch(source: Path, file: File, target: Path, call: Callable[..., Any]) -> None:
    """Put a file of a rank at `target` and remove it from the rank's outbox. The caller verifies it.

    Args:
        source: its path in the outbox, on the rank's host.
        call: calls a function of `rank.outbox` there, for the rank.
    """
    if _is_here(source, file.size):
        shutil.move(source, target)
        return
    path, done = str(target.absolute()), 0
    if file.size > outbox.CHUNK_BYTES and _is_seen(target, partial(call, outbox.sees, path)):
        while done < file.size and (copied := call(outbox.copy, source.name, path, done)):
            done += copied
        target.open("rb").close()  # NFS looks for a file's size when it is opened
    else:
        with target.open("wb") as out:
            while out.tell() < file.size and (piece := call(outbox.read, source.name, out.tell())):
                out.write(piece)
    if file.checkpoint is not None:  # a rank may resume from it there
        call(outbox.keep, source.name, file.sha256)
    else:
        call(outbox.remove, source.name)


def _is_seen(target: Path, is_there: Callable[[bytes], bool]) -> bool:
    nonce = secrets.token_bytes(32)
    target.write_bytes(nonce)
    return is_there(nonce)


def _is_here(source: Path, size: int) -> bool:
    is_file = os.path.isfile(source)  # noqa: PTH113 (Path.is_file raises where the folder is closed)
    return is_file and source.resolve() == source.absolute() and source.stat().st_size == size


class WorkerCaller:
    """Calls functions on workers, directly where the client reaches them, otherwise through the scheduler."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.reached: dict[str, bool] = {}

    def call(
        self, worker: str, function: Callable[..., Any], *args: Any, is_lost: Callable[[], bool] = lambda: False
    ) -> Any:
        """Run a function on one worker; WorkerSilent if that does not answer: Dask would try for half a minute."""
        if self.reaches(worker, is_lost):
            try:
                return self._wait(ask(self.client, worker, function, *args), worker, is_lost)
            except WorkerSilent:
                raise
            except _Refused:  # the error itself comes through the scheduler
                pass
            except Exception as error:
                log.debug("worker %s is reached no more: %r", worker, error)
                self.reached[worker] = False
        try:
            return self._wait(self.client._run(function, *args, workers=[worker]), worker, is_lost)[worker]
        except (TimeoutError, KeyError) as error:
            raise WorkerSilent(f"worker {worker} does not answer ({type(error).__name__})") from None

    def reaches(self, worker: str, is_lost: Callable[[], bool] = lambda: False) -> bool:
        """Return whether the client reaches a worker, asked once: it may be behind a port that is forwarded."""
        if worker not in self.reached:
            # What answers at its address may be another worker, in the client's own network.
            folder = workers_of(self.client).get(worker, {}).get("local_directory")
            try:
                found = self._wait(ask(self.client, worker, outbox.local_directory), worker, is_lost, REACH_S)
                self.reached[worker] = found == folder
            except Exception as error:
                log.debug("worker %s is not reached: %r", worker, error)
                self.reached[worker] = False
        return self.reached[worker]

    def _wait(
        self, asked: Coroutine[Any, Any, Any], worker: str, is_lost: Callable[[], bool], timeout_s: float = PIECE_S
    ) -> Any:
        loop: Any = self.client.loop
        answer = asyncio.run_coroutine_threadsafe(asked, loop.asyncio_loop)
        deadline = time.monotonic() + timeout_s
        while not answer.done() and not is_lost() and time.monotonic() < deadline:
            futures.wait([answer], timeout=0.1)
        if not answer.done():
            answer.cancel()
            raise WorkerSilent(f"worker {worker} {'is lost' if is_lost() else f'does not answer for {timeout_s:g} s'}")
        return answer.result()


class _Refused(Exception):
    """A function has raised on the worker."""


async def ask(client: Client, worker: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a worker, without the scheduler. Whatever answers there: nothing of it is unpickled."""
    async with rpc(worker, deserialize=False, timeout=REACH_S, connection_args=client.connection_args) as asked:
        answer = await asked.run(function=dumps(function), args=dumps(args), deserializers=PLAIN)
    if answer["status"] != "OK":
        raise _Refused
    result = answer["result"]
    return deserialize(result.header, result.frames, PLAIN) if isinstance(result, Serialized) else result


def send(caller: WorkerCaller, worker: str, gang: str, rank: int, source: Path) -> str:
    """Send a file or a checkpoint's folder of the client to a rank's host, and return its path there.

    The host has it already if it sees it under the same path, or wrote it and has kept it.
    """
    if source.is_dir():
        sent = [send_file(caller, worker, gang, rank, file, f"{source.name}/{file.name}") for file in source.iterdir()]
        return str(Path(sent[0]).parent)
    return send_file(caller, worker, gang, rank, source, source.name)


def send_file(caller: WorkerCaller, worker: str, gang: str, rank: int, source: Path, name: str) -> str:
    found = source.stat()
    if caller.call(worker, outbox.is_same_file, str(source), found.st_size, found.st_mtime_ns):
        return str(source)
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    path: str = caller.call(worker, outbox.find, gang, rank, name, sha256, found.st_size)
    if path:
        return path
    with source.open("rb") as file:
        while not path or file.tell() < os.fstat(file.fileno()).st_size:
            offset = file.tell()
            path = caller.call(worker, outbox.write, gang, rank, name, file.read(outbox.CHUNK_BYTES), offset)
    return path
