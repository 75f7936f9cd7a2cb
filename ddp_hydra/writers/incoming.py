"""Bring the file of a record into the run directory: complete and verified, or not at all."""

from __future__ import annotations

import base64
import binascii
import hashlib
import stat
from pathlib import Path

from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record
from ddp_hydra.writers import Fetch
from ddp_hydra.writers.disk import commit, part_of, writing


def receive(record: Record, target: Path, fetch: Fetch | None) -> None:
    """Put a file record's content at `target`, replacing an older file in one move.

    Args:
        record: of kind 'file'.
        target: in a folder that exists.
        fetch: brings content that is not inline.

    Raises:
        RecordError: the content does not come, is not what the record says, or cannot be written. What was at
            `target` before is as it was.
    """
    part = part_of(target)
    try:
        if record.data.get("inline") is not None:
            _write_inline(record, part, target)
        else:
            _fetch(record, part, fetch)
        with writing(target):
            _verify(record, part)
            commit(part, target)
    finally:
        with writing(target):
            part.unlink(missing_ok=True)


def _write_inline(record: Record, part: Path, target: Path) -> None:
    try:
        content = base64.b64decode(record.data["inline"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{_name(record)} did not arrive whole: its content is not base64 ({error})") from None
    with writing(target):
        part.write_bytes(content)


def _fetch(record: Record, part: Path, fetch: Fetch | None) -> None:
    source = record.data.get("source")
    if fetch is None or source is None:
        raise RecordError(f"{_name(record)} came without content, and nothing here can bring it")
    try:
        fetch(record, part)
    except OSError as error:
        raise RecordError(
            f"{_name(record)} ({record.data['size']} bytes) cannot be brought from its host: {error}"
        ) from error


def _verify(record: Record, part: Path) -> None:
    wanted = record.data
    try:
        found = part.lstat()
    except FileNotFoundError:
        raise RecordError(f"{_name(record)} did not arrive: {wanted['size']} bytes were announced") from None
    if not stat.S_ISREG(found.st_mode):
        raise RecordError(f"{_name(record)} is not a plain file")
    if found.st_size != wanted["size"]:
        raise RecordError(
            f"{_name(record)} did not arrive whole: {found.st_size} bytes of {wanted['size']}; what was "
            "there before is kept"
        )
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted["sha256"].lower():
        raise RecordError(
            f"{_name(record)} was changed on its way: sha256 {digest[:12]}… instead of "
            f"{wanted['sha256'][:12]!a}…; what was there before is kept"
        )


def _name(record: Record) -> str:
    return f"file {record.data['path']!r} of rank {record.rank}"
