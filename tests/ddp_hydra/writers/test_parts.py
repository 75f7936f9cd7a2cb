"""Checkpoints in a folder: they are there when all parts have arrived, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hydra.errors import CheckpointError, RecordError
from ddp_hydra.record import Checkpoint, Metrics, Record, Start
from ddp_hydra.runs import disk
from ddp_hydra.runs.run_files import LocalRunFiles
from ddp_hydra.storage import LocalFolder, run_ref
from ddp_hydra.storage.manifest import find_checkpoint, read_manifest, state_file
from ddp_hydra.storage.run_ref import RunRef, fetch_checkpoint, remove_checkpoints
from ddp_hydra.sweep import pruning
from ddp_hydra.writers import files
from ddp_hydra.writers.checkpoint_mirror import Mirror
from ddp_hydra.writers.files import CheckpointWriter
from ddp_hydra.writers.loggers import Logger

Part = Callable[..., Record]


@pytest.fixture
def part(file_record) -> Part:
    def make(
        step: int, rank: int, number: int = 0, best: bool = False, attempt: int = 0, content: bytes | None = None
    ) -> Record:
        parts = {"state.pt": 0, "rank-1.pt": 1} if rank == 0 else {}
        saved = Checkpoint(step, 1, step * 8, {"val/loss": 1 / step}, best, parts, number or step)
        name = f"checkpoints/step-{step:06d}/{'rank-1' if rank else 'state'}.pt"
        body = b"rank %d of %d" % (rank, step) if content is None else content
        return Record(file_record(name, body, checkpoint=saved).data, rank, step, attempt=attempt)

    return make


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def two(tmp_path, folder, part) -> Path:
    """A run with folders of steps 1, the best, and 2."""
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2):
        for rank in (1, 0):
            writer.write(part(step, rank, best=step == 1))
    writer.close()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


STEP_1, STEP_2 = (["step-000001/rank-1.pt", "step-000001/state.pt"], ["step-000002/rank-1.pt", "step-000002/state.pt"])


def test_a_run_that_goes_back_to_a_folder_names_it_the_last_and_the_best_one(tmp_path, folder, part):
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2):
        for rank in (1, 0):
            writer.write(part(step, rank, best=True))
    writer.write(Record(Start(best={"val/loss": 1.0}), step=1, attempt=1))
    assert names(folder) == ["manifest.json", *STEP_1, *STEP_2]
    assert {find_checkpoint(tmp_path, which) for which in ("last", "best")} == {folder / "step-000001"}
    for rank in (1, 0):
        writer.write(part(2, rank, attempt=1, content=b"another %d" % rank))
    entries = read_manifest(folder)
    assert (entries["last.pt"].step, entries["best.pt"].step) == (2, 1)
    assert len(entries) == 4
    assert len(names(folder)) == 5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_entry_is_written_when_all_parts_are_there(tmp_path, folder, part, order):
    writer = CheckpointWriter(tmp_path)
    writer.write(part(1, order[0], best=True))
    assert read_manifest(folder) == {}
    assert [path.name[:6] for path in folder.iterdir()] == [".part-"]
    with pytest.raises(CheckpointError, match=r"has no last\.pt"):
        find_checkpoint(tmp_path)
    writer.write(part(1, order[1], best=True))
    assert names(folder) == ["manifest.json", *STEP_1]
    entries = read_manifest(folder)
    assert set(entries) == {"step-000001", "last.pt", "best.pt"}
    assert [(one.name, one.size, one.rank) for one in entries["best.pt"].parts] == [
        ("rank-1.pt", 11, 1),
        ("state.pt", 11, 0),
    ]
    assert (entries["last.pt"].step, entries["last.pt"].metrics) == (1, {"val/loss": 1.0})
    for which in ("last", "best"):
        assert find_checkpoint(tmp_path, which) == folder / "step-000001"
    assert state_file(find_checkpoint(tmp_path)).read_bytes() == b"rank 0 of 1"
    assert find_checkpoint(folder / "step-000001") == folder / "step-000001"
    assert RunRef.own(folder / "step-000001").folder == str(tmp_path)


def test_last_and_best_of_a_run_with_folders_are_named_as_files_are(tmp_path, two, monkeypatch):
    given = {"best.pt": "step-000001", "last.pt": "step-000002", "step-000001/state.pt": "step-000001"}
    monkeypatch.chdir(two)
    for name, step in given.items():
        for typed in (two / name, f"file://{two / name}", name):
            ref = RunRef.named(typed)
            assert ref.checkpoint("last", tmp_path / "download") == two / step
            assert Path(ref.folder) == tmp_path
    shutil.rmtree(two / "step-000001")
    with pytest.raises(CheckpointError, match=r"best\.pt does not exist; in .* there is manifest\.json, step-000002/$"):
        RunRef.named(two / "best.pt").checkpoint("last", tmp_path)


def test_a_copy_of_a_folder_is_taken_as_a_copy_of_a_file_is(tmp_path, two, monkeypatch):
    (two / "step-000002" / ".metadata").touch()
    for copy in (tmp_path / "lone" / "copy", two / "copy", tmp_path / "lone" / "step-000002"):
        shutil.copytree(two / "step-000002", copy)
        assert find_checkpoint(copy, "best") == copy
        assert RunRef.named(copy / "state.pt").place == str(copy)
        assert not RunRef.named(copy).is_own, "it may come from anywhere"
        monkeypatch.chdir(copy)
        assert RunRef.named(".").folder == RunRef.named(copy).folder
        assert RunRef.named(".").checkpoint("best", tmp_path) == copy
    (tmp_path / ".hydra").mkdir()
    assert RunRef.named(two / "step-000001").is_own


def test_only_so_many_are_kept_and_files_and_folders_take_turns(tmp_path, folder, part, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.write(checkpoint_record(1, best=True))
    for rank in (0, 1):
        writer.write(part(2, rank))
    assert names(folder) == ["best.pt", "manifest.json", "step-000001.pt", *STEP_2]
    assert (find_checkpoint(tmp_path), find_checkpoint(tmp_path, "best")) == (
        folder / "step-000002",
        folder / "best.pt",
    )
    writer = CheckpointWriter(tmp_path, keep=1)
    for rank in (0, 1):
        writer.write(part(3, rank, best=True))
    assert names(folder) == ["manifest.json", "step-000003/rank-1.pt", "step-000003/state.pt"]
    writer.write(checkpoint_record(4))
    writer.write(checkpoint_record(5))
    assert names(folder) == [
        "last.pt", "manifest.json", "step-000003/rank-1.pt", "step-000003/state.pt", "step-000005.pt",
    ]  # fmt: skip
    assert set(read_manifest(folder)) == {"step-000003", "step-000005.pt", "last.pt", "best.pt"}


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"rank 1 OF 2")])
def test_a_damaged_part_damages_the_checkpoint(tmp_path, two, spoil, caplog):
    spoil(two / "step-000002" / "rank-1.pt")
    assert find_checkpoint(tmp_path) == two / "step-000001"
    assert "step-000002 is damaged: of its part rank-1.pt: it" in caplog.text
    with pytest.raises(CheckpointError, match=r"step-000002 is damaged: .*; use the one before it, .*step-000001"):
        find_checkpoint(two / "step-000002")
    spoil(two / "step-000001" / "state.pt")
    with pytest.raises(CheckpointError, match="no whole checkpoint from before it is left"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("end", ["close", "next attempt", "next writer"])
def test_of_a_save_that_never_ends_nothing_is_left(tmp_path, two, part, end):
    before = names(two)
    writer = CheckpointWriter(tmp_path)
    writer.write(part(3, 0))
    assert len(names(two)) == len(before) + 1
    if end == "close":
        writer.close()
    elif end == "next attempt":
        writer.write(Record(Metrics({}), attempt=1))
        writer.write(part(3, 1, attempt=0))  # a late one of the attempt that has failed
    else:
        CheckpointWriter(tmp_path)
    assert names(two) == before
    assert not [path for path in two.iterdir() if path.name.startswith(".part-")]
    assert find_checkpoint(tmp_path) == two / "step-000002"


def test_a_folder_that_the_manifest_does_not_name_is_none(tmp_path, two):
    """A writer is killed after it has given the folder its name."""
    shutil.copytree(two / "step-000002", two / "step-000003")
    assert find_checkpoint(tmp_path) == two / "step-000002"
    with pytest.raises(CheckpointError, match=r"step-000003 is not whole: manifest.json does not name it"):
        find_checkpoint(two / "step-000003")
    CheckpointWriter(tmp_path)
    assert names(two) == ["manifest.json", *STEP_1, *STEP_2]


def test_parts_of_two_saves_of_a_step_are_not_mixed(tmp_path, folder, part):
    """After a rollback, a step is saved again; a rank may send that before another one's part of the first save."""
    writer = CheckpointWriter(tmp_path)
    writer.write(part(1, 0, number=1, best=True))
    writer.write(part(1, 0, number=2, content=b"again 0"))
    writer.write(part(1, 1, number=1, best=True))
    assert state_file(find_checkpoint(tmp_path)).read_bytes() == b"rank 0 of 1"
    writer.write(part(1, 1, number=2, content=b"again 1"))
    again = find_checkpoint(tmp_path)
    assert [(again / name).read_bytes() for name in ("state.pt", "rank-1.pt")] == [b"again 0", b"again 1"]
    assert find_checkpoint(tmp_path, "best") == folder / "step-000001"
    assert {path.name.partition("-0")[0] for path in folder.iterdir()} == {"step", "manifest.json"}


def test_a_part_that_fails_for_a_while_comes_once(tmp_path, folder, part, monkeypatch):
    writer, given = CheckpointWriter(tmp_path), part(1, 1)
    writer.write(part(1, 0))
    write = files.write_atomic

    def full(*args):
        monkeypatch.setattr(files, "write_atomic", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        writer.write(given)
    writer.write(given)
    assert names(folder) == ["manifest.json", *STEP_1]
    assert find_checkpoint(tmp_path) == folder / "step-000001"


def test_a_part_of_another_rank_or_name_is_refused(tmp_path, part, file_record):
    writer = CheckpointWriter(tmp_path)
    writer.write(part(1, 0))
    with pytest.raises(RecordError, match=r"rank 2 sent 'rank-1\.pt' of step 1, which is not to be a part of it"):
        writer.write(Record(part(1, 1).data, 2, 1))
    for name in ("step-000001/a b", "step-000001/a/b", "step-000002/a.pt", "step-000001-0123456789ab/a.pt"):
        with pytest.raises(RecordError, match=r"and not as 'checkpoints/step-000001\.pt'"):
            writer.write(file_record(f"checkpoints/{name}", checkpoint=Checkpoint(1)))


def test_a_damaged_part_of_an_arrival_changes_nothing(tmp_path, two, part, file_record):
    before = names(two)
    writer = CheckpointWriter(tmp_path)
    writer.write(part(3, 0))
    damaged = file_record("checkpoints/step-000003/rank-1.pt", sha256="0" * 64, checkpoint=Checkpoint(3, number=3))
    with pytest.raises(RecordError, match="was changed on its way"):
        writer.write(Record(damaged.data, 1, 3))
    writer.close()
    assert names(two) == before


@pytest.fixture
def mirrored(tmp_path, two) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    Mirror(tmp_path, LocalFolder(str(store))).copy()
    return store


def test_a_checkpoint_in_a_store_is_named_by_its_url(tmp_path, mirrored, monkeypatch):
    asked, back = [], tmp_path / "back"
    monkeypatch.setattr(run_ref, "open_folder", lambda url, **_: asked.append(url) or LocalFolder(str(mirrored)))
    first, second = (name for name in read_manifest(mirrored / "checkpoints") if name.startswith("step-"))
    url = "s3://bucket/run/checkpoints"
    given = {"best.pt": first, "last.pt": second, first: first, f"{second}/state.pt": second, f"{first}/": first}
    for name, step in given.items():
        ref = RunRef.named(f"{url}/{name}")
        assert (ref.folder, ref.checkpoint("best", back)) == ("s3://bucket/run", back / step)
    assert set(asked) == {"s3://bucket/run"}
    with pytest.raises(CheckpointError, match=r"json names no step-000009\.pt; it has step-000001-.*best\.pt$"):
        fetch_checkpoint(f"{url}/step-000009.pt", back)
    (mirrored / "checkpoints" / second / "rank-1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: it is missing; manifest\.json names step-000001-"):
        fetch_checkpoint(f"{url}/last.pt", tmp_path / "new")


def test_parts_go_to_a_store_and_come_back(tmp_path, two, mirrored, part, caplog):
    entries = read_manifest(mirrored / "checkpoints")
    keys = [name for name in entries if name.startswith("step-")]
    assert [key[:12] for key in keys] == ["step-000001-", "step-000002-"]
    assert len(names(mirrored / "checkpoints")) == 5
    fetched = fetch_checkpoint(str(mirrored), tmp_path / "back")
    assert (fetched.name, state_file(fetched).read_bytes()) == (keys[1], b"rank 0 of 2")
    assert find_checkpoint(fetched) == fetched
    assert (fetch_checkpoint(str(mirrored), tmp_path / "best", "best") / "rank-1.pt").read_bytes() == b"rank 1 of 1"
    (mirrored / "checkpoints" / keys[1] / "rank-1.pt").unlink()
    assert fetch_checkpoint(str(mirrored), tmp_path / "before").name == keys[0]
    assert "is damaged: it is missing; using the one before it" in caplog.text


def test_a_store_loses_the_folders_that_are_too_many(tmp_path, two, mirrored, part):
    mirror, writer = Mirror(tmp_path, LocalFolder(str(mirrored))), CheckpointWriter(tmp_path, keep=1)
    for rank in (0, 1):
        writer.write(part(3, rank, best=True))
    mirror.copy()
    assert [name[:11] for name in names(mirrored / "checkpoints")] == ["manifest.js", "step-000003", "step-000003"]
    remove_checkpoints(str(mirrored), "why not", read_manifest(two))
    assert [path.name for path in (mirrored / "checkpoints").iterdir()] == ["manifest.json"]


def test_a_damaged_part_is_not_copied(tmp_path, two, caplog):
    (two / "step-000002" / "rank-1.pt").write_bytes(b"rank 1 OF 2")
    store = tmp_path / "store"
    store.mkdir()
    Mirror(tmp_path, LocalFolder(str(store))).copy()
    assert [name[:11] for name in read_manifest(store / "checkpoints")] == ["step-000001", "best.pt"]
    assert "rank-1.pt is damaged: its sha256" in caplog.text


def test_a_sweep_and_the_user_remove_folders(tmp_path, two):
    (two / "step-000002" / "mine.txt").write_text("the user's own")
    written = disk.written_by_run(LocalRunFiles(tmp_path))
    assert [name for name in names(two) if not written(f"checkpoints/{name}")] == ["step-000002/mine.txt"]
    for left in ("step-000003/state.pt", "step-000003/__12_0.distcp", ".part-0123456789ab/rank-1.pt"):
        assert written(f"checkpoints/{left}"), "of a save that was cut off"
    assert disk.by_kind(LocalRunFiles(tmp_path).sizes())["checkpoints"] > 4 * 11
    assert pruning.remove(tmp_path, "hydra.launcher.keep=best:1")
    assert names(two) == ["manifest.json"]


def test_a_logger_gets_the_folder_once(tmp_path, part):
    uploaded = []

    class Noting(Logger):
        def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
            uploaded.append((names(path), step, is_best))

    logger = Noting("all")
    logger.run_dir = tmp_path
    writer = CheckpointWriter(tmp_path)
    for rank in (0, 1):
        writer.write(record := part(1, rank, best=True))
        logger.write(record)
    logger.write(record)
    assert uploaded == [(["rank-1.pt", "state.pt"], 1, True)]
