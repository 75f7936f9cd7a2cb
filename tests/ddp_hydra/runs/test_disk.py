"""Sizes of runs, and their removal, which leaves all else alone."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddp_hydra.cli import runs
from ddp_hydra.errors import ConfigError, TakenOver
from ddp_hydra.job.remote import uploader
from ddp_hydra.job.remote.status import FencedStore
from ddp_hydra.record import File, Record
from ddp_hydra.run_state import Status, encode
from ddp_hydra.runs import disk, run_files
from ddp_hydra.runs.run_files import LocalRunFiles
from ddp_hydra.storage import urls
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.scheduler import sweep_locked
from ddp_hydra.sweep.summary_files import SummaryFiles, json_text
from ddp_hydra.writers.files import FileWriter
from ddp_hydra.writers.run_dir import locked as run_locked
from tests.ddp_hydra.runs.conftest import kill

pytestmark = pytest.mark.medium
VALUE = SweepObjective("value", maximize=None)


def test_a_file_with_two_names_counts_once(make_run, tmp_path):
    run_dir = make_run("outputs/a")
    (run_dir / "big").symlink_to("/dev/zero")
    files = {path: path.stat() for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink()}
    kinds = disk.usage([str(tmp_path)])[str(run_dir)]
    saved = {found.st_ino: found.st_size for path, found in files.items() if path.parent.name == "checkpoints"}
    assert kinds["checkpoints"] == sum(saved.values())
    assert len(saved) < len(list((run_dir / "checkpoints").iterdir()))
    assert sum(kinds.values()) == sum({found.st_ino: found.st_size for found in files.values()}.values())
    assert kinds["logs"] == (run_dir / "metrics.jsonl").stat().st_size
    inner = make_run("outputs/a/inner")
    assert disk.usage([str(tmp_path)]) == {str(run_dir): kinds, str(inner): disk.usage([str(inner)])[str(inner)]}


def test_a_run_is_removed_and_what_others_have_put_there_is_not(make_run, tmp_path):
    loggers = "results.loggers=[wandb,{_target_: models.my_writer.MyWriter}]"
    run_dir, other = make_run("outputs/a", loggers), make_run("outputs/b")
    writer = FileWriter(run_dir)
    for name in ("samples/1.txt", "samples/2.txt", "samples/1.txt"):
        writer.write(Record(File(name, 1, hashlib.sha256(b"1").hexdigest(), inline="MQ==")))
    writer.close()
    for name in (".hydra/environment.yaml", "logs/wandb.log", "logs/MyWriter.log", "logs/slurm-7.out"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("1")
    (run_dir / "samples" / "mine.txt").write_text("1")
    (run_dir / "checkpoints" / "theirs.ckpt").write_text("1")
    (run_dir / "link").symlink_to(other)
    (run_dir / "notes").mkdir()
    removal = disk.remove(str(run_dir))
    assert removal.freed > 1000
    assert removal.left == ["checkpoints", "link", "notes", "samples"]
    left = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}
    assert left == {"checkpoints", "checkpoints/theirs.ckpt", "link", "notes", "samples", "samples/mine.txt"}
    assert (other / "summary.json").exists()
    disk.remove(str(other))
    assert not other.exists()


def test_a_project_that_was_a_run_directory_stays(make_run, tmp_path, capsys):
    project = make_run("mine")
    for name in (".git/HEAD", "models/net.py", "thesis.txt", "logs/app.log", "tensorboard/notes.md", ".hydra/x.yaml"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("mine")
    runs.main(["rm", str(project), "yes=true"])
    assert (
        "left there, as no run has written it: .git, .hydra, logs, models, tensorboard, thesis"
        in capsys.readouterr().out
    )
    assert {path.read_text() for path in project.rglob("*") if path.is_file()} == {"mine"}
    assert len([path for path in project.rglob("*") if path.is_file()]) == 6


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", '{"status": "ok"}'),
        ("metrics.jsonl", '{"loss": 1}\n'),
        (".hydra/config.yaml", "db: {driver: mysql}"),
        ("sweep.json", '{"method": "grid"}'),
    ],
)
def test_a_folder_of_another_program_is_refused(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    for call in (disk.count, disk.remove):
        with pytest.raises(ConfigError, match="is not a run directory, nor the folder of a sweep"):
            call(str(tmp_path))
    assert (tmp_path / name).exists()


def test_a_running_run_is_refused_and_a_killed_one_is_not(make_run, process_of):
    run_dir = make_run("outputs/a")
    before = set(run_dir.rglob("*"))
    process = process_of(run_dir)
    with pytest.raises(ConfigError, match="is running: end it first"):
        disk.remove(str(run_dir))
    assert before <= set(run_dir.rglob("*"))
    kill(process)
    disk.remove(str(run_dir))
    assert not run_dir.exists()


def test_a_run_whose_driver_has_another_clock_is_refused_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(uploader, "WATCH_S", 1.0)
    run_dir = tmp_path / "run"
    store = FencedStore(urls.open_folder(str(run_dir)))
    store.acquire(None)
    old = time.time() - 100
    store.put("status.json", encode(Status(state="running", scheduler="tcp://x:1", time=old)))
    read, reads = uploader.read, []

    def watched(found):
        reads.append(found)
        if len(reads) == 2:  # its driver writes while it is watched
            store.put("status.json", encode(Status(state="running", scheduler="tcp://x:1", time=old + 1)))
        return read(found)

    monkeypatch.setattr(uploader, "read", watched)
    with pytest.raises(ConfigError, match=r"is running: end it first, with ddp-hydra attach run="):
        disk.remove(str(run_dir))
    assert disk.remove(str(run_dir)).freed > 0  # its driver is gone
    assert not run_dir.exists()
    with pytest.raises(TakenOver):
        store.put("status.json", b"{}")


def test_what_is_no_run_is_refused(make_run, tmp_path):
    run_dir = make_run("outputs/a")
    make_run("outputs/a/inner")
    (tmp_path / "link").symlink_to(run_dir)
    (tmp_path / "notes").mkdir()
    for run, said in {
        "notes": "is not a run directory",
        "link": "is a link: give the folder itself",
        "outputs": "is not a run directory",
        "no_such": "there is no such folder",
        "outputs/a": "holds other runs, too",
    }.items():
        with pytest.raises(ConfigError, match=said):
            disk.remove(str(tmp_path / run))
    assert (run_dir / "inner" / "summary.json").exists()


def test_a_sweep_goes_with_its_jobs_once_it_has_ended(make_run, tmp_path):
    for number in range(2):
        make_run(f"multirun/a/{number}")
    folder = tmp_path / "multirun" / "a"
    (folder / "sweep.json").write_text(
        json_text([JobRow(0, [], "0", JobState.done), JobRow(1, [], "1", JobState.done)], VALUE)
    )
    with sweep_locked(folder), pytest.raises(ConfigError, match="the sweep is running"):
        disk.remove(str(folder))
    assert len(disk.removable(str(folder))) == 2
    (folder / "multirun.yaml").write_text("")
    (folder / "logs").mkdir()
    (folder / "logs" / "slurm-7.out").write_text("")
    (folder / "1" / "notes.txt").write_text("")
    (folder / "plots").mkdir()
    assert disk.remove(str(folder)).left == ["1", "plots"]
    assert {path.name for path in folder.rglob("*")} == {"1", "notes.txt", "plots"}


def test_folders_between_a_sweep_and_its_jobs_go_with_these_if_they_are_empty(make_run, tmp_path):
    names = ["lr0.1/w", "lr0.2/w", "lr0.3/a/w", "lr0.3/b/w"]
    for name in names:
        make_run(f"multirun/a/{name}")
    folder = tmp_path / "multirun" / "a"
    (folder / "sweep.json").write_text(
        json_text([JobRow(number, [], name, JobState.done) for number, name in enumerate(names)], VALUE)
    )
    (folder / "lr0.2" / "mine").mkdir()
    (folder / "empty" / "mine").mkdir(parents=True)
    with sweep_locked(folder):  # it may make a job there
        disk.remove(str(folder / "lr0.3" / "a" / "w"))
    assert (folder / "lr0.3" / "a").is_dir()
    disk.remove(str(folder / "lr0.3" / "b" / "w"))
    assert {path.name for path in (folder / "lr0.3").iterdir()} == {"a"}
    assert disk.remove(f"{folder.parent}/../multirun/a").left == ["empty", "lr0.2", "lr0.3"]
    assert {path.name for path in folder.rglob("*")} == {"empty", "lr0.2", "lr0.3", "a", "mine"}


def test_a_sweep_whose_only_job_is_in_its_own_folder_is_removed(make_run, tmp_path):
    folder = make_run("multirun/a")
    (folder / "sweep.json").write_text(json_text([JobRow(0, [], ".", JobState.done)], VALUE))
    assert disk.remove(str(folder)).left == []
    assert list((tmp_path / "multirun").iterdir()) == []


def test_all_that_a_sweep_writes_beside_its_jobs_goes_with_it(make_run, tmp_path):
    rows = [
        JobRow(number, [f"seed={number}"], str(number), JobState.done, objective=0.1, metrics={"value": 0.1})
        for number in range(2)
    ]
    for row in rows:
        (make_run(f"multirun/a/{row.folder}") / "tensorboard").mkdir(exist_ok=True)
    folder = tmp_path / "multirun" / "a"
    SummaryFiles(folder, VALUE).write(rows, now=True)
    names = {path.name.partition(".out.")[0] for path in folder.iterdir() if path.is_file()}
    assert names == {"sweep.json", "sweep.csv", "sweep.md", "seeds.csv", "events"}
    assert disk.remove(str(folder)).left == []
    assert not folder.exists()


def test_the_runs_of_a_sweep_are_removed_one_at_a_time_those_inside_others_first(make_run, tmp_path, monkeypatch):
    for name in ("0", "0/inner", "1"):
        make_run(f"multirun/a/{name}")
    folder = tmp_path / "multirun" / "a"
    (folder / "sweep.json").write_text(json_text([JobRow(0, [], "0", JobState.done)], VALUE))
    held: list[Path] = []

    @contextmanager
    def locked(run_dir: Path, instead: str) -> Iterator[None]:
        assert not held, "a sweep may have more jobs than a process may open files"
        held.append(run_dir)
        with run_locked(run_dir, instead):
            yield
        held.remove(run_dir)

    monkeypatch.setattr(disk, "locked", locked)
    disk.remove(str(folder))
    assert list((tmp_path / "multirun").iterdir()) == []


def test_tags_are_kept_in_the_run(make_run):
    run_dir = make_run("outputs/a", tags=["first"])
    files = LocalRunFiles(run_dir)
    assert run_files.read_tags(files, ["first"]) == ["first"]
    assert run_files.change_tags(files, ["first"], ["+good", "+v1.0:a/b", "-first", "+good"]) == ["v1.0:a/b", "good"]
    assert run_files.read_tags(files, ["first"]) == ["v1.0:a/b", "good"]
    with pytest.raises(ConfigError, match=r"has no tag bad; it has v1\.0:a/b, good$"):
        run_files.change_tags(files, [], ["+new", "-bad"])
    assert run_files.read_tags(files, []) == ["v1.0:a/b", "good"]
    for word in ("+a b", "+\x1b[1m", "good", "+" + "a" * 65):
        with pytest.raises(ConfigError, match="give \\+good or -old"):
            run_files.change_tags(files, [], [word])
    assert run_files.read_tags(files, []) == ["v1.0:a/b", "good"]
    assert not list(Path(run_dir).glob(".part-*"))


@pytest.fixture
def closed(monkeypatch) -> list[str]:
    """Names of folders that may not be read, nor what is in them."""
    names: list[str] = []
    scan, open_below = os.scandir, run_files.open_below

    def refused(path: str) -> None:
        if set(names) & set(Path(path).parts):
            raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", lambda path=".": refused(os.fspath(path)) or scan(path))
    monkeypatch.setattr(run_files, "open_below", lambda top, name: refused(f"{top}/{name}") or open_below(top, name))
    return names


@pytest.mark.parametrize("name", ["checkpoints", "manifest.json", "profile"])
def test_a_run_that_cannot_be_read_whole_is_not_removed_at_all(make_run, tmp_path, closed, name):
    run_dir = make_run("outputs/a")
    (run_dir / "profile").mkdir()
    before = sorted(run_dir.rglob("*"))
    closed.append(name)
    with pytest.raises(ConfigError, match=rf"{name}.*: Permission denied"):
        runs.main(["rm", str(make_run("outputs/b")), str(run_dir), "yes=true"])
    closed.clear()
    assert sorted(run_dir.rglob("*")) == before
    assert (tmp_path / "outputs/b/summary.json").exists()
    assert disk.remove(str(run_dir)).left == []


def test_what_may_not_be_read_is_told_and_not_counted_in_silence(make_run, closed, caplog):
    run_dir = make_run("outputs/a")
    closed.append("checkpoints")
    assert disk.usage([str(run_dir)])[str(run_dir)]["checkpoints"] == 0
    assert f"{run_dir}/checkpoints: Permission denied: what it holds is not counted" in caplog.messages


def test_words_and_tags_that_may_not_be_read_are_not_taken_for_none(make_run, closed):
    run_dir = make_run("outputs/a", tags=["old"])
    runs.main(["tag", str(run_dir), "+kept"])
    closed += ["overrides.yaml", "tags.json"]
    with pytest.raises(ConfigError, match=r"a/\.hydra/overrides\.yaml: Permission denied: check its rights"):
        runs.main(["reproduce", str(run_dir)])
    with pytest.raises(ConfigError, match=r"a/tags\.json: Permission denied"):
        runs.main(["tag", str(run_dir), "+new"])
