"""Names the checkpoints of a run, finds them and verifies them, for resume, evaluate and generate.

`checkpoints/manifest.json` has one entry per checkpoint: its parts with size in bytes and sha256, and the step, epoch,
samples and metrics it was made at. A checkpoint of one part is a file, `step-000100.pt`; one of several is a folder,
`step-000100/`. Needs no torch and no writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct, to_builtins

from ddp_hydra.checked import Count, prepare
from ddp_hydra.console import text
from ddp_hydra.errors import CheckpointError
from ddp_hydra.record import METADATA

FOLDER = "checkpoints"
NAME = "manifest.json"
SUFFIX = ".pt"
LAST, BEST = ALIASES = (f"last{SUFFIX}", f"best{SUFFIX}")
"""Copies of entries of steps; of a checkpoint that is one file, such a file is there, too."""
STATE = f"state{SUFFIX}"
"""The part of a checkpoint in a folder that has all but the large tensors. These are in files of torch's DCP."""
_STEP = r"step-(\d{1,18})(-[0-9a-f]{12})?"
STEP = re.compile(rf"{_STEP}({re.escape(SUFFIX)})?", re.ASCII)
"""Names of checkpoints. In a bucket they carry the beginning of the sha256, too."""
FILES = rf"{_STEP}(\.pt|/(state\.pt|\.metadata|__\d+_\d+\.distcp))"
"""Their files, also where no manifest names them."""
PART = rf"({re.escape(METADATA)}|[A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}})"
"""Names of parts in a folder."""
FORMAT = 2
"""The number in the manifest, raised when a field changes its meaning or goes."""


class CheckpointPart(Struct, kw_only=True, frozen=True):
    """A file of a checkpoint: its name, size in bytes and sum, and the rank that has written it."""

    name: Annotated[str, Meta(pattern=f"^{PART}$")]
    size: Count
    sha256: str
    rank: Count = 0


class CheckpointEntry(Struct, kw_only=True):
    """A checkpoint of the manifest: its parts, and where in the training it was made."""

    parts: Annotated[list[CheckpointPart], Meta(min_length=1)]
    step: Count | None = None
    epoch: float | None = None
    samples: float | None = None
    metrics: dict[str, float | None] = {}

    @property
    def size(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def digest(self) -> str:
        """Return a sum over all parts: of a single one, its sha256."""
        if len(self.parts) == 1:
            return self.parts[0].sha256
        lines = sorted(f"{part.name} {part.sha256}" for part in self.parts)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


Entries = dict[str, CheckpointEntry]


class Manifest(Struct, kw_only=True):
    """The checkpoints of a folder by name, oldest first, or why they were removed."""

    format: int = FORMAT
    checkpoints: Entries
    removed: str = ""


class _Format(Struct):
    format: int = FORMAT


log = logging.getLogger(__name__)


def step_name(step: int, is_folder: bool = False) -> str:
    """Return the name of a checkpoint."""
    return f"step-{step:06d}{'' if is_folder else SUFFIX}"


P = TypeVar("P", bound=PurePath)


def files_of(path: P, entry: CheckpointEntry) -> list[tuple[P, CheckpointPart]]:
    """Return the files of a checkpoint, a file or a folder, each with what the manifest says of it."""
    return [(path if path.suffix == SUFFIX else path / part.name, part) for part in entry.parts]


def state_file(path: Path) -> Path:
    """Return the file that torch reads of a checkpoint."""
    return path / STATE if (path / STATE).is_file() else path


def named_checkpoint(path: Path) -> Path:
    """Return the folder of a checkpoint that a path means: as last.pt or best.pt, or by its part state.pt."""
    with contextlib.suppress(CheckpointError):  # told where the manifest is read next
        if path.name == STATE and is_checkpoint(path.parent):
            return path.parent
        if path.name not in ALIASES or path.exists():
            return path
        entries = read_manifest(path.parent)
        steps = same_as(entries, path.name, newest_first(entries))
        return next((step for name in steps if (step := path.parent / name).exists()), path)
    return path


def is_checkpoint(path: Path) -> bool:
    """Return whether a path names a checkpoint, which may be missing, and not a folder of checkpoints."""
    if path.is_file() or (path.suffix == SUFFIX and not path.is_dir()):
        return True
    if STEP.fullmatch(path.name) is None:  # a copy has any name
        return all((path / part).is_file() for part in (STATE, METADATA))
    return (path / STATE).is_file() or path.name in read_manifest(path.parent)


def read_manifest(folder: Path) -> Entries:
    """Return the entries of a checkpoints folder by name, oldest first; none without a manifest."""
    path = folder / NAME
    try:
        return decode_manifest(path.read_bytes()).checkpoints
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); to go on without it, move it away"
        ) from None


def decode_manifest(content: bytes) -> Manifest:
    """Read a manifest; raise ValueError if it is none, or of another format."""
    try:
        if (number := msgspec.json.decode(content, type=_Format).format) != FORMAT:
            raise ValueError(f"it has format {number}, and this version of ddp_hydra reads format {FORMAT}")
        return msgspec.json.decode(content, type=Manifest)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def encode_manifest(entries: Entries, removed: str = "") -> bytes:
    """Return the content of a manifest; `removed` is why all checkpoints were removed, if they were."""
    content = to_builtins(Manifest(checkpoints=entries, removed=removed))
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def name_in_store(name: str, entry: CheckpointEntry) -> str:
    """Return the name of a checkpoint in a store, which none with another content ever gets."""
    match = STEP.fullmatch(name)
    assert match is not None
    return f"step-{match[1]}-{entry.digest:.12}{match[3] or ''}"


def newest_first(entries: Entries) -> list[str]:
    """Return the names of the checkpoints but for aliases, the one that was written last first."""
    return [name for name in reversed(entries) if STEP.fullmatch(name)]


def readable_steps(folder: Path) -> Entries:
    """Return the checkpoints of a folder but for aliases, the newest first; none if its manifest cannot be read."""
    with contextlib.suppress(CheckpointError):
        entries = read_manifest(folder)
        return {name: entries[name] for name in newest_first(entries)}
    return {}


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run has left a checkpoint. What a kill has cut off before the manifest is none."""
    folder = run_dir / FOLDER
    found = [path for path in folder.glob("*") if path.suffix == SUFFIX or STEP.fullmatch(path.name)]
    if not found or (folder / NAME).is_file():
        return bool(found)
    return any(not STEP.fullmatch(path.name) or torn(path) is None for path in found)


def find_checkpoint(path: str | Path, which: str = "last") -> Path:
    """Return the checkpoint that a user means, a file or a folder.

    Where the last one of a run is damaged, it is the newest whole one before it, with a warning in the log. The
    best one has no substitute, and neither has one that is given by its name. Size and sha256 are compared with the
    manifest, where the checkpoint is in one.

    Args:
        path: a run directory, its `checkpoints` folder, or a checkpoint.
        which: the one to take of a run directory, "last" or "best".
    """
    given = Path(path)
    if given.is_symlink() and not given.exists():
        raise CheckpointError(f"{given} is a link to {os.readlink(given)}, which leads nowhere: give a run directory")  # noqa: PTH115
    if not given.exists():
        parent = next((folder for folder in given.parents if folder.is_dir()), Path())
        listed = f"in {parent} there is {_listing(parent)}"
        raise CheckpointError(f"{given} does not exist{text.after(text.meant_path(given), listed)}")
    if is_checkpoint(given):
        file = given
    elif which == "last":
        return _newest_whole(_folder_of(given))
    else:
        file = _named(_folder_of(given), which)
    _verify(file)
    return file


def _folder_of(given: Path) -> Path:
    folder = given if given.name == FOLDER or (given / NAME).is_file() else given / FOLDER
    if folder.is_dir():
        return folder
    if (given / ".hydra").is_dir():
        raise CheckpointError(
            f"run directory {given} has no checkpoints: the run ended before its first one, or has not come to it yet; "
            f"found {_listing(given)}"
        )
    if (given / "multirun.yaml").is_file():
        raise CheckpointError(f"{given} is a sweep: give the run directory of one of its jobs, {given / '0'}")
    raise CheckpointError(
        f"{given} is not a run directory (it has no {FOLDER}/): found {_listing(given)}; give a run directory"
    )


def _named(folder: Path, which: str) -> Path:
    """Return last.pt or best.pt, or the checkpoint of a step that is the same where there is no such file."""
    file = folder / f"{which}{SUFFIX}"
    if file.is_file():
        return file
    entries = read_manifest(folder)
    steps = [name for name in newest_first(entries) if (folder / name).exists()]
    if which == "best":
        steps = same_as(entries, BEST, steps)
    if steps:  # the writer was stopped between a step file and the name, or the folder comes from a bucket
        return folder / steps[0]
    with contextlib.suppress(OSError, ValueError):
        if reason := decode_manifest((folder / NAME).read_bytes()).removed:
            raise CheckpointError(f"the checkpoints in {folder} were removed: {reason}")
    advice = f"; for the last one type which=last, or give {folder / LAST}" if LAST in entries else ""
    raise CheckpointError(f"{folder} has no {file.name}: found {_listing(folder)}{advice}")


def same_as(entries: Entries, alias: str, names: Iterable[str]) -> list[str]:
    """Return which of some checkpoints are the one that an alias names."""
    meant = entries.get(alias)
    return [name for name in names if meant and entries[name].digest == meant.digest]


def _newest_whole(folder: Path) -> Path:
    """Return the newest checkpoint that is whole.

    A name may be one move ahead of its entry in the manifest, or one behind, so each entry is looked for under
    every name.
    """
    entries, sums = read_manifest(folder), Sums()
    steps = newest_first(entries)
    unlisted = _newest_unlisted(folder, entries) if steps or not (folder / LAST).is_file() else None
    if unlisted is not None:
        log.warning("checkpoint %s is newer than the manifest and whole: using it", unlisted)
        return unlisted
    if not steps:
        file = _named(folder, "last")
        _verify(file)
        return file
    newest, wanted = folder / steps[0], entries[steps[0]]
    for step in steps:
        for file in (folder / LAST, folder / step, folder / BEST):
            if damage(file, entries[step], sums) is None:
                if step != newest.name:
                    said = "checkpoint %s is damaged: %s; using the newest whole one before it, %s"
                    log.warning(said, newest, damage(newest, wanted, sums), file)
                return file
    reason = damage(newest, wanted, sums)
    raise CheckpointError(f"checkpoint {newest} is damaged: {reason}; no whole checkpoint from before it is left")


def _newest_unlisted(folder: Path, entries: Entries) -> Path | None:
    """Return a whole file that no entry names and that is newer than those that have one, if there is one.

    Its writer was stopped before the manifest named it, or the manifest is an older one. One that is older was
    only not removed in time.
    """
    listed = [folder / name for name in newest_first(entries) if (folder / name).exists()]
    newest = max((file.stat().st_mtime_ns for file in listed), default=0)
    steps = [file for file in folder.iterdir() if STEP.fullmatch(file.name) and file.name not in entries]
    found = {file: file.stat().st_mtime_ns for file in steps if file.is_file()}
    for file in sorted(found, key=lambda file: (found[file], file.name), reverse=True):
        if found[file] > newest:
            if (reason := torn(file)) is None:
                return file
            log.warning("checkpoint %s is newer than the manifest, but %s: it is left out", file, reason)
    return None


def torn(file: Path) -> str | None:
    """Say what is wrong with a checkpoint that no manifest describes; None where its own sums are right."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except Exception as error:  # zipfile raises about anything here
        return f"not whole ({str(error) or type(error).__name__})"
    return f"its part {bad} is damaged" if bad else None


def _verify(file: Path) -> None:
    entries, sums = read_manifest(file.parent), Sums()
    wanted = entries.get(file.name)
    reason = damage(file, wanted, sums) if wanted is not None else None
    # A name may be one move ahead of its entry; it is whole if it is any file of the manifest.
    is_other = reason and file.name in ALIASES and any(damage(file, one, sums) is None for one in entries.values())
    if wanted is None and file.is_dir() and STEP.fullmatch(file.name) and (file.parent / NAME).is_file():
        raise CheckpointError(f"checkpoint {file} is not whole: {NAME} does not name it, so its save was cut off")
    if wanted is None or reason is None or is_other:
        return
    raise CheckpointError(f"checkpoint {file} is damaged: {reason}; {_instead(file, wanted, entries)}")


Sums = dict[tuple[int, int], str]
"""sha256 by device and inode: last.pt and its step file are one file, and large."""


def damage(path: Path, wanted: CheckpointEntry, sums: Sums | None = None) -> str | None:
    """Say how a checkpoint differs from its entry in a manifest; None if it does not. `sums` are filled."""
    for file, part in files_of(path, wanted):
        if (reason := difference(file, part, sums)) is not None:
            return reason if file == path else f"of its part {part.name}: {reason}"
    return None


def difference(file: Path, wanted: CheckpointPart, sums: Sums | None = None) -> str | None:
    """Say how a file differs from what the manifest says of it; None if it does not. Arguments: see `damage`."""
    try:
        with file.open("rb") as content:
            found = os.fstat(content.fileno())
            if found.st_size != wanted.size:
                return f"it has {found.st_size} bytes, the manifest says {wanted.size}"
            sums = {} if sums is None else sums
            inode = (found.st_dev, found.st_ino)
            if inode not in sums:
                sums[inode] = hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    digest = sums[inode]
    if digest != wanted.sha256:
        return f"its sha256 is {digest[:12]}…, the manifest says {wanted.sha256[:12]}…"
    return None


def _instead(file: Path, wanted: CheckpointEntry, entries: Entries) -> str:
    """Name the newest whole checkpoint that is no later than the damaged one."""
    for name, entry in reversed(entries.items()):
        earlier = wanted.step is None or entry.step is None or entry.step <= wanted.step
        if name.startswith("step-") and name != file.name and earlier:
            other = file.parent / name
            if damage(other, entry) is None:
                return f"use the one before it, {other}"
    return "no whole checkpoint from before it is left"


def _listing(folder: Path) -> str:
    limit = 8
    try:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    except OSError as error:
        return f"nothing that can be read ({error.strerror})"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "nothing, it is empty"


prepare(_Format, Manifest)
