"""Copies the checkpoints of a run to a bucket, in the background.

The order of the steps makes an interruption at any moment safe, as in `checkpoints.py`: a step file is complete in the
bucket before the manifest there names it, and only then are older files deleted. Only the manifest ever changes its
content: the name of a step file holds the beginning of its sha256. `last.pt` and `best.pt` are entries of the manifest,
not objects.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.record import Record
from ddp_hydra.storage.base import Store
from ddp_hydra.storage.manifest import (
    ALIASES,
    FOLDER,
    NAME,
    STEP_FILE,
    CheckpointEntry,
    Entries,
    damage,
    decode_manifest,
    encode_manifest,
    name_in_store,
    newest_first,
    read_manifest,
)
from ddp_hydra.storage.results_root import open_folder
from ddp_hydra.storage.retry import Backoff
from ddp_hydra.storage.run_ref import RunRef

FIRST_TIMEOUT_S = 5.0
"""Timeout of the first request to the store: the job waits for it, so it is short."""

log = logging.getLogger(__name__)


class CheckpointMirror:
    """Copies the checkpoints of a run to a store. There, the manifest names checkpoints of other runs first.

    Args:
        run_dir: the run directory.
        store: the run's folder in the store.

    Attributes:
        damaged: why a step file cannot be copied, by its name in the store.
    """

    def __init__(self, run_dir: Path, store: Store) -> None:
        self.folder, self.place = run_dir / FOLDER, f"{store.url}/{FOLDER}"
        self.damaged: dict[str, str] = {}
        self._remote = store
        self._own: set[str] = {name_in_store(name, entry) for name, entry in _steps(self.folder).items()}
        self._sent: set[str] = set()  # the part of `_own` that is known to be in the store
        self._newest_sent = ""

    def missing(self) -> tuple[str, str] | None:
        """Return the newest checkpoint if it was not copied, and why it cannot be, if that is known."""
        for name, entry in _steps(self.folder).items():
            key = name_in_store(name, entry)
            return None if key == self._newest_sent else (name, self.damaged.get(key, ""))
        return None

    def copy(self) -> None:
        """Copy what the store lacks, then remove step files of this run that are too many."""
        try:
            self._copy()
        except BaseException:
            self._sent.clear()
            raise

    def _copy(self) -> None:
        local = read_manifest(self.folder)
        before = entries_in(self._remote)
        self._sent &= before.keys()
        keys = {name: name_in_store(name, local[name]) for name in newest_first(local)}
        newest = next(iter(keys), None)
        if newest is None:
            return
        self._own.update(keys.values())
        for name, key in keys.items():
            if key not in self._sent and self._send(self.folder / name, local[name], key):
                before = self._save(local, keys, before, self._sent | before.keys())
        self._save(local, keys, before, self._sent)
        if keys[newest] not in self._sent:
            return
        for key in sorted(self._own - set(keys.values())):
            self._remote.delete(f"{FOLDER}/{key}")
            self._own.discard(key)
            self._sent.discard(key)
        self._newest_sent = keys[newest]

    def _send(self, path: Path, entry: CheckpointEntry, key: str) -> bool:
        """Copy one file unless the bucket has it; return whether the bucket has it then."""
        if self._remote.size_or_none(f"{FOLDER}/{key}") != entry.size:
            try:
                content = path.open("rb")  # an open file stays readable when its name is removed
            except FileNotFoundError:
                return False  # removed: a newer one will be copied
            with content:
                if key not in self.damaged and (reason := damage(path, entry)) is not None and path.exists():
                    log.warning("checkpoint %s is damaged: %s; it is not copied", path, reason)
                    self.damaged[key] = reason
                if key in self.damaged:
                    return False
                self._remote.put(f"{FOLDER}/{key}", content, entry.size)
        self._sent.add(key)
        return True

    def _save(self, local: Entries, keys: dict[str, str], before: Entries, there: set[str]) -> Entries:
        """Write the bucket's manifest: the step files of other runs first, then this run's, the newest last.

        Args:
            keys: names of the local step files, the newest first, with their names in the bucket.
            before: entries of the bucket's manifest so far.
            there: names of the step files that are in the bucket.

        Returns:
            The new entries. None is left out for its age until the newest one is in the bucket.
        """
        ours = {keys[name]: local[name] for name in local if keys.get(name) in there}
        left_out = self._own if next(iter(keys.values())) in there else set(keys.values())
        others = {name: entry for name, entry in before.items() if STEP_FILE.fullmatch(name) and name not in left_out}
        digests = {entry.sha256 for entry in ours.values()}
        aliases = {alias: before[alias] for alias in ALIASES if alias in before}
        aliases |= {alias: local[alias] for alias in ALIASES if alias in local and local[alias].sha256 in digests}
        named = {**others, **ours}
        known = {entry.sha256 for entry in named.values()}
        named |= {alias: entry for alias, entry in aliases.items() if entry.sha256 in known}
        if named != before or list(named) != list(before):
            self._remote.put(f"{FOLDER}/{NAME}", encode_manifest(named))
        return named


class MirrorWriter:
    """Copies each checkpoint of a run to a bucket, after it is complete in the run directory.

    Copying to a bucket that fails is retried for a while. Then a warning is logged, and with the next checkpoint
    everything that is missing is copied. Training never waits for the bucket.

    Args:
        run_dir: the job's run directory; another writer fills its `checkpoints` before this one is called.
        url: destination, "s3://bucket/folder".
        retry_s: how long copying one checkpoint is retried.
        give_up: an event that ends all waiting at once.
        timeout_s: timeout of one request.

    Attributes:
        failures: how many times a checkpoint could not be copied in time.

    Raises:
        ConfigError: the URL, the bucket or the credentials are wrong, or obstore is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        url: str,
        retry_s: float = 60.0,
        give_up: threading.Event | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.failures = 0
        self._mirror = CheckpointMirror(run_dir, open_folder(RunRef.own(url).folder, timeout_s))
        self._retry_s = retry_s
        self._give_up = give_up or threading.Event()
        self._changed = threading.Condition()
        self._asked = self._done = 0  # counts of checkpoints
        self._closed_at: float | None = None
        self._thread: threading.Thread | None = None
        self._reason = ""  # why the last try failed
        self._is_reported = False
        try:
            entries_in(open_folder(RunRef.own(url).folder, min(timeout_s, FIRST_TIMEOUT_S)))
        except ConnectionError as error:
            log.warning("%s; it is asked again when there is a checkpoint", error)

    def write(self, record: Record) -> None:
        if record.checkpoint is None:
            return
        with self._changed:
            self._asked += 1
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait while checkpoints are being copied or retried, and log a warning if the newest one did not arrive."""
        with self._changed:
            self._closed_at = time.monotonic()
            self._changed.notify()
        while self._thread is not None and self._thread.is_alive() and not self._give_up.is_set():
            self._thread.join(timeout=0.1)
        if self._thread is not None and (missing := self._mirror.missing()):
            name, damage = missing
            reason = damage or self._reason or "there was no time for it"
            place, folder = self._mirror.place, self._mirror.folder
            log.warning("the newest checkpoint, %s, is not in %s (%s); it is in %s", name, place, reason, folder)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._closed_at is not None)
                asked = self._asked
            if asked == self._done:
                return
            self._copy_with_retry()
            self._done = asked

    def _copy_with_retry(self) -> None:
        backoff = Backoff(self._retry_s, self._give_up.wait)
        while True:
            try:
                self._mirror.copy()
            except Exception as error:  # the next checkpoint is tried whatever happened
                self._reason = str(error) or type(error).__name__
            else:
                if self._is_reported:
                    log.warning("checkpoints reach %s again", self._mirror.place)
                self._reason, self._is_reported = "", False
                return
            if self._closed_at is not None:  # the last tries have as much time as all others
                backoff.deadline = self._closed_at + self._retry_s
            if not backoff.wait():
                break
        self.failures += 1
        self._is_reported = True
        log.warning(
            "checkpoints do not reach %s: %s (tried %d times in %.0f s); they are in %s, and the next one tries again",
            self._mirror.place,
            self._reason,
            backoff.tries,
            backoff.elapsed_s,
            self._mirror.folder,
        )


def entries_in(store: Store) -> Entries:
    """Return the entries of a store's manifest; {} if it has none."""
    try:
        return decode_manifest(store.get(f"{FOLDER}/{NAME}")).files
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{store.url}/{FOLDER}/{NAME} is not the manifest of checkpoints ({error}): give another folder with "
            "results.mirror=s3://bucket/folder"
        ) from None


def _steps(folder: Path) -> Entries:
    """Return the step files of a local manifest, the newest first; none if it cannot be read."""
    try:
        entries = read_manifest(folder)
    except CheckpointError:
        return {}
    return {name: entries[name] for name in newest_first(entries)}
