"""A writer that dies at any of its disk operations leaves a whole checkpoint, and its successor goes on."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.record import Checkpoint, File, Record
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.writers.files import CheckpointWriter

OPERATIONS = ("replace", "fsync", "link", "unlink", "mkdir", "open")


class Crash(BaseException):
    pass


class Disk:
    """Counts disk operations, and dies at one of them: from then on none is done, no cleaning up either.

    Args:
        left: operations until then.
        after: dies after that operation, not before it.
        links: as on a file system that knows no hard links, if false.
    """

    def __init__(self, left: int, after: bool, links: bool) -> None:
        self.left, self.after, self.links, self.dead = left, after, links, False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in OPERATIONS:
            patch.setattr(os, name, self.wrapped(name, getattr(os, name)))
        patch.setattr(Path, "write_bytes", self.wrapped("write", Path.write_bytes))

    def wrapped(self, name, real):
        def operate(*args, **kwargs):
            if name == "link" and not self.links:
                raise PermissionError(1, "Operation not permitted")
            self.left -= 1
            if self.dead or (self.left == 0 and not self.after):
                if name == "write" and not self.dead:
                    self.dead = True
                    real(args[0], args[1][: len(args[1]) // 2])
                self.dead = True
                raise Crash(name)
            try:
                return real(*args, **kwargs)
            finally:
                if self.left == 0:
                    self.dead = True
                    raise Crash(name)

        return operate


def record(number: int, step: int, best: bool, source: Path) -> Record:
    body = b"weights %d of write %d" % (step, number)
    source.write_bytes(body)
    path, sha256 = f"checkpoints/step-{step:06d}.pt", hashlib.sha256(body).hexdigest()
    return Record(File(path, len(body), sha256, source=str(source), checkpoint=Checkpoint(step, best=best)))


def move(record: Record, target: Path) -> None:
    shutil.move(record.data.source, target)


def crash(steps: list[tuple[int, bool]], left: int, after: bool, links: bool, keep: int) -> bool:
    """Write checkpoints of `steps` (step, best) until the disk dies, look, and go on. Returns whether it died.

    Steps may come again, as after a rollback.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run_dir, source = Path(folder) / "run", Path(folder) / "spool"
        run_dir.mkdir()
        disk = Disk(left, after, links)
        bodies: list[bytes] = []
        done = 0
        writer = CheckpointWriter(run_dir, move, keep)
        try:
            for number, (step, best) in enumerate(steps):
                arriving = record(number, step, best, source)
                bodies.append(source.read_bytes())
                with patch.context() as patched:
                    disk.install(patched)
                    writer.write(arriving)
                done = number + 1
        except Crash:
            pass
        if done:
            found = bodies.index(find_checkpoint(run_dir).read_bytes())
            assert found >= done - 1, "older than the last one that was written to its end"
        bests = [number for number, (_, best) in enumerate(steps[: len(bodies)]) if best]
        ended = [number for number in bests if number < done]
        if ended:
            found = bodies.index(find_checkpoint(run_dir, "best").read_bytes())
            assert found in (ended[-1], bests[-1]), "neither the best of those written, nor the one on its way"
        again = CheckpointWriter(run_dir, move, keep)
        again.write(record(99, 9, True, source))
        for which in ("last", "best"):
            assert find_checkpoint(run_dir, which).read_bytes() == b"weights 9 of write 99"
        assert not list(run_dir.rglob(".part-*"))
        return disk.dead


@pytest.mark.medium
@pytest.mark.parametrize(
    ("after", "links"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_crash_at_every_operation_leaves_what_can_be_resumed_from(after, links):
    steps = [(1, True), (2, False), (3, True), (2, False)]
    moments = itertools.takewhile(lambda left: crash(steps, left, after, links, keep=1), itertools.count(1))
    assert len(list(moments)) > 80


writes = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5)


@pytest.mark.medium
@settings(max_examples=2 * settings().max_examples)
@given(writes, st.integers(1, 100), st.booleans(), st.booleans(), st.integers(1, 3))
def test_whatever_was_written_before(steps, left, after, links, keep):
    crash(steps, left, after, links, keep)


def test_each_move_is_made_durable_before_the_next(tmp_path, monkeypatch):
    told = []

    def tell(name, real):
        def operate(*args, **kwargs):
            what = args[1] if name == "replace" else args[0]
            if name == "fsync":
                what = Path(f"/proc/self/fd/{what}").readlink()
            told.append((name, "part" if ".part-" in str(what) else Path(what).name))
            return real(*args, **kwargs)

        return operate

    writer = CheckpointWriter(tmp_path, move, keep=1)
    writer.write(record(0, 1, False, tmp_path / "spool"))
    arriving = record(1, 2, False, tmp_path / "spool")
    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, tell(name, getattr(os, name)))
    writer.write(arriving)
    monkeypatch.undo()

    def moved(name):
        return [("fsync", "part"), ("replace", name), ("fsync", "checkpoints")]

    told = [operation for operation in told if operation != ("unlink", "part")]
    manifest = moved("manifest.json")
    assert told == [
        *moved("step-000002.pt"),
        *manifest,
        *moved("last.pt"),
        *manifest,
        ("unlink", "step-000001.pt"),
    ]
