"""Which checkpoints a run has, and whether one is whole: for resume, evaluate and generate.

`checkpoints/manifest.json` has one entry per file: size in bytes, sha256, and the step, epoch, samples and
metrics it was made at. Needs no torch and no writer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from ddp_hydra.errors import CheckpointError

FOLDER = "checkpoints"
NAME = "manifest.json"
ALIASES = ("last.pt", "best.pt")
Entries = dict[str, dict[str, Any]]


def read_manifest(folder: Path) -> Entries:
    """Return the entries of a checkpoints folder by file name, oldest first; none without a manifest.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    path = folder / NAME
    try:
        files = json.loads(path.read_text())["files"]
        if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
            raise ValueError("'files' is no table of entries")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); to go on without checking sizes and "
            "sums, move it away"
        ) from None
    return files


def write_manifest_text(entries: Entries) -> bytes:
    """Return the content of a manifest."""
    return (json.dumps({"version": 1, "files": entries}, indent=1, allow_nan=False) + "\n").encode()


def find_checkpoint(path: str | Path, which: Literal["last", "best"] = "last", *, verify: bool = True) -> Path:
    """Return the checkpoint file that a user means.

    Args:
        path: a run directory, its `checkpoints` folder, or a checkpoint file.
        which: the one to take of a run directory.
        verify: compare size and sha256 with the manifest, where the file is in one.

    Raises:
        CheckpointError: there is none, or it is damaged. The message says what was found and what to use.
    """
    given = Path(path)
    if not given.exists():
        raise CheckpointError(f"{given} does not exist; {_nearest(given)}")
    file = given if given.is_file() else _of_run(given, which)
    if verify:
        _verify(file)
    return file


def _of_run(given: Path, which: str) -> Path:
    folder = given if given.name == FOLDER or (given / NAME).is_file() else given / FOLDER
    if not folder.is_dir():
        if (given / ".hydra").is_dir():
            raise CheckpointError(
                f"run directory {given} has no checkpoints: the run ended before its first one; found {_listing(given)}"
            )
        raise CheckpointError(
            f"{given} is not a run directory (it has no {FOLDER}/): found {_listing(given)}; give a run "
            "directory, for example outputs/<date>/<time>, or a checkpoint file"
        )
    file = folder / f"{which}.pt"
    if file.is_file():
        return file
    steps = [name for name in read_manifest(folder) if name.startswith("step-") and (folder / name).is_file()]
    if which == "last" and steps:  # the writer was stopped between a step file and the name
        return folder / steps[-1]
    raise CheckpointError(f"{folder} has no {which}.pt: found {_listing(folder)}")


def _verify(file: Path) -> None:
    entries = read_manifest(file.parent)
    wanted = entries.get(file.name)
    if wanted is None:
        return
    reason = _damage(file, wanted)
    if reason is None:
        return
    # A name may be one move ahead of its entry; it is whole if it is any file of the manifest.
    if file.name in ALIASES and any(_damage(file, entry) is None for entry in entries.values()):
        return
    raise CheckpointError(f"checkpoint {file} is damaged: {reason}; {_instead(file, wanted, entries)}")


def _damage(file: Path, wanted: dict[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != wanted.get("size"):
            return f"it has {size} bytes, the manifest says {wanted.get('size')}"
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if digest != wanted.get("sha256"):
        return f"its sha256 is {digest[:12]}…, the manifest says {str(wanted.get('sha256'))[:12]}…"
    return None


def _instead(file: Path, wanted: dict[str, Any], entries: Entries) -> str:
    """Name the newest whole checkpoint that is no later than the damaged one."""
    limit = wanted.get("step")
    for name, entry in reversed(entries.items()):
        step = entry.get("step")
        earlier = not isinstance(limit, int) or not isinstance(step, int) or step <= limit
        if name.startswith("step-") and name != file.name and earlier:
            other = file.parent / name
            if _damage(other, entry) is None:
                return f"use the one before it, {other}"
    return "no whole checkpoint from before it is left"


def _listing(folder: Path, limit: int = 8) -> str:
    try:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    except OSError as error:
        return f"nothing that can be read ({error.strerror})"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "nothing, it is empty"


def _nearest(path: Path) -> str:
    parent = next((folder for folder in path.parents if folder.is_dir()), Path())
    return f"{parent} has {_listing(parent)}"
