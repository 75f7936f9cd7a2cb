"""A writer or a mirror that dies at any of its disk operations leaves a whole checkpoint; its successor goes on."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.record import Checkpoint, File, Record
from ddp_hydra.storage import LocalFolder
from ddp_hydra.storage.manifest import find_checkpoint, has_checkpoint
from ddp_hydra.storage.run_ref import fetch_checkpoint
from ddp_hydra.writers.checkpoint_mirror import Mirror
from ddp_hydra.writers.files import CheckpointWriter

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""The operations are counted, so no disk has to do them."""
OPERATIONS = ("replace", "rename", "fsync", "link", "unlink", "mkdir", "rmdir", "open")


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
            is_last = self.left == 0
            if self.dead or (is_last and not self.after):
                if name == "write" and not self.dead:
                    self.dead = True
                    real(args[0], args[1][: len(args[1]) // 2])
                self.dead = True
                raise Crash(name)
            try:
                return real(*args, **kwargs)
            finally:
                if is_last:
                    self.dead = True
                    raise Crash(name)

        return operate


Saved = list[tuple[Record, bytes]]
FORMS = {"one file": (None,), "parts": ("rank-1", "state")}


def body_of(number: int, step: int, name: str | None) -> bytes:
    return b"weights %d of write %d%s" % (step, number, f", {name}".encode() if name else b"")


def saved(form: str, number: int, step: int, best: bool, folder: Path) -> Saved:
    """The records of a checkpoint, whose files lie in a folder, and what is in them."""
    found = []
    for name in FORMS[form]:
        body = body_of(number, step, name)
        source = folder / f"spool-{name}"
        source.write_bytes(body)
        parts = {"rank-1.pt": 1, "state.pt": 0} if name == "state" else {}
        holds = Checkpoint(step, best=best, parts=parts, number=number + 1)
        path, sha256 = f"checkpoints/step-{step:06d}{f'/{name}' if name else ''}.pt", hashlib.sha256(body).hexdigest()
        sent = File(path, len(body), sha256, source=str(source), checkpoint=holds)
        found.append((Record(sent, int(name == "rank-1")), body))
    return found


def content(checkpoint: Path) -> bytes:
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    return b"".join(file.read_bytes() for file in files)


def move(record: Record, target: Path) -> None:
    shutil.move(record.data.source, target)


def crash(form: str, steps: list[tuple[int, bool]], left: int, after: bool, links: bool, keep: int) -> bool:
    """Write checkpoints of `steps` (step, best) until the disk dies, look, and go on. Returns whether it died.

    Steps may come again, as after a rollback.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, pytest.MonkeyPatch.context() as patch:
        run_dir, spool = Path(folder) / "run", Path(folder)
        run_dir.mkdir()
        disk = Disk(left, after, links)
        bodies: list[bytes] = []
        done = 0
        writer = CheckpointWriter(run_dir, move, keep)
        try:
            for number, (step, best) in enumerate(steps):
                arriving = saved(form, number, step, best, spool)
                bodies.append(b"".join(body for _, body in arriving))
                with patch.context() as patched:
                    disk.install(patched)
                    for record, _ in arriving:
                        writer.write(record)
                done = number + 1
        except Crash:
            pass
        if done:
            found = bodies.index(content(find_checkpoint(run_dir)))
            assert found >= done - 1, "older than the last one that was written to its end"
        bests = [number for number, (_, best) in enumerate(steps[: len(bodies)]) if best]
        ended = [number for number in bests if number < done]
        if ended:
            found = bodies.index(content(find_checkpoint(run_dir, "best")))
            assert found in (ended[-1], bests[-1]), "neither the best of those written, nor the one on its way"
        again = CheckpointWriter(run_dir, move, keep)
        for record, _ in (newest := saved(form, 99, 9, True, spool)):
            again.write(record)
        for which in ("last", "best"):
            assert content(find_checkpoint(run_dir, which)) == b"".join(body for _, body in newest)
        assert not list(run_dir.rglob(".part-*"))
        return disk.dead


@pytest.mark.medium
@pytest.mark.parametrize(
    ("form", "after", "links"),
    [
        ("one file", True, True),
        pytest.param("one file", False, False, marks=pytest.mark.slow),
        ("parts", True, True),
        pytest.param("one file", True, False, marks=pytest.mark.slow),
        pytest.param("one file", False, True, marks=pytest.mark.slow),
        pytest.param("parts", False, True, marks=pytest.mark.slow),
    ],
)
def test_a_crash_at_every_operation_leaves_what_can_be_resumed_from(form, after, links):
    steps = [(1, True), (2, False), (3, True), (2, False)]
    moments = itertools.takewhile(lambda left: crash(form, steps, left, after, links, keep=1), itertools.count(1))
    assert len(list(moments)) > 80


def crash_of_mirror(form: str, left: int, after: bool) -> bool:
    """Let a mirror die at an operation, look what is in the store, and let the next one go on. Returns if it died."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, pytest.MonkeyPatch.context() as patch:
        run_dir, store = Path(folder) / "run", LocalFolder(Path(folder) / "store")
        run_dir.mkdir()
        writer, mirror = CheckpointWriter(run_dir, move, keep=1), Mirror(run_dir, store)
        disk = Disk(left, after, links=True)
        bodies, n_copied = [], 0
        try:
            for number, (step, best) in enumerate([(1, True), (2, False), (3, True)]):
                arriving = saved(form, number, step, best, Path(folder))
                bodies.append(b"".join(body for _, body in arriving))
                for record, _ in arriving:
                    writer.write(record)
                with patch.context() as patched:
                    disk.install(patched)
                    for name in ("put", "delete"):
                        patched.setattr(LocalFolder, name, disk.wrapped(name, getattr(LocalFolder, name)))
                    mirror.copy()
                n_copied = number + 1
        except Crash:
            pass
        if n_copied:
            for which, oldest in (("last", n_copied - 1), ("best", 0 if n_copied < 3 else 2)):
                found = fetch_checkpoint(str(store.folder), Path(folder) / which, which, retry_s=0)
                assert bodies.index(content(found)) >= oldest
        Mirror(run_dir, store).copy()
        found = fetch_checkpoint(str(store.folder), Path(folder) / "found", retry_s=0)
        assert content(found) == bodies[-1]
        return disk.dead


@pytest.mark.medium
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("after", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_mirror_that_dies_at_any_operation_leaves_whole_checkpoints(form, after):
    moments = itertools.takewhile(lambda left: crash_of_mirror(form, left, after), itertools.count(1))
    assert len(list(moments)) > 40


def write_on(form: str, run_dir: Path, store: LocalFolder, first: int) -> None:
    writer, mirror = CheckpointWriter(run_dir, move, keep=2), Mirror(run_dir, store)
    for step in itertools.count(first):
        for record, _ in saved(form, step, step, step % 3 == 0, run_dir.parent):
            writer.write(record)
        mirror.copy()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_processes_that_are_killed_at_any_moment_leave_whole_checkpoints(tmp_path, form):
    """50 times, by SIGKILL."""
    run_dir, store, drawn = tmp_path / "run", LocalFolder(tmp_path / "store"), random.Random(0)
    run_dir.mkdir()
    newest = {"run": 0, "store": 0}
    for kill in range(50):
        writing = multiprocessing.get_context("fork").Process(
            target=write_on, args=(form, run_dir, store, newest["run"] + 1)
        )
        writing.start()
        time.sleep(drawn.uniform(0.02, 0.3))
        writing.kill()
        writing.join()
        found = {"run": find_checkpoint(run_dir)} if has_checkpoint(run_dir) else {}
        if (tmp_path / "store/checkpoints/manifest.json").exists():
            found["store"] = fetch_checkpoint(str(store.folder), tmp_path / f"back-{kill}", retry_s=0)
        for where, checkpoint in found.items():
            body = content(checkpoint)
            step = int(body.split()[1])
            assert step >= newest[where]
            newest[where] = step
            assert body == b"".join(body_of(step, step, name) for name in FORMS[form])
    assert newest["run"] >= newest["store"] > 20


writes = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5)


@pytest.mark.medium
@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(list(FORMS)), writes, st.integers(1, 100), st.booleans(), st.booleans(), st.integers(1, 3))
def test_whatever_was_written_before(form, steps, left, after, links, keep):
    crash(form, steps, left, after, links, keep)


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
    writer.write(saved("one file", 0, 1, False, tmp_path)[0][0])
    [(arriving, _)] = saved("one file", 1, 2, False, tmp_path)
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
