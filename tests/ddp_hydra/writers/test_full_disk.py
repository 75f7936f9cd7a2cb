"""A disk that is full, really: a small file system in memory, filled up, and freed by a thread or never."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_hydra.errors import RecordError
from ddp_hydra.record import Checkpoint, Log, Record, Text
from ddp_hydra.storage.manifest import find_checkpoint, read_manifest
from ddp_hydra.writers.handler import ResultsHandler, default_writers

pytestmark = pytest.mark.medium

SIZE = 2 * 2**20


@pytest.fixture
def small(tmp_path) -> Iterator[Path]:
    """A folder on a file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(folder).free == 0


class Freeing(threading.Event):
    """Frees the disk once somebody waits for that."""

    def __init__(self, ballast: Path) -> None:
        super().__init__()
        self.ballast = ballast

    def wait(self, timeout: float | None = None) -> bool:
        self.ballast.unlink(missing_ok=True)
        return False


@pytest.fixture
def spooled(tmp_path, file_record):
    """Make a 'file' record whose content lies in a spool on another disk, or on this one."""

    def make(path: str, content: bytes, spool: Path = tmp_path, **changes) -> Record:
        source = spool / f"spool-{len(list(spool.glob('spool-*')))}"
        source.write_bytes(content)
        return file_record(path, content, inline=None, source=str(source), **changes)

    return make


def move(record: Record, target: Path) -> None:
    shutil.move(record.data.source, target)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records(number: int, metrics_record, spooled, size: int = 300_000) -> list[Record]:
    """One of each kind that reaches a disk."""
    step = 10 * number
    holds = Checkpoint(step, 1, step, {}, best=number == 1)
    return [
        Record(Log(f"line {number}\n" * 600), rank=1, attempt=number),
        metrics_record(step, attempt=number, **{f"m{index}": float(number) for index in range(300)}),
        Record(Text(name="note", text=f"text {number} " * 500), step=step, attempt=number),
        spooled(f"samples/{number}.bin", b"%d" % number * 20_000),
        spooled(f"checkpoints/step-{step:06d}.pt", os.urandom(size), checkpoint=holds),
    ]


def writers(run_dir: Path):
    return default_writers(run_dir, move, keep=2, progress=False)


@pytest.mark.parametrize("kind", ["log", "metrics", "text", "file", "checkpoint"])
def test_a_record_that_found_the_disk_full_lands_once_it_is_freed(small, caplog, metrics_record, spooled, kind):
    """Whichever kind meets the full disk first: nothing is lost, doubled or half there."""
    with ResultsHandler(writers(small / "run"), 60.0, Freeing(small / "ballast")) as handler:
        for record in records(1, metrics_record, spooled):
            handler.handle(record)
        coming = records(2, metrics_record, spooled)
        first = ["log", "metrics", "text", "file", "checkpoint"].index(kind)
        fill(small)
        for record in coming[first:] + coming[:first]:
            handler.handle(record)
    said = [record.getMessage() for record in caplog.records if record.name == "ddp_hydra.writers.handler"]
    assert re.fullmatch(r"cannot write .*: no space left on device; trying again for up to 60 s: free some.*", said[0])
    assert re.fullmatch(r"written, after \d+ s of retrying: .*", said[1])
    check_run(small / "run", coming)


def check_run(run_dir: Path, coming: list[Record]) -> None:
    """Two of each are there."""
    for name, entry in read_manifest(run_dir / "checkpoints").items():
        content = (run_dir / "checkpoints" / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.size, entry.digest)
    assert hashlib.sha256(find_checkpoint(run_dir).read_bytes()).hexdigest() == coming[-1].data.sha256
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20]
    log = (run_dir / "logs/rank-1.log").read_text()
    assert log == "--- attempt 1 ---\n" + "line 1\n" * 600 + "--- attempt 2 ---\n" + "line 2\n" * 600
    assert (run_dir / "samples/2.bin").read_bytes() == b"2" * 20_000
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run_dir / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("m7")] == [(10, 1.0), (20, 2.0)]
    assert [point.step for point in events.Tensors("note")] == [10, 20]
    assert not list(run_dir.rglob(".part-*"))


def test_a_disk_that_is_never_freed_ends_in_the_sentence_and_keeps_what_was_there(
    small, caplog, metrics_record, spooled
):
    handler = ResultsHandler(writers(small / "run"), retry_s=0.3)
    for record in records(1, metrics_record, spooled):
        handler.handle(record)
    coming = records(2, metrics_record, spooled)
    fill(small)
    before = snapshot(small)
    for record in reversed(coming):
        with pytest.raises(RecordError, match=r"cannot write .*small/run/.*: No space left.*free some space") as caught:
            handler.handle(record)
        assert ("it was tried" in str(caught.value)) == (record is coming[-1]), "it waits in vain only once"
    handler.close()
    after = snapshot(small)
    for content in (before, after):
        content.pop("run/status.json", None)  # comes and goes, and nothing depends on it
    assert after.keys() == before.keys()
    for name, content in before.items():  # a small event may still have fit into the last page of its file
        assert after[name] == content or (name.startswith("run/tensorboard/") and after[name].startswith(content))
    assert hashlib.sha256(find_checkpoint(small / "run").read_bytes()).hexdigest() in str(
        read_manifest(small / "run/checkpoints")
    )
    assert find_checkpoint(small / "run") == small / "run/checkpoints/last.pt"
    assert caplog.messages[0].endswith("trying again for up to 0.3 s: free some space there")
    assert len(caplog.messages) == 1


def test_a_checkpoint_spooled_on_the_same_full_disk_is_moved_not_copied(small, spooled, caplog):
    """The worst place: the file is where it should be, and only the manifest does not fit."""
    spool = small / "spool"
    spool.mkdir()
    holds = Checkpoint(1)
    with ResultsHandler(writers(small / "run"), 60.0, Freeing(small / "ballast")) as handler:
        content = os.urandom(500_000)
        record = spooled("checkpoints/step-000001.pt", content, spool, checkpoint=holds)
        fill(small)
        handler.handle(record)
    assert find_checkpoint(small / "run").read_bytes() == content
    assert "manifest.json: no space left on device" in caplog.text
    assert list(spool.iterdir()) == []


def test_giving_up_ends_the_waiting_at_once(small, metrics_record):
    handler = ResultsHandler(writers(small / "run"), retry_s=3600)
    fill(small)
    threading.Timer(0.2, handler.give_up.set).start()
    with pytest.raises(RecordError, match=r"No space left on device.*it was tried \d+ times in"):
        handler.handle(Record(Log("x" * 10_000)))
    with pytest.raises(RecordError, match="No space left on device"):
        handler.handle(Record(Log("x" * 10_000)))


# -- disks that are away, where no real one is at hand ---------------------------------------------------------


class Failing:
    """Lets calls of an os function fail for a while.

    Args:
        real: the function.
        number: of the error.
        after: calls that work before.
        times: calls that fail.
    """

    def __init__(self, real, number: int, after: int, times: int) -> None:
        self.real, self.number, self.left, self.times = real, number, after, times

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0 and self.times > 0:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args, **kwargs)


@pytest.mark.parametrize(("number", "after"), [*((errno.EIO, after) for after in range(0, 9, 2)), (errno.EDQUOT, 2)])
@pytest.mark.parametrize("name", ["fsync", "replace", "write", "unlink"])
def test_whatever_fails_for_a_while_nothing_is_lost_or_doubled(
    tmp_path, monkeypatch, metrics_record, spooled, name, after, number
):
    with ResultsHandler(writers(tmp_path / "run"), retry_s=60.0) as handler:
        for record in records(1, metrics_record, spooled, size=1000):
            handler.handle(record)
        coming = records(2, metrics_record, spooled, size=1000)
        failing = Failing(getattr(os, name), number, after, times=2)
        monkeypatch.setattr(os, name, failing)
        for record in coming:
            handler.handle(record)
        monkeypatch.undo()
    check_run(tmp_path / "run", coming)


def test_a_failed_fsync_is_not_believed_when_it_works_later(tmp_path, monkeypatch, spooled, file_record):
    """The kernel forgets what it could not write, so it is written again."""
    record, modes, original = spooled("a/one.bin", os.urandom(3 * 2**20 + 5)), [], Path.open

    def noted(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        modes.append(mode)
        return original(path, mode, *more, **options)

    (tmp_path / "run/a").mkdir(parents=True)
    with ResultsHandler(writers(tmp_path / "run"), retry_s=60.0) as handler:
        monkeypatch.setattr(os, "fsync", Failing(os.fsync, errno.EIO, 0, times=1))
        monkeypatch.setattr(Path, "open", noted)
        handler.handle(record)
        monkeypatch.undo()
    assert modes.count("r+b") == 1
    assert hashlib.sha256((tmp_path / "run/a/one.bin").read_bytes()).hexdigest() == record.data.sha256


def test_half_a_line_that_cannot_even_be_taken_back_is_taken_back_later(tmp_path, monkeypatch, metrics_record):
    with ResultsHandler(writers(tmp_path / "run"), retry_s=60.0) as handler:
        handler.handle(metrics_record(1, loss=1.0))
        real, halves = os.write, []

        def half(handle, data):
            if len(halves) < 2:
                halves.append(0)
                if len(halves) == 1:
                    return real(handle, data[:10])
                raise OSError(errno.EIO, "Input/output error")
            return real(handle, data)

        monkeypatch.setattr(os, "write", half)
        monkeypatch.setattr(os, "ftruncate", Failing(os.ftruncate, errno.EIO, 0, times=2))
        handler.handle(metrics_record(2, loss=2.0))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_what_does_not_pass_is_not_waited_for(tmp_path, file_record, caplog):
    with ResultsHandler(writers(tmp_path / "run"), retry_s=3600) as handler:
        handler.handle(file_record("a/b"))
        for record in (file_record("a/b/c"), file_record("a/c.txt", sha256="0" * 64), file_record("x")):
            with pytest.raises(RecordError):
                handler.handle(record)
    assert not caplog.records
