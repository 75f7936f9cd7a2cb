"""Uploads a run directory to its store while it grows."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ddp_hydra.console.text import typed
from ddp_hydra.errors import ConfigError, TakenOver
from ddp_hydra.job.remote.status import (
    ENDED,
    HEARTBEAT_S,
    LOST,
    LOST_S,
    STOP,
    DriverStatus,
    FencedStore,
    failed_attempts,
    read,
)
from ddp_hydra.job.run_dir import hold
from ddp_hydra.run_state import Status, Summary, decode, encode
from ddp_hydra.storage.base import PIECE_BYTES, Store
from ddp_hydra.storage.files import prepared_path
from ddp_hydra.storage.manifest import FOLDER, NAME, encode_manifest
from ddp_hydra.writers.checkpoint_mirror import Mirror, entries_in
from ddp_hydra.writers.run_dir import STATUS, SUMMARY, encode_status

WATCH_S = 2.5 * HEARTBEAT_S
"""A driver that has not updated its status for so long is silent."""
POLL_S = 1.0
BYTES_PER_S = 2**20
"""A file that grows is uploaded whole each time, so large files less often: on average, this many bytes a second."""
CURVES = ("metrics.jsonl", "tensorboard/")
EVERYTHING = ("",)
EXCLUDED = (FOLDER, STATUS, SUMMARY)


class AlreadyEnded(Exception):
    """A run needs no other driver."""


class Uploader(Mirror):
    """Uploads the files of a run directory about once a second, its checkpoints and its status.

    `on_stop` is called with the reason, once when an object in the store asks the run to end, and once when another
    driver has taken over the run.
    """

    what = "results"

    def __init__(self, folder: Path, store: Store, status: DriverStatus, on_stop: Callable[[str], None]) -> None:
        super().__init__(folder, store)
        self.run_dir, self.place, self.status, self.on_stop = folder, store.url, status, on_stop
        self._uploaded: dict[str, tuple[tuple[int, int], float]] = {}  # size and mtime, and when it is due again
        self._known = set(status.now.files)  # a driver that took the run over has more
        self._is_stopping = False
        self._lock = threading.Lock()

    def works(self) -> list[Callable[[], None]]:
        """Return three works, so that the upload of a large file does not delay the heartbeat."""
        return [self._upload, self._write_status, self.copy]

    def finish_run(self, retry_s: float, state: str, message: str) -> str:
        """Upload all that is left, summary.json as the last, and return why something is missing."""
        return self.finish(partial(self._finish_once, state, message), retry_s)

    def on_taken_over(self, error: TakenOver) -> None:
        with self._lock:
            is_first = not self._end.is_set()
            super().on_taken_over(error)
        if is_first:
            self.on_stop(str(error))

    def _finish_once(self, state: str, message: str) -> None:
        self._upload(EVERYTHING)
        self.copy()
        if missing := self.missing():
            raise ConnectionError(f"its newest checkpoint, {missing[0]}, is not there")
        self._remove_gone()
        self.store.delete(STOP)
        self.status.now.state, self.status.now.message = state, message
        self.store.put(STATUS, encode_status(self.status.content()))
        if state != LOST:
            self.store.put(SUMMARY, (self.run_dir / SUMMARY).read_bytes())

    def _remove_gone(self) -> None:
        """Remove files that the job has removed since they were uploaded, as TensorBoard's of the attempt before."""
        for name in self._known - {name for name, _ in self._files()}:
            self.store.delete(name)
            self._known.discard(name)
        self.status.now.files = sorted(self._known)

    def _write_status(self) -> None:
        if (content := self.status.next_update()) is not None:
            if isinstance(self.store, FencedStore):
                self.store.check()
            self.store.put(STATUS, content)
        if not self._is_stopping and self.store.size_or_none(STOP) is not None:
            self._is_stopping = True
            self.on_stop("it was asked for")

    def copy(self) -> None:
        """Copy checkpoints, after the metrics that another driver which resumes from them needs."""
        if self.is_behind():
            self._upload(CURVES, others=False)
            super().copy()

    def _upload(self, at_once: tuple[str, ...] = (), others: bool = True) -> None:
        """Upload files that have changed and are due. Names that begin as `at_once` are due."""
        failure = ""
        with self._lock:
            # Before Python 3.13, a folder that is removed meanwhile ends the walk.
            for name, path in list(self._files()):
                try:
                    stat = path.stat()
                    state = (stat.st_size, stat.st_mtime_ns)
                    before, due = self._uploaded.get(name, (None, 0.0))
                    if state == before or not (name.startswith(at_once) or (others and time.monotonic() >= due)):
                        continue
                    with path.open("rb") as file:
                        self.store.put(name, file if state[0] > PIECE_BYTES else file.read())
                except FileNotFoundError:  # removed in the meantime
                    continue
                except TakenOver:
                    raise
                except (ConfigError, OSError) as error:
                    failure = failure or str(error)
                    continue
                self._uploaded[name] = state, time.monotonic() + state[0] / BYTES_PER_S
            if not self._uploaded.keys() <= self._known:
                self._known |= self._uploaded.keys()
                self.status.now.files = sorted(self._known)
        if failure:
            raise ConnectionError(failure)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self.run_dir.rglob("*")):
            name = path.relative_to(self.run_dir)
            is_hidden = any(part.startswith(".") and part != ".hydra" for part in name.parts)
            if not is_hidden and name.parts[0] not in EXCLUDED and path.is_file() and not path.is_symlink():
                yield name.as_posix(), path


def acquire_run(
    store: FencedStore,
    status: DriverStatus,
    hydra_files: dict[str, bytes],
    goes_on: bool = False,
    own_dir: Path | None = None,
) -> None:
    """Acquire the folder of a new run; `own_dir` gets the files of the run that is resumed there, if one is.

    Then what Hydra has written for that run stays in the store until the new one begins to train. With `goes_on`, it
    may write where a run has left its results: it resumes that run, or is a job of a sweep.
    """
    owner = store.owner()
    if is_active(store):
        run = shlex.quote(f"run={store.url}")
        raise ConfigError(f"another run is active in {store.url}: end it: ddp-hydra attach {run} stop=true")
    last = read(store)
    if (entries_in(store) or (last is not None and last.state == "done")) and not goes_on:
        go_on = typed("resume", store.url)
        raise ConfigError(f"{store.url} holds another run: give hydra.run.dir=<folder>, or go on: {go_on}")
    try:
        store.acquire(owner)
    except TakenOver:
        raise ConfigError(f"another run has just begun in {store.url}: give another hydra.run.dir") from None
    own_files = {f".hydra/{name}": content for name, content in hydra_files.items()}
    if own_dir is not None and last is not None:
        _download(store, last, status, own_dir)
        hold(own_dir, own_files)
        own_files = {}
    for name in (SUMMARY, STOP):
        store.delete(name)
    store.put(STATUS, encode_status(status.content()))
    for name, content in own_files.items():
        store.put(name, content)


def is_active(store: FencedStore) -> bool:
    """Return whether a driver is at work on the run in a store; the clock of its host may be wrong."""
    last = read(store)
    if last is None or last.state in (*ENDED, LOST):
        return False
    if last.time is not None and abs(time.time() - last.time) < LOST_S:
        return True
    until = time.monotonic() + WATCH_S
    while True:
        time.sleep(WATCH_S / 10)
        is_last = time.monotonic() > until  # before the look: a process that stood still looks once more
        if (now := read(store)) is None or now.time != last.time:
            return True
        if is_last:
            return False


def is_lost(store: Store, is_connected: Callable[[], bool]) -> bool:
    """Wait until a run has lost its driver, and return True; return False once it has ended, or was removed.

    `is_connected` asks whether the scheduler hears of the driver, which may only be slow to reach the store.
    """
    changed, seen = time.monotonic(), None
    while True:
        try:
            last = read(store)
        except OSError:  # it says nothing of the driver
            changed = time.monotonic()
        else:
            now = time.monotonic()
            if last is None or last.state in ENDED:
                return False
            if last.time != seen:
                changed, seen = now, last.time
            if last.state == LOST or (now - changed > WATCH_S and not is_connected()):
                return True
        time.sleep(POLL_S)


def resume_run(store: FencedStore, status: DriverStatus, run_dir: Path) -> bool:
    """Take over the run of a lost driver: download what it has uploaded. Return whether it has a checkpoint."""
    store.acquire(store.owner())
    if (before := read(store)) is None or before.state in ENDED:
        raise AlreadyEnded
    is_saved = _download(store, before, status, run_dir)
    store.put(STATUS, encode_status(status.content()))
    return is_saved


def _download(store: FencedStore, before: Status, status: DriverStatus, run_dir: Path) -> bool:
    """Download the files of a run that goes on. Return whether it has a checkpoint.

    Of checkpoints, only the manifest is downloaded: it says which of them are the best and the oldest.
    """
    try:
        content = store.get(SUMMARY)
        ended = decode(content, Summary, f"{SUMMARY} in {store.url}") or Summary(status="failed")
    except FileNotFoundError:  # a run that has not ended has no summary
        attempts, has_trained = failed_attempts(before), before.step is not None or not before.attempts
        names = ("objective", "metrics", "tags", "started", "project", "steps_lost")
        fields = {name: getattr(before, name) for name in names}
        fields |= {"restarts": len(attempts) - 1 if has_trained else before.restarts}
        fields |= {"attempts": attempts, "failure": attempts[-1].failure}
        ended = Summary(status="failed", steps=before.step if has_trained else before.steps_before, **fields)
        content = encode(ended, indent=2)
    for name in ("attempts", "metrics", "steps_lost", "restarts"):  # for a driver after this one
        setattr(status.now, name, getattr(ended, name))
    status.now.steps_before, status.now.files = ended.steps, before.files
    # The job adds its own attempts. It stays, to the byte, if the job ends before it begins to train.
    prepared_path(run_dir, SUMMARY).write_bytes(content)
    for name in status.now.files:
        path = prepared_path(run_dir, name)
        with path.open("wb") as file:
            file.writelines(store.stream(name, store.size_or_none(name) or 0))
    if entries := entries_in(store):
        prepared_path(run_dir, f"{FOLDER}/{NAME}").write_bytes(encode_manifest(entries))
    return bool(entries)
