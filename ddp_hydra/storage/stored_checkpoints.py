"""Downloads checkpoints from a store, and removes them there. `writers/checkpoint_mirror.py` has written them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ddp_hydra.errors import CheckpointError
from ddp_hydra.storage import results_root
from ddp_hydra.storage.base import WritableStore
from ddp_hydra.storage.files import replacing, writing
from ddp_hydra.storage.manifest import (
    ALIASES,
    FOLDER,
    NAME,
    STEP_FILE,
    Entries,
    damage,
    name_in_store,
    newest_first,
    read_manifest_text,
    why_removed,
    write_manifest_text,
)
from ddp_hydra.storage.remote import PIECE_BYTES
from ddp_hydra.storage.retry import Backoff

T = TypeVar("T")

log = logging.getLogger(__name__)


def folder_of(url: str, timeout_s: float = 60.0) -> results_root.ResultsFolder:
    """Return the folder with the checkpoints of a mirrored run.

    Args:
        url: "s3://bucket/folder" or a path, of the run or of its `checkpoints`.
        timeout_s: of one request.

    Raises:
        ConfigError: it is no such URL, or obstore is not installed.
    """
    url = url.rstrip("/")
    return results_root.open_folder(url if not url or url.endswith(f"/{FOLDER}") else f"{url}/{FOLDER}", timeout_s)


def fetch_checkpoint(url: str, folder: Path, which: Literal["last", "best"] = "last", *, retry_s: float = 60.0) -> Path:
    """Download the newest complete checkpoint of a mirrored run.

    If it is damaged or missing, download the one before it, and warn. `best` has no such fallback.

    Args:
        url: as `results.mirror` was given, e.g. "s3://bucket/folder".
        folder: where to put it; made if it is missing. A complete file that is there already is not downloaded again.
        which: the last one or the best one.
        retry_s: how long to retry while the store does not answer.

    Returns:
        The file; its name begins with its step, e.g. step-000100-0123456789ab.pt.

    Raises:
        CheckpointError: there is none, all are damaged, or the store does not answer.
        ConfigError: the URL, the bucket or the credentials are not good.
        RecordError: the folder cannot be written.
    """
    remote = folder_of(url)
    entries, removed = _read_manifest(remote, retry_s)
    names = newest_first(entries)
    if which == "best":
        digest = entries.get("best.pt", {}).get("sha256")
        names = [name for name in names if entries[name].get("sha256") == digest][:1]
    if not entries and removed:
        raise CheckpointError(f"the checkpoints in {remote.url} were removed: {removed}")
    if not names:
        advice = "; for the last one type which=last" if "last.pt" in entries else ""
        raise CheckpointError(
            f"{remote.url}/{NAME} names no {which} checkpoint; it has {', '.join(entries) or 'none'}{advice}"
        )
    reasons: dict[str, str] = {}
    for name in names:
        try:
            _download(remote, name, entries[name], folder / name, retry_s)
        except _Damaged as damaged:
            reasons[name] = str(damaged)
            continue
        for bad, why in reasons.items():
            log.warning("checkpoint %s/%s is damaged: %s; using the one before it, %s", remote.url, bad, why, name)
        return folder / name
    left = "no whole checkpoint from before it is left" if which == "last" else "no other one is the best"
    raise CheckpointError(f"checkpoint {remote.url}/{names[0]} is damaged: {reasons[names[0]]}; {left}")


def _read_manifest(remote: WritableStore, retry_s: float) -> tuple[Entries, str]:
    """Return the entries of a manifest in a store, and why all checkpoints were removed, if they were.

    Raises:
        CheckpointError: there is none, it is not a manifest, or the store did not answer in time.
    """
    try:
        manifest = bytes(_retried(lambda: remote.get(NAME), retry_s))
        return read_manifest_text(manifest), why_removed(manifest)
    except FileNotFoundError:
        raise CheckpointError(
            f"{remote.url} has no {NAME}, so no run has put checkpoints there: give what results.mirror= was given"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{remote.url}/{NAME} is not the manifest of checkpoints ({error})") from None


class _Damaged(Exception):
    """A checkpoint in the store is not the one that the manifest describes."""


def _download(remote: WritableStore, name: str, wanted: dict[str, Any], target: Path, retry_s: float) -> None:
    """Download one checkpoint to `target`, unless it is there already.

    Raises:
        _Damaged: it is not what its entry in the manifest, `wanted`, says.
    """
    assert STEP_FILE.fullmatch(name)
    size, sha256 = wanted.get("size"), str(wanted.get("sha256"))
    if not isinstance(size, int) or size < 0:
        raise _Damaged("its entry in the manifest has no size")
    if damage(target, wanted) is None:
        return
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    found = _retried(lambda: remote.size(name), retry_s)
    if found is None:
        raise _Damaged("it is missing")
    if found != size:
        raise _Damaged(f"it has {found} bytes, the manifest says {size}")
    with writing(target), replacing(target) as part:
        found_sha256 = _download_pieces(remote, name, size, part, retry_s)
        if found_sha256 != sha256:
            raise _Damaged(f"its sha256 is {found_sha256[:12]}…, the manifest says {sha256[:12]}…")


def _download_pieces(remote: WritableStore, name: str, size: int, part: Path, retry_s: float) -> str:
    """Write an object to the file `part`, piece by piece, and return its sha256."""
    digest = hashlib.sha256()
    with part.open("wb") as file:
        for start in range(0, size, PIECE_BYTES):
            end = min(size, start + PIECE_BYTES)
            try:
                piece = _retried(partial(remote.get_range, name, start, end), retry_s)
            except FileNotFoundError:
                raise _Damaged("it is missing") from None
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def remove_checkpoints(url: str, reason: str, own: Entries | None = None, retry_s: float = 60.0) -> None:
    """Remove the checkpoints of a run that nobody writes from a store.

    The manifest names none of them before the first one is removed, so that nothing ever points to a missing one.

    Args:
        url: of the run, "s3://bucket/folder" or a path.
        reason: the manifest says it, and so does whoever looks for a checkpoint.
        own: entries of the run's own manifest; the checkpoints of other runs in the same folder stay. None: all that
            are there are its own.
        retry_s: how long to ask again while the store does not answer.

    Raises:
        CheckpointError: there are none, or the store did not answer in time.
        ConfigError: the URL, the bucket or the credentials are wrong, or obstore is not installed.
    """
    remote = folder_of(url)
    entries, _ = _read_manifest(remote, retry_s)
    if own is None:
        ours = {key for key, _ in _retried(lambda: list(remote.objects()), retry_s) if STEP_FILE.fullmatch(key)}
    else:
        ours = {name_in_store(name, entry) for name, entry in own.items() if STEP_FILE.fullmatch(name)}
    left = {name: entry for name, entry in entries.items() if STEP_FILE.fullmatch(name) and name not in ours}
    sums = {entry.get("sha256") for entry in left.values()}
    left |= {name: entries[name] for name in ALIASES if name in entries and entries[name].get("sha256") in sums}
    manifest = write_manifest_text(left, removed="" if left else reason)
    _retried(partial(remote.put, NAME, manifest), retry_s)
    for key in sorted(ours):
        _retried(partial(remote.delete, key), retry_s)


def _retried(ask: Callable[[], T], retry_s: float) -> T:
    """Ask a store until it answers.

    Raises:
        CheckpointError: it did not answer in time.
    """
    backoff = Backoff(retry_s)
    while True:
        try:
            return ask()
        except ConnectionError as error:
            if not backoff.wait():
                raise CheckpointError(f"{error}; it was tried for {retry_s:g} s: try again later") from None
