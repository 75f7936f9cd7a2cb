"""Uploads a run directory to its store while it grows; `writers/checkpoint_mirror.py` uploads the checkpoints."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddp_hydra.errors import CheckpointError, ConfigError, TakenOver
from ddp_hydra.job.remote import status as statuses
from ddp_hydra.job.remote.fence import Fenced
from ddp_hydra.job.remote.status import ENDED, LOST, LOST_S, NAME, STOP, SUMMARY, Status, encoded
from ddp_hydra.results import check_path
from ddp_hydra.storage.bucket import PIECE_BYTES
from ddp_hydra.storage.fetch_checkpoint import FIRST_PAUSE_S, LONGEST_PAUSE_S
from ddp_hydra.storage.files import place
from ddp_hydra.storage.manifest import FOLDER, newest_first, read_manifest, read_manifest_text
from ddp_hydra.storage.manifest import NAME as MANIFEST
from ddp_hydra.storage.results_root import Store

TICK_S = 1.0
WATCH_S = 2.5 * statuses.BEAT_S
BYTES_PER_S = 2**20
"""A file that grows is brought whole, so a large one not as often: on average, so much of it a second."""
CURVES = ("metrics.jsonl", "tensorboard/")
EVERYTHING = ("",)
NOT_OURS = (FOLDER, NAME, SUMMARY)

log = logging.getLogger(__name__)


class Uploader:
    """Bring the files of a folder to a store about once a second; where that fails, again and again.

    Args:
        folder: the run directory.
        store: where to.
        status: what to say there meanwhile.
        on_stop: called once, when somebody asks there for the end.
        on_lost: called once, with a sentence, when another driver has taken the store over.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        status: Status,
        on_stop: Callable[[], None],
        on_lost: Callable[[str], None] = lambda said: None,
    ) -> None:
        self.folder, self.store, self.status, self.on_stop, self.on_lost = folder, store, status, on_stop, on_lost
        self._sent: dict[str, tuple[tuple[int, int], float]] = {}  # size and mtime, and when it is due again
        self._failed: dict[str, str] = {}
        self._is_asked = False
        self._lock = threading.Lock()
        self._end, self._give_up = threading.Event(), threading.Event()
        # A large file on its way is no reason not to say that we are there.
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name=work.__name__, daemon=True)
            for work in (self._bring, self._look)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def give_up(self) -> None:
        """Try nothing again any more."""
        self._give_up.set()

    def finish(self, retry_s: float, state: str, said: str) -> str:
        """Bring all that is left: summary.json last, after everything that it stands for.

        Args:
            retry_s: how long that may fail.
            state: how the run ended.
            said: what its user is told.

        Returns:
            What is not there, as a sentence; "" where all is.
        """
        self._end.set()
        for thread in self._threads:
            thread.join()
        deadline, pause = time.monotonic() + retry_s, FIRST_PAUSE_S
        while True:
            missing = self._last(state, said)
            left_s = deadline - time.monotonic()
            if not missing or left_s <= 0 or self._give_up.wait(min(pause, left_s)):
                return missing
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _last(self, state: str, said: str) -> str:
        try:
            if failed := self._bring(EVERYTHING):
                return failed
            if newest := self._missing_checkpoint():
                return f"its newest checkpoint, {newest}, is not there"
            self.store.delete(STOP)
            self.status.state, self.status.said = state, said
            self.store.put(NAME, encoded(self.status.content()))
            if state != LOST:
                self.store.put(SUMMARY, (self.folder / SUMMARY).read_bytes())
        except TakenOver as error:
            self.give_up()
            return str(error)
        except (ConfigError, ConnectionError, OSError) as error:
            return str(error)
        return ""

    def _missing_checkpoint(self) -> str:
        """The name of the newest checkpoint, if the store lacks it."""
        try:
            ours = read_manifest(self.folder / FOLDER)
        except CheckpointError:
            return ""
        newest = next(iter(newest_first(ours)), "")
        if not newest:
            return ""
        try:
            there = read_manifest_text(self.store.get(f"{FOLDER}/{MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return newest
        return "" if any(entry.get("sha256") == ours[newest]["sha256"] for entry in there.values()) else newest

    def _work(self, work: Callable[[], str]) -> None:
        while not self._end.wait(TICK_S):
            try:
                self._note(work.__name__, work())
            except TakenOver as error:
                with self._lock:
                    first = not self._give_up.is_set()
                    self.give_up()
                if first:
                    self.on_lost(str(error))
                return

    def _look(self) -> str:
        """Say that we are there, and see whether the run shall end. Returns what failed."""
        try:
            if (content := self.status.due()) is not None:
                if isinstance(self.store, Fenced):
                    self.store.check()
                self.store.put(NAME, content)
            if not self._is_asked and self.store.size(STOP) is not None:
                self._is_asked = True
                self.on_stop()
        except TakenOver:
            raise
        except (ConfigError, ConnectionError, FileNotFoundError) as error:
            return str(error)
        return ""

    def bring_curves(self) -> None:
        """Bring all points there are: before a checkpoint that another driver may go on from."""
        self._bring(CURVES)

    def _bring(self, at_once: tuple[str, ...] = ()) -> str:
        """Bring what is new, and due or called like one of `at_once`. Returns what failed."""
        with self._lock:
            return self._bring_one_by_one(at_once)

    def _bring_one_by_one(self, at_once: tuple[str, ...]) -> str:
        failed = ""
        for name, path in self._files():
            try:
                found = path.stat()
                state = (found.st_size, found.st_mtime_ns)
                before, due = self._sent.get(name, (None, 0.0))
                if state == before or not (name.startswith(at_once) or time.monotonic() >= due):
                    continue
                with path.open("rb") as file:
                    self.store.put(name, file if state[0] > PIECE_BYTES else file.read(), state[0])
            except FileNotFoundError:  # it is gone again
                continue
            except TakenOver:
                raise
            except (ConfigError, ConnectionError, OSError) as error:
                failed = failed or str(error)
                continue
            self._sent[name] = state, time.monotonic() + state[0] / BYTES_PER_S
            self.status.files = sorted({*self.status.files, *self._sent})
        return failed

    def _note(self, what: str, failed: str) -> None:
        before = dict(self._failed)
        self._failed.pop(what, None)
        self._failed |= {what: failed} if failed else {}
        if failed and not before:
            log.warning("results do not reach %s: %s; it is tried again", self.store.url, failed)
        elif before and not self._failed:
            log.warning("results reach %s again", self.store.url)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            hidden = any(part.startswith(".") and part != ".hydra" for part in name.parts)
            if not hidden and name.parts[0] not in NOT_OURS and path.is_file() and not path.is_symlink():
                yield name.as_posix(), path


def claim(store: Fenced, status: Status, hydra: dict[str, bytes]) -> None:
    """Begin a run in a store, whose first objects show that it can be written.

    Args:
        store: the run's folder there.
        status: of the run.
        hydra: what Hydra has saved, by name.

    Raises:
        ConfigError: it cannot be written, or another run is at work there.
        ConnectionError: the store is not reachable, or out of order.
    """
    owner, other = store.owner(), statuses.read(store)
    age_s = time.time() - other.get("time", 0) if isinstance(other.get("time", 0), float) else LOST_S
    is_open = bool(other) and other.get("state") not in (*ENDED, LOST)
    if is_open and (abs(age_s) < LOST_S or _is_heard(store, other.get("time"))):
        raise ConfigError(
            f"another run is at work in {store.url} (by its clock it was heard {age_s:.0f} s ago): end it with python "
            f"-m ddp_hydra attach run={store.url} stop=true, or give another hydra.run.dir"
        )
    try:
        store.take(owner)
    except TakenOver:
        raise ConfigError(
            f"another run has just begun in {store.url}: look at it with python -m ddp_hydra attach run={store.url}, "
            "or give another hydra.run.dir"
        ) from None
    for name in (SUMMARY, STOP):
        store.delete(name)
    store.put(NAME, encoded(status.content()))
    for name, saved in hydra.items():
        store.put(f".hydra/{name}", saved)


def _is_heard(store: Fenced, before: object) -> bool:
    """Watch a while whether a driver says something: its host's clock may be wrong."""
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(WATCH_S / 10)
        if statuses.read(store).get("time") != before:
            return True
    return False


def go_on(store: Fenced, status: Status, run_dir: Path) -> bool:
    """Take over a run from a driver that is lost: what it has brought to the store comes here.

    Args:
        store: the run's folder there.
        status: of the run.
        run_dir: here.

    Returns:
        Whether there is a checkpoint to go on from.

    Raises:
        TakenOver: another driver was quicker.
    """
    store.take(store.owner())
    before = statuses.read(store)
    status.attempts = statuses.attempts_of(before)
    (run_dir / SUMMARY).write_text(json.dumps({"attempts": status.attempts}))  # our own begins with them
    status.files = [str(name) for name in before.get("files", ())]
    for name in status.files:
        path = place(run_dir, check_path(name))
        size = store.size(name)
        with path.open("wb") as file:
            for start in range(0, size or 0, PIECE_BYTES):
                file.write(store.read(name, start, min(size or 0, start + PIECE_BYTES)))
    store.put(NAME, encoded(status.content()))
    return bool(statuses.read_object(store, f"{FOLDER}/{MANIFEST}").get("files"))
