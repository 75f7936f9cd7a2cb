"""Tells commands where a remote run is, by status.json in the store.

Only one driver at a time writes to a run's folder in a store. The folder contains its owner's token. Each write
succeeds only while the token is there.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

import ddp_hydra
from ddp_hydra.errors import Interrupted, RunFailed, TakenOver
from ddp_hydra.record import Record
from ddp_hydra.run_state import AttemptEntry, FailureEntry, Status, decode
from ddp_hydra.storage.base import ObjectChangedError, Store
from ddp_hydra.writers.run_dir import STATUS, JobStatus, encode_status

STOP = "stop"
"""The object that asks a run to end."""
SUCCEEDED = ("done", "paused")
"""States of a run that went as it was asked to."""
ENDED = (*SUCCEEDED, "stopped", "failed", "interrupted")
LOST = "lost"
"""The state of a run whose driver has ended because it lost the scheduler; another driver resumes the run."""
HEARTBEAT_S = 2.0
"""The status is written at least this often while the driver is alive."""
LOST_S = 20.0
"""A driver that has not updated its status for so long is considered lost."""


class DriverStatus(JobStatus):
    """Collects the status of a remote run. It is also a writer: it takes the records of the job.

    `now` has a state: starting, running, ending, at last `LOST` or one of `ENDED`.
    """

    def __init__(self, scheduler: str, project: str, max_restarts: int = 0, **more: Any) -> None:
        version, now = ddp_hydra.__version__, time.time()
        fixed = {"ddp_hydra": version, "scheduler": scheduler, "project": project, "started": now, **more}
        super().__init__(Status(**fixed, max_restarts=max_restarts))
        self._lock = threading.Lock()
        self._written: Status | None = None
        self._written_at = 0.0

    def write(self, record: Record) -> None:
        with self._lock:
            self.update(record)

    def close(self) -> None:
        """Note that the job writes no more; the uploader still uploads what is there."""
        self.now.state = "ending"

    def content(self) -> Status:
        with self._lock:
            return replace(super().content(), start=self.start)

    def next_update(self) -> bytes | None:
        """Return the status to write now; None if it has not changed and no heartbeat is due."""
        content, now = self.content(), time.monotonic()
        if content == self._written and now - self._written_at < HEARTBEAT_S:
            return None
        self._written, self._written_at = content, now
        return encode_status(content)


def failed_attempts(status: Status) -> list[AttemptEntry]:
    """Return the attempts that have failed, of a lost driver and of drivers before it."""
    if status.step is None and status.attempts:  # it was lost before an attempt of its own began to train
        return status.attempts
    driver = f"its driver, process {status.pid} on {status.host},"
    is_cut = status.state == LOST
    message = f"{driver} lost the scheduler" if is_cut else f"{driver} was killed, or its host is gone"
    started, step = status.started or 0.0, status.step or 0
    lost = AttemptEntry(
        attempt=status.attempt,
        world_size=status.world_size or None,
        steps_done=step,
        started=started,
        wall_s=max(0.0, (status.time or 0.0) - started),
        failure=FailureEntry(kind="lost", host=status.host, attempt=status.attempt, step=step, message=message),
    )
    return [*status.attempts, lost]


def read(store: Store) -> Status | None:
    try:
        return decode(store.get(STATUS), Status, f"{STATUS} in {getattr(store, 'url', 'the store')}")
    except FileNotFoundError:
        return None


def conclude(state: str, message: str) -> None:
    if state == "interrupted":
        raise Interrupted(message)
    if state not in SUCCEEDED:
        raise RunFailed(message)
    print(message)  # noqa: T201


OWNER = "owner"
"""The object with the token of the driver that may write."""
TRIES = 5

log = logging.getLogger(__name__)


class FencedStore(Store):
    """Writes to a run's folder in a store as its owner, until another process acquires it.

    A small object is replaced only if nobody else has changed it since this process became the owner (If-Match,
    If-None-Match). Large objects have a new name each time or only grow, so the owner is just checked before.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.url, self.setting = store, store.url, store.setting
        self.token = secrets.token_hex(8)
        self.lost = False
        self._conditional = True
        self._tags: dict[str, str | None] = {}
        self._lock = threading.RLock()

    def get(self, key: str, size: int | None = None) -> Any:
        return self.store.get(key, size)

    def get_range(self, key: str, start: int, end: int) -> Any:
        return self.store.get_range(key, start, end)

    def size(self, key: str) -> int:
        return self.store.size(key)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self.store.objects(prefix)

    def etag(self, key: str) -> str | None:
        return self.store.etag(key)

    def owner(self) -> str | None:
        """Return the tag of the owner's object, for `acquire`; None if there was no owner yet."""
        return self.store.etag(OWNER)

    def acquire(self, owner: str | None) -> None:
        """Become the owner, unless another process has since `owner`, the result of that method."""
        content = self.token.encode()
        try:
            outdated = self.store.put_if(OWNER, content, owner)
            content += b"\n"  # another content, and so another tag
            self.store.put_if(OWNER, content, outdated)
            self._conditional = self._refuses(None, content) and self._refuses(outdated, content)
        except ObjectChangedError:
            if self._token() != self.token:
                raise self._taken_over() from None
        except NotImplementedError:
            self.store.put(OWNER, content)
            self._conditional = False

    def _refuses(self, etag: str | None, content: bytes) -> bool:
        try:
            self.store.put_if(OWNER, content, etag)
        except ObjectChangedError:
            return True
        return False

    def warn_if_unconditional(self) -> None:
        """Log that the store does not enforce that only its owner writes, if it doesn't."""
        if not self._conditional:
            log.warning(
                "%s takes no conditional writes: that one driver writes is looked up, but not enforced", self.url
            )

    def check(self) -> None:
        if self.lost or self._token() != self.token:
            raise self._taken_over()

    def _token(self) -> str:
        """Return the owner's token, "" if the run was removed."""
        try:
            return str(self.store.get(OWNER), errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _taken_over(self) -> TakenOver:
        self.lost = True
        return TakenOver(f"another driver has taken over {self.url}, or the run was removed: this one ends")

    def put(self, key: str, content: Any) -> None:
        if self.lost or not isinstance(content, bytes) or not self._conditional:
            self.check()
            self.store.put(key, content)
            return
        with self._lock:
            for _ in range(TRIES):
                if key not in self._tags:
                    tag = self.store.etag(key)
                    self.check()  # after the tag was read, so that it is not the tag of a later owner's object
                    self._tags[key] = tag
                try:
                    self._tags[key] = self.store.put_if(key, content, self._tags[key])
                    return
                except ObjectChangedError:  # by the owner before us, or by our own write whose answer was lost
                    del self._tags[key]
        raise ConnectionError(f"{self.url}/{key} changes all the time")

    def delete(self, key: str) -> None:
        self.check()
        with self._lock:
            self._tags.pop(key, None)
            self.store.delete(key)
