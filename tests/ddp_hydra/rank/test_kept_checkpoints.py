from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hydra.rank import kept_checkpoints, outbox


@pytest.fixture
def worker(tmp_path) -> SimpleNamespace:
    folder = tmp_path / "scratch" / "worker"
    folder.mkdir(parents=True)
    return SimpleNamespace(local_directory=str(folder))


def written(worker: SimpleNamespace, gang: str, content: bytes) -> str:
    """A checkpoint in a rank's outbox."""
    name = f"step-{len(content)}.pt"
    (outbox.folder(worker, gang, 0) / name).write_bytes(content)
    return name


def kept(worker: SimpleNamespace) -> set[str]:
    return {path.name for path in Path(worker.local_directory, "ddp_hydra-checkpoints").iterdir()}


def test_a_rank_of_another_gang_finds_what_one_has_written(worker):
    outbox.keep("paused", 0, written(worker, "paused", b"weights"), "a1", worker)
    assert not outbox.has_files(worker), "the rank need not wait for the client any more"
    outbox.clear("paused", worker)
    found = outbox.find("continued", 0, "step-000010.pt", "a1", 7, worker)
    assert Path(found).name == "step-000010.pt"
    assert Path(found).read_bytes() == b"weights"
    assert outbox.find("continued", 0, "step-000010.pt", "a1", 8, worker) == "", "of another size"
    assert outbox.find("continued", 0, "step-000010.pt", "b2", 7, worker) == ""
    assert Path(outbox.write("continued", 0, "step-000010.pt", b"other", True, worker)).read_bytes() == b"other"
    assert Path(outbox.find("continued", 0, "step-000010.pt", "a1", 7, worker)).read_bytes() == b"weights"
    outbox.clear("continued", worker)
    assert outbox.find("third", 0, "x.pt", "a1", 7, worker)


def test_a_file_that_is_gone_is_not_kept(worker):
    outbox.folder(worker, "gang", 0)
    outbox.keep("gang", 0, "step-1.pt", "a1", worker)
    assert outbox.find("gang", 0, "step-1.pt", "a1", 0, worker) == ""


def test_hashes_are_names_only(worker, tmp_path):
    (tmp_path / "scratch" / "secret").write_bytes(b"secret")
    assert outbox.find("gang", 0, "x.pt", "../../secret", 6, worker) == ""
    outbox.keep("gang", 0, written(worker, "gang", b"weights"), "../../secret", worker)
    assert (tmp_path / "scratch" / "secret").read_bytes() == b"secret"


def test_the_oldest_go_when_there_are_too_many(worker, monkeypatch):
    monkeypatch.setattr(kept_checkpoints, "MAX_BYTES", 10)
    for number, sha256 in enumerate(("a", "b", "c")):
        outbox.keep("gang", 0, written(worker, "gang", b"1234"), sha256, worker)
        path = Path(worker.local_directory, "ddp_hydra-checkpoints", sha256)
        os.utime(path, (number, number))
        if sha256 == "b":
            assert outbox.find("gang", 0, "x.pt", "a", 4, worker), "it is the newest one now"
    assert kept(worker) == {"a", "c"}
    outbox.keep("gang", 0, written(worker, "gang", b"12345678901"), "large", worker)
    assert kept(worker) == {"a", "c"}
    assert not outbox.has_files(worker)


def test_a_full_disk_keeps_none(worker, monkeypatch):
    full = SimpleNamespace(total=100, used=95, free=5)
    monkeypatch.setattr(kept_checkpoints.shutil, "disk_usage", lambda path: full)
    outbox.keep("gang", 0, written(worker, "gang", b"1234"), "a", worker)
    assert kept(worker) == set()
    assert not outbox.has_files(worker)
