"""Takes files from ranks to a folder of the client."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import MutableMapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from ddp_hydra import results
from ddp_hydra.console.text import expanded, printable
from ddp_hydra.dispatch.background import RankFuture, Running
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.record import File, Log, Record, check_path
from ddp_hydra.storage.files import prepared_path, writing
from ddp_hydra.writers.files import Fetch, FileReceiver

log = logging.getLogger("ddp_hydra.compat.dask_pytorch_ddp")
KEPT_BYTES = 2**30
"""The largest file in bytes that is kept until `process_results` is called; larger ones are dropped."""

inboxes: MutableMapping[Running, FileInbox] = weakref.WeakKeyDictionary()
"""Of the gangs that run."""


def folder_of(key: str) -> str:
    """Return the folder in which a handler's files travel; any text may be a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


class FileInbox:
    """Files that the ranks of one gang have submitted.

    Args:
        fetch: copies a file from its rank's host.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._receiver = FileReceiver(fetch)
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._kept: Path | None = None
        self._kept_bytes = 0

    def receive(self, record: Record) -> None:
        """Take a record; what ranks print is logged."""
        file = record.data
        if isinstance(file, Log):
            log.info("rank %d: %s", record.rank, printable(file.text).rstrip("\n"))
        if not isinstance(file, File):
            return
        path = check_path(file.path)
        folder, *parts = path.parts
        if not parts:
            raise RecordError(f"rank {record.rank} sent {folder!a}, a file without a folder")
        with self._lock:
            target, more = self._folders.get(folder), 0
            if target is None:
                more = file.size - self._size_of(path)
                if self._kept_bytes + more > KEPT_BYTES and file.source is not None:
                    return  # the gang counts it as dropped
                target = self._keep() / folder
            with writing(target):
                target.mkdir(parents=True, exist_ok=True)
            self._receiver.receive(record, prepared_path(target, "/".join(parts)))
            self._kept_bytes += more

    def deliver(self, folder: str, target: Path) -> None:
        """Move the files of a handler, which travel in `folder`, to a target folder, and write further ones there."""
        with self._lock:
            with writing(target):
                target.mkdir(parents=True, exist_ok=True)
                if self._kept is not None:
                    self._move(self._kept / folder, target)
            self._folders[folder] = target

    def _move(self, kept: Path, target: Path) -> None:
        """Move the files of a handler, and remove the temporary folder if it had no other ones."""
        for file in sorted(path for path in kept.rglob("*") if path.is_file()):
            path = prepared_path(target, file.relative_to(kept).as_posix())
            self._kept_bytes -= file.stat().st_size
            shutil.move(file, path)
        shutil.rmtree(kept, ignore_errors=True)
        if not any(kept.parent.iterdir()):
            kept.parent.rmdir()
            self._kept = None

    def _size_of(self, path: PurePosixPath) -> int:
        file = self._kept / path if self._kept is not None else None
        return file.stat().st_size if file is not None and file.is_file() else 0

    def _keep(self) -> Path:
        if self._kept is None:
            self._kept = Path(tempfile.mkdtemp(prefix="ddp_hydra-"))
            weakref.finalize(self, shutil.rmtree, self._kept, ignore_errors=True)
        return self._kept


class DaskResultsHandler:
    """Made on the client, used in the function that `dispatch.run` runs, as a global, a closure or an argument.

    Args:
        pub_sub_key: tells the files of several handlers apart; None: a new one.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        self.pub_sub_key = uuid4().hex if pub_sub_key is None else pub_sub_key

    def submit_result(self, path: str, data: bytes | str) -> None:
        """Send a file; called on a rank.

        Args:
            path: below the folder that `process_results` is given.
            data: its content; str is written as UTF-8.

        Raises:
            RecordError: `path` leaves that folder, or this process is not a rank.
        """
        results.check_path(path)
        results.submit(f"{folder_of(self.pub_sub_key)}/{path}", data)

    def process_results(self, prefix: str | Path, futures: Sequence[RankFuture], raise_errors: bool = True) -> None:
        """Write files into a folder as they come, until all ranks have ended. Ctrl-C stops the ranks.

        Args:
            prefix: the folder, made if it is missing.
            futures: what `dispatch.run` has returned.
            raise_errors: whether to raise the error of a rank; otherwise it is logged.

        Raises:
            ConfigError: `dispatch.run` has returned no such futures.
            RankFailed: a rank raised, exited or was killed.
        """
        gangs: set[Any] = {getattr(future, "gang", None) for future in futures}
        if not gangs <= set(inboxes):
            raise ConfigError("process_results takes the futures that dispatch.run has returned, and got others")
        for one in gangs:
            inboxes[one].deliver(folder_of(self.pub_sub_key), expanded(prefix).absolute())
        logged: set[int] = set()
        for future in futures:
            try:
                future.result()
            except Exception as error:
                if raise_errors:
                    raise
                if id(error) not in logged:  # one rank's error ends all
                    log.error("%s", error)
                logged.add(id(error))
