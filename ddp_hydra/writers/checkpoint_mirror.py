"""Copies the checkpoints of a run to a bucket, in the background.

The order of the steps makes an interruption at any moment safe, as in `files.py`: a checkpoint is complete in the
bucket before the manifest there names it, and only then are older files deleted. Only the manifest ever changes its
content: the name of a checkpoint holds the beginning of its sha256. `last.pt` and `best.pt` are entries of the
manifest, not objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ddp_hydra.errors import CheckpointError, ConfigError, TakenOver
from ddp_hydra.record import Record
from ddp_hydra.storage.base import Store
from ddp_hydra.storage.manifest import (
    ALIASES,
    FOLDER,
    NAME,
    STEP,
    CheckpointEntry,
    Entries,
    decode_manifest,
    difference,
    encode_manifest,
    files_of,
    name_in_store,
    newest_first,
    read_manifest,
    readable_steps,
)
from ddp_hydra.storage.retry import Backoff
from ddp_hydra.storage.run_ref import RunRef, remove_checkpoint
from ddp_hydra.storage.urls import open_folder

FIRST_TIMEOUT_S = 5.0
"""Timeout of the first request to the store: the job waits for it, so it is short."""
INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class Mirror:
    """Copies the checkpoints of a run to its folder in a store, about once a second, in a thread. It is a writer.

    There, the manifest names checkpoints of other runs first. What fails is retried; a warning is logged if it goes on
    failing for `retry_s`, and when it works again. At the end, it is given up after `retry_s`. A subclass copies more.
    """

    what = "checkpoints"

    def __init__(
        self, run_dir: Path, store: Store, retry_s: float = 0.0, give_up: threading.Event | None = None
    ) -> None:
        self.folder, self.place, self.store, self.retry_s = run_dir / FOLDER, f"{store.url}/{FOLDER}", store, retry_s
        self.give_up = give_up or threading.Event()
        self.damaged: dict[str, str] = {}  # checkpoints by their names in the store, and why they cannot be copied
        self._own: set[str] = {name_in_store(name, entry) for name, entry in readable_steps(self.folder).items()}
        self._sent: set[str] = set()  # the part of `_own` that is known to be in the store
        self._copied: Entries | None = None
        self._end = threading.Event()
        self._failing: dict[str, float] = {}  # works, and since when
        self._is_reported = self._is_final = False
        self._reporting = threading.Lock()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name=work.__name__, daemon=True)
            for work in self.works()
        ]

    def works(self) -> list[Callable[[], None]]:
        """Return what is done once a second, each in a thread of its own; they raise what has failed."""
        return [self.copy]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def write(self, record: Record) -> None:
        """Do nothing: the manifest in the run directory names new checkpoints."""

    def close(self) -> None:
        """Wait while checkpoints are being copied or retried, and log a warning if the newest one did not arrive."""
        reasons: list[str] = []
        last = threading.Thread(target=lambda: reasons.append(self.finish(self.copy, self.retry_s)), daemon=True)
        last.start()  # a request may hang: `give_up` ends the wait for it, too
        while last.is_alive() and not self.give_up.is_set():
            last.join(timeout=0.1)
        if missing := self.missing():
            name, damage = missing
            reason = damage or "".join(reasons) or "there was no time for it"
            log.warning(
                "the newest checkpoint, %s, is not in %s (%s); it is in %s", name, self.place, reason, self.folder
            )

    def finish(self, work: Callable[[], None], retry_s: float) -> str:
        """End the threads, then do a last work until it succeeds; return why it failed for `retry_s`, or for good."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        backoff = Backoff(retry_s, self.give_up.wait)
        while (failure := self._try(work)) and not self._is_final and backoff.wait():
            pass
        return failure

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._end.wait(INTERVAL_S):
            failure = self._try(work)
            with self._reporting:
                self._report(work.__name__, failure)

    def _report(self, work: str, failure: str) -> None:
        now = time.monotonic()
        if not failure:
            self._failing.pop(work, None)
            if self._is_reported and not self._failing:
                log.warning("%s are uploaded to %s again", self.what, self.place)
                self._is_reported = False
        elif now - self._failing.setdefault(work, now) >= self.retry_s and not self._is_reported:
            log.warning("%s cannot be uploaded to %s: %s; the upload is retried", self.what, self.place, failure)
            self._is_reported = True

    def _try(self, work: Callable[[], None]) -> str:
        try:
            work()
        except TakenOver as error:
            self.on_taken_over(error)
            return str(error)
        except Exception as error:  # but for a request that the store does not have, it may succeed later
            self._is_final = isinstance(error, NotImplementedError)
            return str(error) or type(error).__name__
        return ""

    def on_taken_over(self, error: TakenOver) -> None:
        """End all works: another process writes there now."""
        self._end.set()
        self.give_up.set()

    def missing(self) -> tuple[str, str] | None:
        """Return the newest checkpoint if it was not copied, and why it cannot be, if that is known."""
        for name, entry in readable_steps(self.folder).items():
            key = name_in_store(name, entry)
            return None if key in self._sent else (name, self.damaged.get(key, ""))
        return None

    def is_behind(self) -> bool:
        try:
            return read_manifest(self.folder) != self._copied
        except CheckpointError:  # there is none, or one that can't be read
            return False

    def copy(self) -> None:
        """Copy what the store lacks, then remove checkpoints of this run that are too many."""
        if not self.is_behind():
            return
        try:
            self._copy()
        except BaseException:
            self._sent.clear()
            raise

    def _copy(self) -> None:
        local = read_manifest(self.folder)
        before = entries_in(self.store)
        self._sent &= before.keys()
        keys = {name: name_in_store(name, local[name]) for name in newest_first(local)}
        self._own.update(keys.values())
        for name, key in keys.items():
            if key not in self._sent and self._send(self.folder / name, local[name], key):
                before = self._save(local, keys, before, self._sent | before.keys())
        if keys:
            self._save(local, keys, before, self._sent)
        if next(iter(keys.values()), None) in self._sent:  # nothing goes before the newest one is there
            for key in sorted(self._own - set(keys.values())):
                remove_checkpoint(self.store, key)
                self._own.discard(key)
                self._sent.discard(key)
        self._copied = local

    def _send(self, path: Path, entry: CheckpointEntry, key: str) -> bool:
        """Copy a checkpoint unless the bucket has it; return whether the bucket has it then."""
        for (file, part), (target, _) in zip(
            files_of(path, entry), files_of(PurePosixPath(FOLDER, key), entry), strict=True
        ):
            if self.store.size_or_none(str(target)) == part.size:
                continue
            try:
                content = file.open("rb")  # an open file stays readable when its name is removed
            except FileNotFoundError:
                return False  # removed: a newer one will be copied
            with content:
                if key not in self.damaged and (reason := difference(file, part)) is not None and file.exists():
                    log.warning("checkpoint %s is damaged: %s; it is not copied", file, reason)
                    self.damaged[key] = reason
                if key in self.damaged:
                    return False
                self.store.put(str(target), content)
        self._sent.add(key)
        return True

    def _save(self, local: Entries, keys: dict[str, str], before: Entries, there: set[str]) -> Entries:
        """Write the bucket's manifest: the checkpoints of other runs first, then this run's, the newest last.

        None is left out for its age until the newest one is in the bucket. `keys` are the names of the local ones, the
        newest first, with their names in the bucket; `there` are names of those that are in the bucket.
        """
        ours = {keys[name]: local[name] for name in local if keys.get(name) in there}
        left_out = self._own if next(iter(keys.values())) in there else set(keys.values())
        others = {name: entry for name, entry in before.items() if STEP.fullmatch(name) and name not in left_out}
        digests = {entry.digest for entry in ours.values()}
        aliases = {alias: before[alias] for alias in ALIASES if alias in before}
        aliases |= {alias: local[alias] for alias in ALIASES if alias in local and local[alias].digest in digests}
        named = {**others, **ours}
        known = {entry.digest for entry in named.values()}
        named |= {alias: entry for alias, entry in aliases.items() if entry.digest in known}
        if named != before or list(named) != list(before):
            self.store.put(f"{FOLDER}/{NAME}", encode_manifest(named))
        return named


def start_mirror(
    run_dir: Path, url: str, retry_s: float = 60.0, give_up: threading.Event | None = None, timeout_s: float = 60.0
) -> Mirror:
    """Begin to copy the checkpoints of a run to a folder, "s3://bucket/folder". Training never waits for that."""
    ref = RunRef.own(url)
    if not ref.is_stored and Path(ref.folder).resolve() == run_dir.resolve():
        raise ConfigError(f"results.mirror={url} is the run directory itself: give another folder, or leave it out")
    mirror = Mirror(run_dir, open_folder(ref.folder, timeout_s), retry_s, give_up)
    try:
        entries_in(open_folder(ref.folder, min(timeout_s, FIRST_TIMEOUT_S)))
    except ConnectionError as error:
        log.warning("%s; it is asked again when there is a checkpoint", error)
    mirror.start()
    return mirror


def entries_in(store: Store) -> Entries:
    try:
        return decode_manifest(store.get(f"{FOLDER}/{NAME}")).checkpoints
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{store.url}/{FOLDER}/{NAME} is no manifest ({error}): give another results.mirror"
        ) from None
