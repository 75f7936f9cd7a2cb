"""Bring the file of a record into the run directory: complete and verified, or not at all."""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path

from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record
from ddp_hydra.storage.files import cannot_write, part_of, passing, sync, writing
from ddp_hydra.writers.base import Fetch

_PIECE = 2**20


class Incoming:
    """Brings the files of records into a run directory, one after the other.

    A record whose file could not be put down may come again. What was fetched is kept for that, because nobody
    else may have it any more.

    Args:
        fetch: brings content that is not inline.
    """

    def __init__(self, fetch: Fetch | None) -> None:
        self._fetch = fetch
        self._record: Record | None = None  # the one that came last
        self._part: Path | None = None  # its content, fetched but without its name
        self._in_place = False

    def receive(self, record: Record, target: Path) -> None:
        """Put a file record's content at `target`, replacing an older file in one move.

        Args:
            record: of kind 'file'; one that was received before is not fetched again.
            target: in a folder that exists.

        Raises:
            RecordError: the content does not come, is not what the record says, or cannot be written. What was
                at `target` before is as it was.
        """
        if record is not self._record:
            self.drop()
            self._record, self._in_place = record, False
        try:
            if not self._in_place:
                self._bring(record, target)
            with writing(target):
                sync(target.parent)
        except BaseException as error:
            if record.data.get("inline") is not None or passing(error) is None:
                self.drop()
            raise

    def drop(self) -> None:
        """Forget the last record, and what was fetched of it in vain."""
        part, self._part, self._record = self._part, None, None
        if part is not None:
            _remove(part)

    def _bring(self, record: Record, target: Path) -> None:
        if self._part is None:
            part = part_of(target)
            try:
                if record.data.get("inline") is not None:
                    _write_inline(record, part, target)
                else:
                    _fetch(record, part, target, self._fetch)
            except BaseException:
                _remove(part)
                raise
            self._part = part
        else:  # after a failed fsync, the kernel takes for written what is not
            with writing(target):
                _write_anew(self._part)
        with writing(target):
            _verify(record, self._part)
            sync(self._part)
            self._part.replace(target)
        self._part, self._in_place = None, True


def _write_inline(record: Record, part: Path, target: Path) -> None:
    try:
        content = base64.b64decode(record.data["inline"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{_name(record)} did not arrive whole: its content is not base64 ({error})") from None
    with writing(target):
        part.write_bytes(content)


def _fetch(record: Record, part: Path, target: Path, fetch: Fetch | None) -> None:
    source = record.data.get("source")
    if fetch is None or source is None:
        raise RecordError(f"{_name(record)} came without content, and nothing here can bring it")
    try:
        fetch(record, part)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = str(target)
            raise cannot_write(target, error) from error
        raise RecordError(
            f"{_name(record)} ({record.data['size']} bytes) cannot be brought from its host: {error}"
        ) from error


def _remove(part: Path) -> None:
    """Best effort: whoever calls has something more important to say."""
    with contextlib.suppress(OSError):
        part.unlink()


def _write_anew(part: Path) -> None:
    """Write a file's content over itself."""
    with part.open("r+b") as file:
        while piece := file.read(_PIECE):
            file.seek(-len(piece), os.SEEK_CUR)
            file.write(piece)
            file.seek(0, os.SEEK_CUR)  # between a write and a read


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
