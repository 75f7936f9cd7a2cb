"""What `resume=` and `run=` name: a run directory, its `checkpoints`, a checkpoint, or the URL of a run.

Checkpoints in a store are downloaded, and removed, here; `writers/checkpoint_mirror.py` has written them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.storage.base import PIECE_BYTES, Store
from ddp_hydra.storage.files import replacing, writing
from ddp_hydra.storage.manifest import (
    ALIASES,
    BEST,
    FOLDER,
    LAST,
    NAME,
    STATE,
    STEP,
    SUFFIX,
    CheckpointPart,
    Entries,
    Manifest,
    decode_manifest,
    difference,
    encode_manifest,
    files_of,
    find_checkpoint,
    is_checkpoint,
    name_in_store,
    named_checkpoint,
    newest_first,
    same_as,
)
from ddp_hydra.storage.urls import POINTER, is_url, open_folder, plain_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRef:
    """A run, as a user names it."""

    place: str
    """Path or URL of what is named."""

    @classmethod
    def named(cls, given: str | Path) -> RunRef:
        """Read what a user has typed; of a run directory that only points to its results, return these."""
        own = cls.own(given)
        if not own.is_stored:
            pointer = Path(own.place) / POINTER
            try:
                address = pointer.read_bytes().decode(errors="replace").strip()
            except OSError:
                return own
            if not address.isprintable() or "\ufffd" in address or not address:
                raise ConfigError(f"{pointer} is broken: it should hold the address of the run's results")
            return cls(plain_path(address))
        return own

    @classmethod
    def own(cls, given: str | Path) -> RunRef:
        """Read what a user has typed, also where it is a run directory that only points to its results."""
        place = plain_path(str(given))
        path = Path(place)
        named = path if is_url(place) else named_checkpoint(path)
        return cls(place if named == path else str(named))

    @property
    def is_stored(self) -> bool:
        """Return whether it is in a store, not in a folder of this machine."""
        return is_url(self.place)

    @property
    def folder(self) -> str:
        """Return path or URL of the run's own folder, whatever is named in it."""
        if self.is_stored:
            return self._stored()[0]
        path = Path(self.place)
        if is_checkpoint(path):
            path = path.parent if path.name else path.absolute().parent
        is_inside = path.absolute().name == FOLDER and not (path / ".hydra").is_dir()
        return str(path.absolute().parent if is_inside else path)

    @property
    def stored_checkpoint(self) -> str:
        """Return the name of the checkpoint in a store that is named; "" where a run is."""
        return self._stored()[1] if self.is_stored else ""

    def _stored(self) -> tuple[str, str]:
        """Return the URL of the run, and the name of the checkpoint that the URL ends with."""
        whole = self.place.rstrip("/")
        folder, _, name = whole.removesuffix(f"/{STATE}").rpartition("/")
        if (name in ALIASES or STEP.fullmatch(name)) and folder.endswith(f"/{FOLDER}"):
            return folder.removesuffix(f"/{FOLDER}"), name
        return whole.removesuffix(f"/{FOLDER}"), ""

    @property
    def is_own(self) -> bool:
        """Return whether it is a run directory of this machine, and no lone checkpoint, nor a URL that was typed."""
        if self.is_stored:
            return False
        path = Path(self.place)
        return (path.is_dir() and not is_checkpoint(path)) or (Path(self.folder) / ".hydra").is_dir()

    def store(self, timeout_s: float = 60.0) -> Store:
        """Return the run's own folder, to be read and written wherever it is. No request is sent yet."""
        place = self.folder if self.is_stored else str(Path(self.folder).absolute())
        return open_folder(place, timeout_s)

    def read(self, name: str, timeout_s: float = 60.0) -> bytes:
        """Return the content of a small file of the run."""
        if self.is_stored:
            return self.store(timeout_s).get(name)
        return (Path(self.folder) / name).read_bytes()

    def checkpoint(self, which: str, download: Path, retry_s: float = 60.0) -> Path:
        """Return the absolute path of a checkpoint, downloaded if the run is in a store.

        Args:
            which: the checkpoint of a run, "best" or "last".
            download: the folder for a download; made if it is missing.
            retry_s: how long to retry while the store does not answer.
        """
        if which not in ("best", "last"):
            raise ConfigError(f"which={which}: give best or last")
        try:
            if not self.is_stored:
                return find_checkpoint(self.place, which).absolute()
            download.mkdir(parents=True, exist_ok=True)
            return fetch_checkpoint(self.place, download, which, retry_s=retry_s).absolute()
        except CheckpointError as error:
            if which == "best" and (before := self._resumed_from()):
                raise CheckpointError(
                    f"{error}; or give run={before}, which it has resumed: nothing was better after that"
                ) from error
            raise

    def _resumed_from(self) -> str:
        """Return the other run that this one has resumed; "" for none."""
        with suppress(OSError, CheckpointError, ConfigError):
            config = self.read(".hydra/config.yaml").decode(errors="replace")
            given = re.search(r"^resume: (?!null$)['\"]?(.+?)['\"]?$", config, re.MULTILINE)
            if given and RunRef.own(given[1]).folder != self.folder:
                return given[1]
        return ""


def fetch_checkpoint(url: str, folder: Path, which: str = "last", *, retry_s: float = 60.0) -> Path:
    """Download the newest complete checkpoint of a mirrored run.

    If it is damaged or missing, download the one before it, and warn. `best` has no such fallback.

    Args:
        url: as `results.mirror` was given, e.g. "s3://bucket/folder".
        folder: where to put it; made if it is missing. A whole file that is there already is not downloaded again.
        which: the last one or the best one of a run; the URL of a checkpoint names it, and has no such fallback.
        retry_s: how long to retry while the store does not answer.
    """
    with _answering(url, retry_s) as remote:
        return _fetch(remote, folder, which, RunRef.own(url).stored_checkpoint)


def _fetch(remote: Store, folder: Path, which: str, given: str = "") -> Path:
    place = f"{remote.url}/{FOLDER}"
    manifest = _read_manifest(remote)
    entries = manifest.checkpoints
    names = newest_first(entries)
    if given or which == "best":
        meant = given or BEST
        names = same_as(entries, meant, [meant] if meant in names else names)[:1]
    if not entries and manifest.removed:
        raise CheckpointError(f"the checkpoints in {place} were removed: {manifest.removed}")
    if not names:
        advice = "; for the last one type which=last" if LAST in entries and not given else ""
        what = given or f"{which} checkpoint"
        raise CheckpointError(f"{place}/{NAME} names no {what}; it has {', '.join(entries) or 'none'}{advice}")
    reasons: dict[str, str] = {}
    for name in names:
        try:
            for file, part in files_of(folder / name, entries[name]):
                _download(remote, f"{FOLDER}/{file.relative_to(folder).as_posix()}", part, file)
        except _Damaged as damaged:
            reasons[name] = str(damaged)
            continue
        for bad, why in reasons.items():
            log.warning("checkpoint %s/%s is damaged: %s; using the one before it, %s", place, bad, why, name)
        return folder / name
    left = "no whole checkpoint from before it is left" if which == "last" else "no other one is the best"
    left = f"{NAME} names {', '.join(entries)}" if given else left
    raise CheckpointError(f"checkpoint {place}/{names[0]} is damaged: {reasons[names[0]]}; {left}")


def _read_manifest(remote: Store) -> Manifest:
    """Return the manifest of a run in a store; raise CheckpointError if there is none."""
    try:
        return decode_manifest(remote.get(f"{FOLDER}/{NAME}"))
    except FileNotFoundError:
        if remote.size_or_none(".hydra/config.yaml") is not None:
            raise CheckpointError(f"the run in {remote.url} has no checkpoint yet: it has no {FOLDER}/{NAME}") from None
        raise CheckpointError(f"there is no run in {remote.url}: it has no {FOLDER}/{NAME}") from None
    except ValueError as error:
        raise CheckpointError(f"{remote.url}/{FOLDER}/{NAME} is not the manifest of checkpoints ({error})") from None


class _Damaged(Exception):
    """A checkpoint in the store is not the one that the manifest describes."""


def _download(remote: Store, key: str, wanted: CheckpointPart, target: Path) -> None:
    """Download a part of a checkpoint to `target`, unless it is there already, and compare it with the manifest's."""
    if difference(target, wanted) is None:
        return
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    found = remote.size_or_none(key)
    if found is None:
        raise _Damaged("it is missing")
    if found != wanted.size:
        raise _Damaged(f"it has {found} bytes, the manifest says {wanted.size}")
    with writing(target), replacing(target) as part:
        try:
            with part.open("wb") as file:
                for start in range(0, found, PIECE_BYTES):
                    file.write(remote.get_range(key, start, min(found, start + PIECE_BYTES)))
        except FileNotFoundError:
            raise _Damaged("it is missing") from None
        if reason := difference(part, wanted):
            raise _Damaged(reason)


def remove_checkpoints(url: str, reason: str, own: Entries | None = None, retry_s: float = 60.0) -> None:
    """Remove the checkpoints of a run that nobody writes from a store.

    The manifest names none of them before the first one is removed, so that nothing ever points to a missing one.

    Args:
        url: of the run, "s3://bucket/folder" or a path.
        reason: the manifest says it, as does the error where a checkpoint is looked for.
        own: entries of the run's own manifest; the checkpoints of other runs in the same folder stay. None: all that
            are there are its own.
        retry_s: how long to ask again while the store does not answer.
    """
    with _answering(url, retry_s) as remote:
        entries = _read_manifest(remote).checkpoints
        if own is None:
            found = (key.removeprefix(f"{FOLDER}/").partition("/")[0] for key, _ in remote.objects(FOLDER))
            ours = {name for name in found if STEP.fullmatch(name)}
        else:
            ours = {name_in_store(name, own[name]) for name in newest_first(own)}
        left = {name: entries[name] for name in reversed(newest_first(entries)) if name not in ours}
        left |= {alias: entries[alias] for alias in ALIASES if same_as(entries, alias, left)}
        remote.put(f"{FOLDER}/{NAME}", encode_manifest(left, removed="" if left else reason))
        for name in sorted(ours):
            remove_checkpoint(remote, name)


def remove_checkpoint(remote: Store, name: str) -> None:
    """Remove the files of a checkpoint from a store."""
    key = f"{FOLDER}/{name}"
    for one in [key] if name.endswith(SUFFIX) else [one for one, _ in remote.objects(key)]:
        remote.delete(one)


@contextmanager
def _answering(url: str, retry_s: float) -> Iterator[Store]:
    """Open the folder of a run, whose URL, or the URL of whose checkpoints, is given; tell how long it was tried."""
    try:
        yield open_folder(RunRef.own(url).folder, retry_timeout_s=retry_s)
    except ConnectionError as error:
        raise CheckpointError(f"{error}; it was tried for {retry_s:g} s: try again later") from None
