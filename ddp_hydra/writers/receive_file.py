"""Receives the file of a record into the run directory: complete and verified, or not at all."""

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
from ddp_hydra.record import File, Record
from ddp_hydra.storage.files import cannot_write, part_of, passing, sync, writing
from ddp_hydra.writers.base import Fetch

_PIECE = 2**20


class FileReceiver:
    """Receives the files of records into a run directory, one after the other.

    A record whose file could not be written may come again. The fetched content is kept for that, because its sender
    may have deleted it.

    Args:
        fetch: copies content that is not inline.
    """

    def __init__(self, fetch: Fetch | None) -> None:
        self._fetch = fetch
        self._record: Record | None = None  # the last record
        self._part: Path | None = None  # its content, fetched but not yet renamed
        self._in_place = False

    def receive(self, record: Record, target: Path) -> None:
        """Write a file record's content to `target`, replacing an older file atomically.

        Args:
            record: a record of kind 'file'; if it has been received before, it is not fetched again.
            target: destination, in a folder that exists.

        Raises:
            RecordError: the content does not arrive, differs from what the record announces, or cannot be written. An
                older file at `target` is unchanged then.
        """
        if record is not self._record:
            self.drop()
            self._record, self._in_place = record, False
        try:
            if not self._in_place:
                self._place(record, target)
            with writing(target):
                sync(target.parent)
        except BaseException as error:
            if _file(record).inline is not None or passing(error) is None:
                self.drop()
            raise

    def drop(self) -> None:
        """Forget the last record, and delete its content if that is not in place."""
        part, self._part, self._record = self._part, None, None
        if part is not None:
            _remove(part)

    def _place(self, record: Record, target: Path) -> None:
        if self._part is None:
            part = part_of(target)
            try:
                if _file(record).inline is not None:
                    _write_inline(record, part, target)
                else:
                    _fetch(record, part, target, self._fetch)
            except BaseException:
                _remove(part)
                raise
            self._part = part
        else:  # after a failed fsync, the kernel may regard unwritten pages as written
            with writing(target):
                _rewrite(self._part)
        with writing(target):
            _verify(record, self._part)
            sync(self._part)
            self._part.replace(target)
        self._part, self._in_place = None, True


def _write_inline(record: Record, part: Path, target: Path) -> None:
    try:
        content = base64.b64decode(_file(record).inline or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{_name(record)} did not arrive whole: its content is not base64 ({error})") from None
    with writing(target):
        part.write_bytes(content)


def _fetch(record: Record, part: Path, target: Path, fetch: Fetch | None) -> None:
    if fetch is None or _file(record).source is None:
        raise RecordError(f"{_name(record)} came without content, and nothing here can fetch it")
    try:
        fetch(record, part)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = str(target)
            raise cannot_write(target, error) from error
        raise RecordError(
            f"{_name(record)} ({_file(record).size} bytes) cannot be fetched from its host: {error}"
        ) from error


def _remove(part: Path) -> None:
    """Delete a file if possible: the caller has a more important error to raise."""
    with contextlib.suppress(OSError):
        part.unlink()


def _rewrite(part: Path) -> None:
    """Write a file's content over itself, so that the kernel writes it to the disk again."""
    with part.open("r+b") as file:
        while piece := file.read(_PIECE):
            file.seek(-len(piece), os.SEEK_CUR)
            file.write(piece)
            file.seek(0, os.SEEK_CUR)  # required between a write and a read


def _verify(record: Record, part: Path) -> None:
    announced = _file(record)
    try:
        found = part.lstat()
    except FileNotFoundError:
        raise RecordError(f"{_name(record)} did not arrive: {announced.size} bytes were announced") from None
    if not stat.S_ISREG(found.st_mode):
        raise RecordError(f"{_name(record)} is not a plain file")
    if found.st_size != announced.size:
        raise RecordError(
            f"{_name(record)} did not arrive whole: {found.st_size} bytes of {announced.size}; what was "
            "there before is kept"
        )
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != announced.sha256.lower():
        raise RecordError(
            f"{_name(record)} was changed on its way: sha256 {digest[:12]}… instead of "
            f"{announced.sha256[:12]!a}…; what was there before is kept"
        )


def _name(record: Record) -> str:
    return f"file {_file(record).path!r} of rank {record.rank}"


def _file(record: Record) -> File:
    assert isinstance(record.data, File)
    return record.data
