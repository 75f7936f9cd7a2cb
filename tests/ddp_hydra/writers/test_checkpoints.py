from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import zipfile
from types import SimpleNamespace

import pytest

from ddp_hydra.errors import CheckpointError, DdpHydraError, RecordError
from ddp_hydra.record import Record, Start
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.storage.manifest import encode_manifest, find_checkpoint, newest_first, read_manifest
from ddp_hydra.writers import files
from ddp_hydra.writers.files import CheckpointWriter


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def check_whole(folder):
    """The manifest names every file and no other, and each is as it says."""
    assert sorted(read_manifest(folder)) == [name for name in names(folder) if name != "manifest.json"]
    for name in read_manifest(folder):
        assert find_checkpoint(folder / name) == folder / name


@pytest.mark.medium
def test_names_manifest_and_retention(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (100, 200, 300, 400, 500):
        writer.write(checkpoint_record(step, best=step in (100, 200)))
        assert (folder / "last.pt").read_bytes() == b"weights %d" % step
        check_whole(folder)
    steps = ["step-000200.pt", "step-000400.pt", "step-000500.pt"]
    assert names(folder) == ["best.pt", "last.pt", "manifest.json", *steps]
    assert (folder / "best.pt").read_bytes() == b"weights 200"
    files = json.loads((folder / "manifest.json").read_text())["checkpoints"]
    assert files["best.pt"] == files["step-000200.pt"]
    assert (files["last.pt"]["step"], files["last.pt"]["samples"], files["last.pt"]["epoch"]) == (
        500,
        4000,
        1,
    )
    assert files["best.pt"]["metrics"] == {"val/loss": 0.005}
    assert [part["size"] for part in files["best.pt"]["parts"]] == [len(b"weights 200")]


def test_the_first_checkpoint_after_every_n_steps_is_kept_for_good(tmp_path, folder, checkpoint_record):
    for step in range(30, 400, 40):
        CheckpointWriter(tmp_path, keep=1, keep_every=100).write(checkpoint_record(step))
    steps = [f"step-{step:06d}.pt" for step in (110, 230, 310, 390)]
    assert names(folder) == ["last.pt", "manifest.json", *steps]


def test_a_run_begins_only_where_two_checkpoints_fit(tmp_path, checkpoint_record, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    writer, start = CheckpointWriter(tmp_path), Record(Start(checkpoint_bytes=1_000_000))
    with pytest.raises(
        DdpHydraError, match=r"1\.5 MB are free, and two checkpoints of about 1\.0 MB .*: free 500\.0 kB"
    ):
        writer.write(start)
    writer.write(Record(Start(checkpoint_bytes=700_000)))
    writer.write(checkpoint_record(1))
    writer.write(start)  # a later attempt, with checkpoints of its run


@pytest.mark.medium
def test_all_checkpoints_are_kept_where_no_number_is_given(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=None)
    for step in range(1, 8):
        writer.write(checkpoint_record(step))
    assert len([name for name in names(folder) if name.startswith("step-")]) == 7


@pytest.mark.medium
def test_checkpoints_of_later_steps_go_where_a_run_begins_again(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=3)
    writer.write(checkpoint_record(20))
    writer.write(checkpoint_record(40, b"weights 40", best=True))
    writer.write(checkpoint_record(60))
    again = CheckpointWriter(tmp_path, keep=3)
    again.write(checkpoint_record(10))
    assert {name for name in names(folder) if name.startswith("step-")} == {"step-000010.pt", "step-000040.pt"}
    assert (folder / "best.pt").read_bytes() == b"weights 40"
    check_whole(folder)


BACK = Start(best={"val/loss": 1 / 20})


@pytest.mark.parametrize("keep", [3, None])
def test_a_run_that_goes_back_has_the_last_and_the_best_of_its_new_branch(tmp_path, folder, checkpoint_record, keep):
    writer = CheckpointWriter(tmp_path, keep=keep)
    for step in (10, 20, 30, 40):
        writer.write(checkpoint_record(step, best=True))
    before = {name for name in names(folder) if name.startswith("step-")}
    again = CheckpointWriter(tmp_path, keep=keep)
    again.write(Record(BACK, step=25))
    check_whole(folder)
    assert {name for name in names(folder) if name.startswith("step-")} == before  # it may fail before its first save
    assert [(folder / name).read_bytes() for name in ("last.pt", "best.pt")] == [b"weights 20", b"weights 20"]
    assert (read_manifest(folder)["last.pt"].step, find_checkpoint(tmp_path).read_bytes()) == (20, b"weights 20")
    again.write(checkpoint_record(35))
    check_whole(folder)
    left = {"step-000020.pt", "step-000035.pt"} | (before if keep is None else set())
    assert {name for name in names(folder) if name.startswith("step-")} == left
    assert (read_manifest(folder)["last.pt"].step, read_manifest(folder)["best.pt"].step) == (35, 20)


def test_a_run_goes_forward_again_to_what_it_had_left(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path)
    for step in (20, 30):
        writer.write(checkpoint_record(step, best=True))
    writer.write(Record(BACK, step=20))
    assert find_checkpoint(tmp_path, "best").read_bytes() == find_checkpoint(tmp_path).read_bytes() == b"weights 20"
    writer.write(Record(Start(best={"val/loss": 1 / 30}), step=30))
    assert find_checkpoint(tmp_path, "best").read_bytes() == find_checkpoint(tmp_path).read_bytes() == b"weights 30"
    check_whole(folder)


def test_the_best_one_is_that_from_which_a_run_goes_on_where_it_has_no_better_one(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (10, 20, 30):
        writer.write(checkpoint_record(step, best=True))
    writer.write(Record(Start(best={"val/loss": 1 / 10}), step=20))
    assert read_manifest(folder)["best.pt"].step == 20
    check_whole(folder)


@pytest.mark.parametrize("step", [0, 5, 30, 45])
@pytest.mark.parametrize("best", [{}, {"val/loss": 1 / 20}])
def test_a_start_that_does_not_go_back_changes_no_checkpoint(tmp_path, folder, checkpoint_record, step, best):
    writer = CheckpointWriter(tmp_path)
    for one in (10, 20, 30):
        writer.write(checkpoint_record(one, best=one == 20))
    before = (folder / "manifest.json").read_bytes()
    CheckpointWriter(tmp_path).write(Record(Start(best=best), step=step, attempt=1))
    assert (folder / "manifest.json").read_bytes() == before
    check_whole(folder)


@pytest.mark.parametrize("at", range(4))
def test_a_run_that_is_killed_as_it_goes_back_can_be_resumed(tmp_path, folder, checkpoint_record, monkeypatch, at):
    writer = CheckpointWriter(tmp_path)
    for step in (20, 30):
        writer.write(checkpoint_record(step, best=True))
    calls = []

    def dies(function):
        def wrapped(*arguments):
            calls.append(function)
            if len(calls) > at:
                raise KeyboardInterrupt
            return function(*arguments)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", dies(files.write_atomic))
        patch.setattr(files, "link_or_copy", dies(files.link_or_copy))
        with pytest.raises(KeyboardInterrupt):
            writer.write(Record(BACK, step=20))
    found = find_checkpoint(tmp_path)
    assert found.read_bytes() == (b"weights 20" if at else b"weights 30")
    CheckpointWriter(tmp_path).write(Record(BACK, step=20))
    assert [(folder / name).read_bytes() for name in ("last.pt", "best.pt")] == [b"weights 20", b"weights 20"]
    check_whole(folder)


def test_copies_where_links_do_not_work(tmp_path, folder, checkpoint_record, monkeypatch):
    writer = CheckpointWriter(tmp_path)
    writer.write(checkpoint_record(1))
    assert (folder / "last.pt").samefile(folder / "step-000001.pt")

    def no_links(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    writer.write(checkpoint_record(2, best=True))
    assert not (folder / "last.pt").samefile(folder / "step-000002.pt")
    check_whole(folder)


@pytest.mark.parametrize("changes", [{"size": 99}, {"sha256": "0" * 64}])
def test_a_damaged_arrival_changes_nothing(tmp_path, folder, checkpoint_record, changes):
    writer = CheckpointWriter(tmp_path)
    writer.write(checkpoint_record(1, best=True))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for step in (1, 2):
        with pytest.raises(RecordError, match="the one before is kept"):
            writer.write(checkpoint_record(step, b"broken", best=True, **changes))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_step_that_comes_again_is_the_newest(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.write(checkpoint_record(1, best=True))
    writer.write(checkpoint_record(2))
    writer.write(checkpoint_record(1, b"weights 1, again"))
    assert (folder / "last.pt").read_bytes() == b"weights 1, again"
    assert (folder / "best.pt").read_bytes() == b"weights 1"
    assert (folder / "step-000001.pt").read_bytes() == b"weights 1, again"
    assert "step-000002.pt" not in names(folder)
    check_whole(folder)


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/../step-000001.pt",
        "checkpoints/../../step-000001.pt",
        "../checkpoints/step-000001.pt",
        "/checkpoints/step-000001.pt",
        "checkpoints/last.pt",
        "checkpoints/manifest.json",
        "checkpoints/step-000002.pt",
        "checkpoints/deeper/step-000001.pt",
        "step-000001.pt",
        ".hydra/step-000001.pt",
    ],
)
def test_a_checkpoint_has_no_other_name(tmp_path, checkpoint_record, path, tree):
    with pytest.raises(RecordError, match=r"is not allowed|and not as 'checkpoints/step-000001.pt'"):
        CheckpointWriter(tmp_path).write(checkpoint_record(1, path=path))
    assert tree(tmp_path) == set()


def test_links_are_not_followed(tmp_path, folder, checkpoint_record):
    victim = tmp_path / "victim"
    victim.mkdir()
    folder.symlink_to(victim)
    with pytest.raises(RecordError, match="symbolic link"):
        CheckpointWriter(tmp_path).write(checkpoint_record(1))
    assert list(victim.iterdir()) == []


@pytest.mark.medium
def test_a_new_writer_goes_on_and_clears_what_was_interrupted(tmp_path, folder, checkpoint_record):
    CheckpointWriter(tmp_path, keep=2).write(checkpoint_record(1))
    CheckpointWriter(tmp_path, keep=2).write(checkpoint_record(2))
    (folder / ".part-0123").write_bytes(b"half")
    (folder / "step-000001.pt").unlink()
    CheckpointWriter(tmp_path, keep=2).write(checkpoint_record(3))
    assert names(folder) == ["last.pt", "manifest.json", "step-000002.pt", "step-000003.pt"]
    check_whole(folder)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordError, match=r"cannot write .*folder: Is a directory"):
        write_atomic(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_find_takes_a_run_a_folder_or_a_file(tmp_path, folder, checkpoint_record):
    CheckpointWriter(tmp_path).write(checkpoint_record(1, best=True))
    CheckpointWriter(tmp_path).write(checkpoint_record(2))
    assert find_checkpoint(str(tmp_path)) == folder / "last.pt"
    assert find_checkpoint(tmp_path, "best") == folder / "best.pt"
    assert find_checkpoint(folder) == folder / "last.pt"
    assert find_checkpoint(folder / "step-000001.pt") == folder / "step-000001.pt"
    own = tmp_path / "my.pt"
    own.write_bytes(b"not in any manifest")
    assert find_checkpoint(own) == own
    (folder / "last.pt").unlink()
    assert find_checkpoint(tmp_path) == folder / "step-000002.pt"


def test_a_sweep_in_the_place_of_a_run_is_told(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    with pytest.raises(CheckpointError, match=r"is a sweep: give the run directory of one of its jobs, .*/0$"):
        find_checkpoint(tmp_path)


def test_find_says_what_was_found_instead(tmp_path):
    with pytest.raises(CheckpointError, match=r"outputs does not exist; in .* there is nothing, it is empty"):
        find_checkpoint(tmp_path / "outputs")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "images").mkdir()
    with pytest.raises(CheckpointError, match=r"is not a run directory .*: found images/, notes.txt; give a run"):
        find_checkpoint(tmp_path)
    (tmp_path / ".hydra").mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"run directory .* has no checkpoints: the run ended before .*, or has not come to it yet",
    ):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"has no best.pt: found nothing"):
        find_checkpoint(tmp_path, "best")
    (tmp_path / "checkpoints/manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read .*move it away"):
        find_checkpoint(tmp_path)


def test_a_name_that_cannot_move_is_a_sentence_and_leaves_no_parts(tmp_path, folder, checkpoint_record):
    (folder / "last.pt").mkdir(parents=True)
    with pytest.raises(RecordError, match=r"cannot write .*last.pt: Is a directory"):
        CheckpointWriter(tmp_path).write(checkpoint_record(1))
    assert names(folder) == ["last.pt", "manifest.json", "step-000001.pt"]


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(4)


def flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    with path.open("r+b") as file:  # in place: the step file and last.pt are one
        file.write(content)


@pytest.fixture
def three(tmp_path, folder, checkpoint_record):
    """A run with checkpoints of steps 1, 2 (the best) and 3."""
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(checkpoint_record(step, best=step == 2))
    return folder


def test_a_truncated_or_changed_checkpoint_names_the_one_to_use(three):
    truncate(three / "last.pt")
    before = rf"use the one before it, {three / 'step-000002.pt'}"
    with pytest.raises(CheckpointError, match=rf"last.pt is damaged: it has 4 bytes, .* says 9; {before}"):
        find_checkpoint(three / "last.pt")
    (three / "step-000002.pt").write_bytes(b"weights 1")  # which belongs to another step
    with pytest.raises(CheckpointError, match=r"its sha256 is .*use the one before it, .*step-000001.pt"):
        find_checkpoint(three / "step-000002.pt")
    (three / "step-000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole checkpoint from before it is left"):
        find_checkpoint(three / "step-000001.pt")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (truncate, r"step-000003.pt is damaged: it has 4 bytes, the manifest says 9"),
        (flip, r"step-000003.pt is damaged: its sha256 is \w{12}…, the manifest says"),
    ],
)
def test_a_damaged_last_falls_back_to_the_one_before_with_one_warning(tmp_path, three, caplog, spoil, said):
    spoil(three / "last.pt")
    assert find_checkpoint(tmp_path) == three / "step-000002.pt"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert re.search(rf"{said}.*; using the newest whole one before it, .*step-000002.pt", caplog.messages[0])


def test_it_falls_back_as_far_as_it_must(tmp_path, three, caplog):
    (three / "last.pt").unlink()
    (three / "step-000003.pt").unlink()
    truncate(three / "step-000002.pt")
    assert find_checkpoint(tmp_path) == three / "step-000001.pt"
    assert "step-000003.pt is damaged: it is missing; using the newest whole one before it" in caplog.text
    flip(three / "step-000001.pt")
    with pytest.raises(CheckpointError, match=r"step-000003.pt is damaged: it is missing; no whole checkpoint"):
        find_checkpoint(tmp_path)


def test_the_same_checkpoint_under_another_name_is_no_loss(tmp_path, three, caplog):
    shutil.copy(three / "step-000003.pt", three / "copy")
    (three / "copy").replace(three / "last.pt")  # as on a file system without links
    truncate(three / "step-000003.pt")
    assert find_checkpoint(tmp_path) == three / "last.pt"
    (three / "step-000003.pt").write_bytes(b"weights 3")
    assert find_checkpoint(tmp_path) == three / "last.pt"
    truncate(three / "last.pt")
    assert find_checkpoint(tmp_path) == three / "step-000003.pt"
    assert not caplog.records


def test_a_name_that_is_one_move_behind_does_not_hide_the_newest(tmp_path, three, caplog):
    (three / "last.pt").unlink()
    (three / "last.pt").hardlink_to(three / "step-000002.pt")
    assert find_checkpoint(tmp_path) == three / "step-000003.pt"
    assert not caplog.records
    truncate(three / "step-000003.pt")
    assert find_checkpoint(tmp_path) == three / "last.pt"
    assert "step-000003.pt is damaged" in caplog.text


def zipped(number: int) -> bytes:
    """What torch writes is a zip archive, with a sum for each part."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data/0"), b"weights %d" % number)  # without the time it is
    return content.getvalue()


@pytest.mark.medium
@pytest.mark.parametrize("last", [3, 2, None])
def test_a_checkpoint_that_the_manifest_does_not_name_yet_is_used(tmp_path, folder, checkpoint_record, last, caplog):
    """A process that is killed may leave one. An older one, which was only not removed in time, is not meant."""
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(checkpoint_record(step, zipped(step)))
    (folder / "step-000009.pt").write_bytes(zipped(9))
    for step, at_s in ((9, 1000), (1, 1001), (2, 1002), (3, 1003)):
        os.utime(folder / f"step-{step:06d}.pt", (at_s, at_s))
    known = read_manifest(folder)
    (folder / "manifest.json").write_bytes(encode_manifest({name: known[name] for name in list(known)[:2]}))
    (folder / "last.pt").unlink()
    if last is not None:
        (folder / "last.pt").hardlink_to(folder / f"step-{last:06d}.pt")
    newest = folder / "step-000003.pt"
    assert find_checkpoint(tmp_path) == newest
    assert caplog.messages == [f"checkpoint {newest} is newer than the manifest and whole: using it"]
    with newest.open("r+b") as file:
        file.seek(45)
        file.write(b"W")
    assert find_checkpoint(tmp_path).read_bytes() == zipped(2)
    assert f"{newest} is newer than the manifest, but its part archive/data/0 is damaged" in caplog.text


@pytest.mark.parametrize(
    ("from_end", "value"),
    [(82 - 6, 0xFF), (82 - 8, 1), (82 - 10, zipfile.ZIP_DEFLATED)],
    ids=["version", "encrypted", "compressed"],
)
def test_one_that_the_manifest_does_not_name_may_be_damaged_anywhere(tmp_path, three, from_end, value, caplog):
    content = bytearray(zipped(9))
    content[-from_end] = value  # in the directory at the archive's end: 60 bytes, then 22
    (three / "step-000009.pt").write_bytes(content)
    later = (three / "step-000003.pt").stat().st_mtime + 1  # the clock of the file system may be coarse
    os.utime(three / "step-000009.pt", (later, later))
    assert find_checkpoint(tmp_path) == three / "last.pt"
    assert "step-000009.pt is newer than the manifest, but not whole (" in caplog.text


def test_the_first_checkpoint_may_be_a_step_file_only(tmp_path, folder):
    folder.mkdir()
    (folder / "step-000003.pt").write_bytes(zipped(3))
    assert find_checkpoint(tmp_path) == folder / "step-000003.pt"


def test_the_best_one_has_no_substitute(tmp_path, three, caplog):
    best = three / "best.pt"
    best.unlink()
    assert find_checkpoint(tmp_path, "best") == three / "step-000002.pt"  # the very same
    best.hardlink_to(three / "step-000002.pt")
    flip(best)
    with pytest.raises(CheckpointError, match=r"best.pt is damaged.*use the one before it, .*step-000001.pt"):
        find_checkpoint(tmp_path, "best")
    best.unlink()
    with pytest.raises(CheckpointError, match=r"step-000002.pt is damaged"):
        find_checkpoint(tmp_path, "best")
    (three / "step-000002.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no best\.pt.*type which=last, or give .*last\.pt"):
        find_checkpoint(tmp_path, "best")
    assert not caplog.records


def test_a_foreign_entry_of_the_manifest_is_not_followed(tmp_path, three):
    (tmp_path / "step-9.pt").write_bytes(b"weights 1")
    entries = read_manifest(three)
    entries["step-/../../step-9.pt"] = entries["step-000001.pt"]
    (three / "manifest.json").write_bytes(encode_manifest(entries))
    assert find_checkpoint(tmp_path) == three / "last.pt"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 1, "files": {}}', "it has format 1, and this version of ddp_hydra reads format 2"),
        ('{"checkpoints": {"last.pt": {"parts": [{"name": "a"}]}}}', "missing required field `size`"),
        ('{"checkpoints": {"last.pt": {"parts": [{"name": "a", "size": -3}]}}}', "Expected `int` >= 0"),
        ("[1]", "Expected `object`"),
    ],
)
def test_a_manifest_of_another_format_or_a_broken_one_is_a_sentence(tmp_path, three, content, said):
    (three / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"manifest.json cannot be read .*{re.escape(said)}.*move it away"):
        find_checkpoint(tmp_path)


def test_a_run_whose_checkpoints_are_in_a_store_goes_back_by_its_manifest(tmp_path, folder, checkpoint_record):
    writer = CheckpointWriter(tmp_path)
    for step in (20, 30):
        writer.write(checkpoint_record(step, best=True))
    for path in folder.glob("*.pt"):
        path.unlink()
    CheckpointWriter(tmp_path, is_stored=True).write(Record(BACK, step=20))
    entries = read_manifest(folder)
    assert [entries[name].step for name in ("last.pt", "best.pt")] == [20, 20]
    assert newest_first(entries) == ["step-000020.pt", "step-000030.pt"]
    assert names(folder) == ["manifest.json"]
