from __future__ import annotations

import errno
import os

import pytest

from ddp_hydra.errors import RecordError
from ddp_hydra.record import Log, Record
from ddp_hydra.storage.files import cannot_write
from ddp_hydra.writers.files import FileWriter


def test_inline_and_fetched_files_arrive(tmp_path, file_record, tree):
    asked = []

    def fetch(record, target):
        asked.append(record.data.source)
        target.write_bytes(b"from far away")

    writer = FileWriter(tmp_path, fetch)
    writer.write(file_record("samples/epoch-3.txt", b"near"))
    writer.write(file_record("big/one.bin", b"from far away", inline=None, source="spool/1"))
    assert (tmp_path / "samples/epoch-3.txt").read_bytes() == b"near"
    assert (tmp_path / "big/one.bin").read_bytes() == b"from far away"
    assert asked == ["spool/1"]
    writer.write(file_record("big/one.bin", b"newer"))
    assert (tmp_path / "big/one.bin").read_bytes() == b"newer"
    assert tree(tmp_path) == {"big/one.bin", "samples/epoch-3.txt"}


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/tmp/x",
        "a/../../x",
        "checkpoints/../../x",
        "checkpoints/last.pt",
        "Checkpoints/last.pt",
        "tensorboard/events",
        "logs/rank-0.log",
        "./metrics.jsonl",
        "summary.json",
        "stop",
        "status.json",
        "results.url",
        "manifest.json",
        "any-name-that-may-mean-something-one-day",
        ".hydra/config.yaml",
        "a/.hidden",
        "a\0b",
        "a=b",
        "",
        ".",
    ],
)
def test_hostile_paths_are_refused(tmp_path, file_record, path, tree):
    run_dir = tmp_path / "outer" / "run"
    run_dir.mkdir(parents=True)
    with pytest.raises(RecordError, match=r"is not allowed|give a folder of its own"):
        FileWriter(run_dir).write(file_record(path))
    assert tree(tmp_path) == set()


def test_links_inside_the_run_directory_lead_nowhere(tmp_path, file_record):
    outside, run_dir = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run_dir.mkdir()
    (outside / "kept").write_text("mine")
    (run_dir / "folder").symlink_to(outside)
    (run_dir / "dangling").symlink_to(outside / "new")
    (run_dir / "mine").mkdir()
    (run_dir / "mine" / "link.txt").symlink_to(outside / "kept")
    writer = FileWriter(run_dir)
    for path in ("folder/kept", "folder/deeper/x", "dangling/x"):
        with pytest.raises(RecordError, match="symbolic link"):
            writer.write(file_record(path))
    writer.write(file_record("mine/link.txt", b"replaces the link"))
    assert not (run_dir / "mine" / "link.txt").is_symlink()
    assert (outside / "kept").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sha256": "0" * 64}, "was changed on its way"),
        ({"sha256": "\x1b[31m"}, "was changed on its way"),
        ({"size": 99}, "5 bytes of 99"),
        ({"inline": "%%%"}, "not base64"),
        ({"inline": "é"}, "not base64"),
        ({"inline": None}, "without content"),
        ({"inline": None, "source": "s"}, "without content"),
    ],
)
def test_a_file_that_is_not_what_was_announced_leaves_the_old_one(tmp_path, file_record, changes, sentence, tree):
    writer = FileWriter(tmp_path)
    writer.write(file_record("a/b.txt", b"old"))
    with pytest.raises(RecordError, match=sentence) as caught:
        writer.write(file_record("a/b.txt", b"newer", **changes))
    assert "\x1b" not in str(caught.value)
    assert "'a/b.txt' of rank 2" in str(caught.value)
    assert (tmp_path / "a/b.txt").read_bytes() == b"old"
    assert tree(tmp_path) == {"a/b.txt"}


def fetch_nothing(record, target):
    pass


def fetch_half(record, target):
    target.write_bytes(b"he")
    raise ConnectionResetError("the worker is gone")


def fetch_folder(record, target):
    target.symlink_to(__file__)


@pytest.mark.parametrize(
    ("fetch", "sentence"),
    [
        (fetch_nothing, "did not arrive: 5 bytes"),
        (fetch_half, r"cannot be fetched from its host: the worker is gone"),
        (fetch_folder, "is not a plain file"),
    ],
)
def test_a_failing_fetch_leaves_nothing_behind(tmp_path, file_record, fetch, sentence, tree):
    with pytest.raises(RecordError, match=sentence):
        FileWriter(tmp_path, fetch).write(file_record("a/b.txt", inline=None, source="s"))
    assert tree(tmp_path) == set()


def test_a_path_through_a_file_or_onto_a_folder_is_a_sentence(tmp_path, file_record, tree):
    writer = FileWriter(tmp_path)
    writer.write(file_record("a/b/c", b"kept"))
    for path in ("a/b/c/d", "a/b", "a/" + "n" * 300):
        with pytest.raises(RecordError, match=r"cannot write .*: (File exists|Not a dir|Is a dir|File name too)"):
            writer.write(file_record(path))
    assert tree(tmp_path) == {"a/b/c"}


def test_other_kinds_are_ignored(tmp_path, checkpoint_record, tree):
    writer = FileWriter(tmp_path)
    writer.write(Record(Log("x")))
    writer.write(checkpoint_record(1))
    assert tree(tmp_path) == set()


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOENT, "its folder is missing"), (errno.EFBIG, "ulimit -f"), (errno.EIO, "stays whole")],
)
def test_a_failed_write_says_what_may_be_done(number, said):
    error = cannot_write("checkpoints", OSError(number, os.strerror(number)))
    assert str(error).startswith(f"cannot write checkpoints: {os.strerror(number)}; ")
    assert said in str(error)
