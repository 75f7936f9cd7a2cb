"""Writes what ranks send to files: metrics.jsonl, logs/rank-<r>.log, files that they submit, and checkpoints/.

The order of the steps makes an interruption at any moment safe: a file is complete and verified before it gets its
name, a checkpoint has its name before the manifest names it, the manifest names it before last.pt and best.pt move to
it, and only then are older files deleted. The parts of a checkpoint in a folder are collected in a hidden folder, which
gets its name when all have arrived.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

from ddp_hydra.console.text import size_text
from ddp_hydra.errors import DdpHydraError, RecordError
from ddp_hydra.record import (
    Checkpoint,
    File,
    Log,
    Metrics,
    Record,
    RolledBack,
    Start,
    check_path,
    check_submitted,
)
from ddp_hydra.results import finite
from ddp_hydra.storage.files import (
    AppendFile,
    cannot_write,
    link_or_copy,
    part_of,
    passing,
    prepared_path,
    remove,
    remove_parts,
    replacing,
    sync,
    write_atomic,
    writing,
)
from ddp_hydra.storage.manifest import (
    ALIASES,
    BEST,
    FOLDER,
    LAST,
    NAME,
    PART,
    STATE,
    STEP,
    CheckpointEntry,
    CheckpointPart,
    Entries,
    encode_manifest,
    name_in_store,
    newest_first,
    read_manifest,
    same_as,
    step_name,
)
from ddp_hydra.storage.retry import FULL
from ddp_hydra.writers.run_dir import FIELDS, json_object, metric_of_line, name_in_line

Fetch = Callable[[Record, Path], None]
"""Copies the content of a file record's `source` to a path that does not exist yet."""
_PIECE = 2**20
_LINE = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class FileReceiver:
    """Receives the files of records into a run directory, one after the other.

    A record whose file could not be written may come again. The fetched content is kept for that: its sender may have
    deleted it.
    """

    def __init__(self, fetch: Fetch | None) -> None:
        self._fetch = fetch
        self._record: Record | None = None  # the last record
        self._part: Path | None = None  # its content, fetched but not yet renamed
        self._in_place = False

    def receive(self, record: Record, target: Path) -> None:
        """Write a record's file to `target`, replacing an older file atomically, which stays if that fails."""
        file = record.data
        assert isinstance(file, File)
        name = f"file {file.path!r} of rank {record.rank}"
        if record is not self._record:
            self.drop()
            self._record, self._in_place = record, False
        try:
            if not self._in_place:
                self._place(record, file, name, target)
            with writing(target):
                sync(target.parent)
        except BaseException as error:
            if file.inline is not None or passing(error) is None:
                self.drop()
            raise

    def drop(self) -> None:
        part, self._part, self._record = self._part, None, None
        if part is not None:
            _remove(part)

    def _place(self, record: Record, file: File, name: str, target: Path) -> None:
        if self._part is None:
            part = part_of(target)
            try:
                self._load(record, file, name, part, target)
            except BaseException:
                _remove(part)
                raise
            self._part = part
        else:  # after a failed fsync, the kernel may regard unwritten pages as written
            with writing(target), self._part.open("r+b") as content:
                while piece := content.read(_PIECE):
                    content.seek(-len(piece), os.SEEK_CUR)
                    content.write(piece)
                    content.seek(0, os.SEEK_CUR)  # required between a write and a read
        with writing(target):
            _verify(file, name, self._part)
            sync(self._part)
            self._part.replace(target)
        self._part, self._in_place = None, True

    def _load(self, record: Record, file: File, name: str, part: Path, target: Path) -> None:
        if file.inline is not None:
            try:
                content = base64.b64decode(file.inline, validate=True)
            except (binascii.Error, ValueError) as error:
                raise RecordError(f"{name} did not arrive whole: its content is not base64 ({error})") from None
            with writing(target):
                part.write_bytes(content)
            return
        if self._fetch is None or file.source is None:
            raise RecordError(f"{name} came without content, and nothing here can fetch it")
        try:
            self._fetch(record, part)
        except OSError as error:
            if error.errno in FULL:
                error.filename = str(target)
                raise cannot_write(target, error) from error
            raise RecordError(f"{name} ({file.size} bytes) cannot be fetched from its host: {error}") from error


def _remove(part: Path) -> None:
    """Delete a file if possible: the caller has a more important error to raise."""
    with contextlib.suppress(OSError):
        part.unlink()


def _verify(file: File, name: str, part: Path) -> None:
    try:
        found = part.lstat()
    except FileNotFoundError:
        raise RecordError(f"{name} did not arrive: {file.size} bytes were announced") from None
    if not stat.S_ISREG(found.st_mode):
        raise RecordError(f"{name} is not a plain file")
    if found.st_size != file.size:
        raise RecordError(f"{name} did not arrive whole: {found.st_size} bytes of {file.size}; the one before is kept")
    with part.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256.lower():
        raise RecordError(f"{name} was changed on its way: its sha256 is {digest[:12]}…; the one before is kept")


SUBMITTED = "submitted.txt"
"""Paths of the files that ranks have submitted, one a line: `runs rm` removes these."""


class FileWriter:
    """Writes each submitted file into the run directory; another writer handles checkpoints."""

    def __init__(self, run_dir: Path, fetch: Fetch | None = None) -> None:
        self._run_dir = run_dir
        self._receiver = FileReceiver(fetch)
        self._listed: set[str] | None = None

    def write(self, record: Record) -> None:
        if not isinstance(record.data, File) or record.checkpoint is not None:
            return
        path = check_submitted(record.data.path, record.rank)
        self._receiver.receive(record, prepared_path(self._run_dir, path))
        self._list(str(path))

    def _list(self, path: str) -> None:
        file = self._run_dir / SUBMITTED
        if self._listed is None:
            self._listed = set(file.read_text().split("\n")) if file.exists() else set()
        if path not in self._listed:
            with writing(file), file.open("a") as listed:
                listed.write(f"{path}\n")
            self._listed.add(path)

    def close(self) -> None:
        self._receiver.drop()


@dataclass
class _Save:
    """A checkpoint in a folder whose parts are arriving."""

    folder: Path
    parts: dict[str, CheckpointPart] = field(default_factory=dict)
    announced: Checkpoint | None = None
    name: str = ""


class CheckpointWriter:
    """Keeps a run's checkpoints; a manifest that is there already is continued.

    Args:
        keep: newest checkpoints to keep, besides those that last.pt and best.pt name; None keeps all.
        keep_every: also keep the first checkpoint after each multiple of this number of steps.
        is_stored: the checkpoints are in a store, too; those that the manifest names need not be in the folder.
    """

    def __init__(
        self,
        run_dir: Path,
        fetch: Fetch | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        is_stored: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._receiver = FileReceiver(fetch)
        self._keep, self._keep_every = keep, keep_every
        self._folder = run_dir / FOLDER
        self._attempt = 0
        self._saves: dict[int, _Save] = {}  # of this attempt, by their numbers
        self._outdated: set[str] = set()
        present = self._folder.is_dir() and not self._folder.is_symlink()
        old = read_manifest(self._folder) if present else {}
        there = [name for name in old if is_stored or (self._folder / name).exists()]
        there += [alias for alias in ALIASES if alias not in there and same_as(old, alias, there)]
        self._entries = {name: entry for name, entry in old.items() if name in there}
        if present:
            with writing(self._folder):
                remove_parts(self._folder)
                for path in self._folder.iterdir():
                    if STEP.fullmatch(path.name) and path.is_dir() and path.name not in old:
                        remove(path)  # without an entry it is none

    def write(self, record: Record) -> None:
        if record.attempt > self._attempt:
            self._attempt = record.attempt
            self._drop_saves()
        file, checkpoint = record.data, record.checkpoint
        if isinstance(file, Start):
            if not any((self._folder / name).exists() for name in self._entries):
                self._check_space(file.checkpoint_bytes)
            self._go_back(record.step or 0, file.best)
        if not isinstance(file, File) or checkpoint is None:
            return
        name, part_name = _names(file.path, checkpoint.step, record.rank)
        part = CheckpointPart(name=part_name or name, size=file.size, sha256=file.sha256.lower(), rank=record.rank)
        if not part_name:
            self._receiver.receive(record, prepared_path(self._run_dir, f"{FOLDER}/{name}"))
            self._enter(name, [part], checkpoint)
        elif record.attempt == self._attempt:
            self._receive_part(record, part, checkpoint)

    def _go_back(self, step: int, best: dict[str, float]) -> None:
        """Name the checkpoint from which a run goes on as the last one, unless it is.

        Those of later steps stay until the next save, as the oldest ones: the run may fail before it.
        """
        entries, names = self._entries, newest_first(self._entries)
        steps = {name: entry.step or 0 for name, entry in entries.items()}
        before = [name for name in names if steps[name] <= step]
        begun = max(before, key=steps.__getitem__, default="")
        if not before or (begun == names[0] and all(steps.get(alias, 0) <= step for alias in ALIASES)):
            return
        # Checkpoints after the best one tell its value, too, until the next validation.
        same = [name for name in before if best and best.items() <= entries[name].metrics.items()]
        aliases = {LAST: begun}
        if same or steps.get(BEST, 0) > step:
            aliases[BEST] = min(same, key=steps.__getitem__, default=begun)
        order = sorted(entries, key=lambda name: (name in before, name == begun))
        self._save(self._with_aliases(aliases, {name: entries[name] for name in order}))

    def _check_space(self, size: int) -> None:
        free, needed = shutil.disk_usage(self._run_dir).free, 2 * size
        if free < needed:
            raise DdpHydraError(
                f"{self._run_dir}: {size_text(free)} are free, and two checkpoints of about {size_text(size)} have to "
                f"fit: free {size_text(needed - free)} there, or give another place by hydra.run.dir=<folder>"
            )

    def _receive_part(self, record: Record, part: CheckpointPart, checkpoint: Checkpoint) -> None:
        save = self._saves.setdefault(checkpoint.number, _Save(part_of(self._folder / STATE)))
        if part.name not in save.parts:
            self._receiver.receive(record, prepared_path(self._run_dir, f"{FOLDER}/{save.folder.name}/{part.name}"))
            save.parts[part.name] = part
        if checkpoint.parts:
            save.announced = checkpoint
        if save.announced is None:
            return
        for one in save.parts.values():
            if save.announced.parts.get(one.name) != one.rank:
                raise RecordError(
                    f"rank {one.rank} sent {one.name!r} of step {checkpoint.step}, which is not to be a part of it"
                )
        if save.parts.keys() == save.announced.parts.keys():
            parts = [save.parts[name] for name in sorted(save.parts)]
            self._place(save, parts, checkpoint.step)
            self._enter(save.name, parts, save.announced)
            del self._saves[checkpoint.number]

    def _place(self, save: _Save, parts: list[CheckpointPart], step: int) -> None:
        """Give the folder of a complete checkpoint its name, which another one of the step may have."""
        name = step_name(step, is_folder=True)
        if not save.name and (self._folder / name).exists():
            name = name_in_store(name, CheckpointEntry(parts=parts))
        with writing(self._folder / name):
            if not save.name and (self._folder / name).exists():  # it has the same content
                remove(save.folder)
            elif not save.name:
                save.folder.replace(self._folder / name)
            save.name = save.name or name
            sync(self._folder)

    def _enter(self, name: str, parts: list[CheckpointPart], checkpoint: Checkpoint) -> None:
        """Enter a checkpoint that is there into the manifest, and remove those that are too many then."""
        self._outdated.discard(name)
        # After a rollback, a name may come again; then it is the newest.
        entries = {known: entry for known, entry in self._entries.items() if known != name}
        entries[name] = CheckpointEntry(
            parts=parts,
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            samples=checkpoint.samples,
            metrics=finite(checkpoint.metrics),
        )
        entries = self._with_aliases(dict.fromkeys(ALIASES if checkpoint.best else ALIASES[:1], name), entries)
        outdated = self._outdated_by(name, entries)
        self._save({known: entry for known, entry in entries.items() if known not in outdated})
        self._outdated.update(outdated)
        for name in sorted(self._outdated):
            with writing(self._folder / name):
                remove(self._folder / name)
            self._outdated.discard(name)

    def _with_aliases(self, aliases: dict[str, str], entries: Entries) -> Entries:
        """Save the manifest, then give checkpoints of it other names, which the returned entries have, too."""
        self._save(entries)
        for alias, name in aliases.items():
            with writing(self._folder / alias):
                if (self._folder / name).is_file():
                    with replacing(self._folder / alias) as link:
                        link_or_copy(self._folder / name, link)
                else:  # it is a folder, or in a store
                    (self._folder / alias).unlink(missing_ok=True)
        return entries | {alias: entries[name] for alias, name in aliases.items()}

    def close(self) -> None:
        self._receiver.drop()
        self._drop_saves()

    def _drop_saves(self) -> None:
        """Remove the parts of checkpoints that are never complete: a rank has ended before it has sent its own."""
        for save in self._saves.values():
            shutil.rmtree(save.folder, ignore_errors=True)
        self._saves.clear()

    def _save(self, entries: Entries) -> None:
        write_atomic(self._folder / NAME, encode_manifest(entries))
        self._entries = dict(entries)

    def _outdated_by(self, newest: str, entries: Entries) -> list[str]:
        """Return checkpoints that are too many, or of no earlier steps than newer ones: a run has gone back since."""
        if self._keep is None:
            return []
        named = {entries[alias].digest for alias in ALIASES if alias in entries}
        numbers = {name: entry.step or 0 for name, entry in entries.items() if STEP.fullmatch(name)}
        kept = {*list(numbers)[-self._keep :], *self._for_good(numbers)}
        least = list(accumulate(reversed(numbers.values()), min))[::-1][1:]  # of the steps of newer ones
        left = {name for (name, step), other in zip(numbers.items(), least, strict=False) if step >= other}
        old = [name for name in numbers if name not in kept or name in left]
        return [name for name in old if name != newest and entries[name].digest not in named]

    def _for_good(self, steps: dict[str, int]) -> Iterator[str]:
        reached, every = 0, self._keep_every
        for name in sorted(steps, key=steps.__getitem__):
            if every is not None and (count := steps[name] // every) > reached:
                reached = count
                yield name


def _names(path: str, step: int, rank: int) -> tuple[str, str]:
    """Return the name of a checkpoint, and of the part of it that a path names, which is "" if it is the only one."""
    folder, name, part, *more = *check_path(path).parts, "", ""
    is_part = name == step_name(step, is_folder=True) and re.fullmatch(PART, part)
    if folder != FOLDER or any(more) or not (is_part or (name, part) == (step_name(step), "")):
        raise RecordError(f"rank {rank} sent step {step} as {path!r}, and not as '{FOLDER}/{step_name(step)}'")
    return name, part


class JsonLinesWriter:
    """Appends each metrics record as a line: time, attempt, step, epoch, samples, then the metrics by name.

    `time` is in seconds since 1970; NaN and infinities are null. A metric with the name of one of the line's own fields
    is written as `metrics/<name>`. Metrics of a rank other than 0 have the field `rank`.

    When a new attempt starts, the run is resumed in its folder or rolls back, the lines after the step from which it
    continues are removed, so that the file has each step once. Lines of different ranks may come in any order.

    A user's own function does not say from where it continues. When an attempt logs a metric for the first time, what
    earlier attempts have logged of this metric from there on is removed. It may log settings for step 0 and continue
    far from there, so of step 0 only the value itself is replaced.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = AppendFile(self._path, ends_with=b"\n")
        self._attempt = self._begun = 0
        self._unfinished: list[bytes] = []  # rank 0's lines of the step `begun`, which may still get a validation
        self._again: set[str] = set()  # what it has logged of this step since
        self._logged: set[tuple[int, int, str, bool]] = set()  # by attempt and rank; whether of a step after 0
        self._last: dict[tuple[int, str], int] | None = None  # the last step of each rank's metrics
        self._is_whole = True  # whether these are all that the file has

    def write(self, record: Record) -> None:
        if record.attempt < self._attempt:
            return
        if isinstance(record.data, RolledBack):
            self._cut(record, lambda line: line.get("rank", 0) == record.rank)
        elif isinstance(record.data, Start) and record.rank == 0:
            self._attempt = record.attempt
            self._cut(record, lambda line: line.get("attempt", -1) < record.attempt)
        if not isinstance(record.data, Metrics):
            return
        line: dict[str, Any] = {
            "time": record.time_s,
            "attempt": record.attempt,
            "step": record.step,
            "epoch": record.data.epoch,
            "samples": record.data.samples,
        }
        line |= {"rank": record.rank} if record.rank else {}
        own = set(line)
        for name, value in finite(record.data.metrics).items():
            line[name_in_line(name)] = value
        names = line.keys() - own
        if record.rank == 0 and (record.step or 0) > self._begun:
            self._unfinished = []
        is_again = record.rank == 0 and record.step == self._begun and not names & self._again
        logged = {(record.attempt, record.rank, name, bool(record.step)) for name in names}
        if self._unfinished and is_again:
            self._join(line, names)
        else:
            is_removed = record.attempt == self._attempt and (record.step or 0) > self._begun  # by the start record
            if record.step is not None and not is_removed and not logged <= self._logged:
                self._remove(record, {name for *_, name, _ in logged - self._logged})
            self._file.append(_encoded(line))
        self._logged |= logged
        if self._last is not None:
            _note(self._last, line)

    def _cut(self, record: Record, is_outdated: Callable[[dict[str, Any]], bool]) -> None:
        """Remove outdated lines after a record's step, and the incomplete line of a process that was killed."""
        begun = record.step or 0
        # A run that starts from step 0 logs again what it logs before its first step.
        last = -1 if isinstance(record.data, Start) and not begun else begun
        begin, lines = self._end(last - 1)
        found = [json_object(line) for line in lines]
        stays = [bool(line) and not (_is_after(last, line) and is_outdated(line)) for line in found]
        if not all(stays):
            self._replace(begin, compress(lines, stays))
        if record.rank == 0:
            ends = [line.get("step") == last and line.get("rank", 0) == 0 for line in found]
            self._begun, self._unfinished, self._again = begun, list(compress(lines, ends)), set()

    def _remove(self, record: Record, names: Set[str]) -> None:
        """Remove what earlier attempts have logged of metrics from a record's step on."""
        step = record.step or 0
        if self._last is None:
            self._last = {}
            with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
                self._is_whole = file.seek(max(0, file.seek(0, os.SEEK_END) - 8 * _PIECE)) == 0
                for line in map(json_object, file):
                    _note(self._last, line)
        unknown = -1 if self._is_whole else step
        if all(self._last.get((record.rank, name), unknown) < step for name in names):
            return

        def rest(content: bytes) -> bytes:
            line = json_object(content)
            is_again = line.get("step") == step or (step > 0 and _is_after(step, line))
            is_earlier = line.get("attempt", record.attempt) < record.attempt and line.get("rank", 0) == record.rank
            if not (is_again and is_earlier and line.keys() & names):
                return content
            kept = {name: value for name, value in line.items() if name not in names}
            return _encoded(kept) if kept.keys() - FIELDS else b""

        begin, lines = self._end(step - 1)
        if (kept := [*map(rest, lines)]) != lines:
            self._replace(begin, kept)
            self._unfinished = [*filter(None, map(rest, self._unfinished))]

    def _join(self, line: dict[str, Any], names: Set[str]) -> None:
        """Write a line together with what was logged of its step before, without the metrics that it has anew."""
        begin, lines = self._end(self._begun - 1)
        earlier = [json_object(one) for one in lines if one in self._unfinished]
        kept = [{name: one[name] for name in one if name not in names} for one in earlier]
        kept = [one for one in kept if one.keys() - line.keys()]
        last = kept[-1] if kept else {}
        last |= {name: value for name, value in line.items() if value is not None or name not in last}
        joined = [_encoded(one) for one in (*kept[:-1], last)]
        self._replace(begin, [*(one for one in lines if one not in self._unfinished), *joined])
        self._unfinished, self._again = joined, self._again | names

    def _end(self, last: int) -> tuple[int, list[bytes]]:
        """Return where the last lines of the file begin, and these lines: at least all from the first after a step on.

        Only the end of the file is read: a long run has gigabytes of lines.
        """
        if not self._path.exists():
            return 0, []
        length = _PIECE
        with writing(self._path), self._path.open("rb") as file:
            while True:
                begin = max(0, file.seek(0, os.SEEK_END) - length)
                file.seek(begin)
                begin += len(file.readline()) if begin else 0
                lines = [line + b"\n" for line in file.read().splitlines()]
                half = lines[: len(lines) // 2]
                if not begin or (half and not any(_is_after(last, json_object(line)) for line in half)):
                    return begin, lines
                length *= 2

    def _replace(self, begin: int, lines: Iterable[bytes]) -> None:
        self._file.close()
        with writing(self._path), replacing(self._path) as part:
            shutil.copyfile(self._path, part)
            os.truncate(part, begin)
            with part.open("ab") as rest:
                rest.writelines(lines)

    def close(self) -> None:
        self._file.close()


def names_logged(run_dir: Path) -> tuple[dict[int, set[str]], int]:
    """Return which metrics rank 0 has logged by step, as far as the end of metrics.jsonl tells.

    The number is the size of the part of the file, in bytes, that was not read.
    """
    found: dict[int, set[str]] = {}
    unread = 0
    with contextlib.suppress(FileNotFoundError), (run_dir / "metrics.jsonl").open("rb") as file:
        unread = file.seek(max(0, file.seek(0, os.SEEK_END) - _PIECE))
        for line in map(json_object, file):
            if isinstance(step := line.get("step"), int) and not line.get("rank"):
                found.setdefault(step, set()).update(map(metric_of_line, line.keys() - FIELDS))
    return found, unread


def _note(last: dict[tuple[int, str], int], line: dict[str, Any]) -> None:
    """Note the step of a line for each of its metrics, if it is their last one."""
    if isinstance(step := line.get("step"), int):
        for name in line.keys() - FIELDS:
            key = line.get("rank", 0), name
            last[key] = max(step, last.get(key, step))


def _encoded(line: dict[str, Any]) -> bytes:
    return _LINE.encode(line).encode() + b"\n"


def _is_after(last: int, line: dict[str, Any]) -> bool:
    step = line.get("step")
    return isinstance(step, int) and step > last


class LogWriter:
    """Appends each rank's output to its own file, byte for byte; a line marks where each further attempt begins."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._attempts: dict[int, int] = {}  # of each rank: the newest
        self._in_line: set[int] = set()  # ranks whose last line has not ended

    def write(self, record: Record) -> None:
        if not isinstance(record.data, Log):
            return
        rank, text = record.rank, record.data.text
        if record.attempt != self._attempts.get(rank, 0):
            text = f"{chr(10) if rank in self._in_line else ''}--- attempt {record.attempt} ---\n{text}"
        # Opened each time: a job may have more ranks than a process may have open files.
        with AppendFile(prepared_path(self._run_dir, f"logs/rank-{rank}.log")) as file:
            file.append(text.encode(errors="backslashreplace"))
        self._attempts[rank] = record.attempt  # not before: the handler gives a record again after a failed write
        if text:
            (self._in_line.discard if text.endswith("\n") else self._in_line.add)(rank)

    def close(self) -> None:
        """Do nothing: no file stays open."""
