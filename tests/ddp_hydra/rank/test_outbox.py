"""The folders of ranks on a host that others use, too, and the checkpoints that stay there."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import outbox

NOBODY = 65534


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch):
    """Half of the disk is free, also where the tests run on a disk that is nearly full."""
    monkeypatch.setattr(outbox.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40, free=2**39))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def worker(tmp_path) -> SimpleNamespace:
    """A worker whose folder was made under a lax umask, as Dask makes it."""
    folder = tmp_path / "dask-scratch-space" / "worker-1"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o777)
    return SimpleNamespace(local_directory=str(folder))


def test_what_ranks_import_and_read_is_closed_to_other_users(worker):
    outbox.folder(worker, "gang", 0)
    assert mode(Path(worker.local_directory)) == 0o700
    assert mode(Path(worker.local_directory).parent) == 0o1777  # their workers may have folders there, as in /tmp


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders away, which only root can")
@pytest.mark.parametrize("which", ["worker-1", "dask-scratch-space"])
def test_a_folder_that_somebody_else_has_made_is_refused_with_what_to_give(worker, which):
    """As real as one user can have it: root looks at folders that it has given to nobody."""
    folder = Path(worker.local_directory)
    other = folder if which == "worker-1" else folder.parent
    os.chown(other, NOBODY, NOBODY)
    said = f"{other} belongs to user id {NOBODY}, not 0.* Give .*DASK_TEMPORARY_DIRECTORY"
    with pytest.raises(ConfigError, match=said):
        outbox.folder(worker, "gang", 0)
    for act in (
        lambda: outbox.write("gang", 0, "file", b"", 0, worker),
        lambda: outbox.read("gang", 0, "file", 0, worker),
    ):
        with pytest.raises(ConfigError):
            act()


def test_who_asks_after_the_end_of_the_gang_leaves_no_folder(worker):
    outbox.remove("gang", 0, "file", worker)
    outbox.keep("gang", 0, "file", "0" * 64, worker)
    with pytest.raises(FileNotFoundError):
        outbox.read("gang", 0, "file", 0, worker)
    assert not (Path(worker.local_directory) / "ddp_hydra").exists()


@pytest.mark.skipif(os.getuid() == 0, reason="everything is root's")
def test_a_scratch_folder_of_somebody_else_is_refused_also_where_it_is_roots():
    with pytest.raises(ConfigError):
        outbox.secure("/usr")


def written(worker: SimpleNamespace, gang: str, content: bytes) -> str:
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
    assert Path(outbox.write("continued", 0, "step-000010.pt", b"other", 0, worker)).read_bytes() == b"other"
    assert Path(outbox.find("continued", 0, "step-000010.pt", "a1", 7, worker)).read_bytes() == b"weights"
    outbox.clear("continued", worker)
    assert outbox.find("third", 0, "x.pt", "a1", 7, worker)


def test_hashes_are_names_only(worker):
    (Path(worker.local_directory).parent / "secret").write_bytes(b"secret")
    assert outbox.find("gang", 0, "x.pt", "../../secret", 6, worker) == ""
    outbox.keep("gang", 0, written(worker, "gang", b"weights"), "../../secret", worker)
    assert (Path(worker.local_directory).parent / "secret").read_bytes() == b"secret"


def test_the_oldest_go_when_there_are_too_many(worker, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_KEPT_BYTES", 10)
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
    monkeypatch.setattr(outbox.shutil, "disk_usage", lambda path: full)
    outbox.keep("gang", 0, written(worker, "gang", b"1234"), "a", worker)
    assert kept(worker) == set()
    assert not outbox.has_files(worker)
