"""Runs below folders: which they are, their rows, and the index."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import asdict

from ddp_hydra.errors import ConfigError
from ddp_hydra.runs import find, run_files
from ddp_hydra.runs.describe import RunRow, choices
from ddp_hydra.runs.run_files import LocalRunFiles
from ddp_hydra.storage.files import user_cache
from ddp_hydra.sweep.rows import JobRow as SweepRow
from ddp_hydra.sweep.rows import JobState, SweepObjective
from ddp_hydra.sweep.summary_files import json_text
from tests.ddp_hydra.runs.conftest import kill

pytestmark = pytest.mark.medium


def by_name(root: Path) -> dict[str, RunRow]:
    return {Path(row.run).name: row for row in find.rows([str(root)])}


def test_a_row_has_what_a_run_has_left(make_run, tmp_path):
    make_run("outputs/a", "model=resnet18", steps=5, tags=["good"], loss=0.25)
    (row,) = find.rows([str(tmp_path / "outputs")])
    assert (row.run, row.status, row.step) == (str(tmp_path / "outputs/a"), "done", 5)
    assert (row.objective, row.maximize, row.value) == ("val/loss", False, 0.25)
    assert (row.model, row.tags, row.overrides) == ("resnet18", ["good"], ["model=resnet18"])
    assert (row.project, row.metrics) == ("c0de" * 16, {"val/loss": 0.25})
    assert row.data
    assert row.started is not None
    assert row.wall_s is not None


def test_a_running_run_is_shown_as_it_is(make_run, process_of, tmp_path):
    run_dir = make_run("outputs/a")
    (run_dir / "summary.json").unlink()
    process = process_of(run_dir)
    row = by_name(tmp_path)["a"]
    assert (row.status, row.total_steps) == ("running", 9)
    assert (row.objective, row.maximize, row.tags) == ("val/loss", False, ["good"])
    assert row.wall_s is not None
    kill(process)
    assert by_name(tmp_path)["a"].status == "killed"


def test_runs_are_found_at_any_depth_but_not_behind_links_or_in_hidden_folders(make_run, tmp_path, monkeypatch):
    for name in ("outputs/a", "outputs/x/y/z/b", "outputs/a/inner", "outputs/.hidden/c", "elsewhere/d"):
        make_run(name)
    (tmp_path / "outputs" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "outputs" / "loop").symlink_to(tmp_path / "outputs")
    (tmp_path / "outputs" / "a" / "checkpoints" / ".hydra").mkdir()
    monkeypatch.chdir(tmp_path)
    assert {row.run for row in find.rows([])} == {"outputs/a", "outputs/a/inner", "outputs/x/y/z/b"}
    assert {row.run for row in find.rows(["."])} >= {"outputs/a", "elsewhere/d"}
    assert [row.run for row in find.rows(["outputs/a/inner", "outputs/a/inner"])] == ["outputs/a/inner"]
    with pytest.raises(ConfigError, match="no_such: there is no such folder"):
        find.rows(["no_such"])


def test_a_second_listing_reads_no_file_of_a_run_that_has_not_changed(make_run, tmp_path, monkeypatch):
    run_dir, other = make_run("outputs/a"), make_run("outputs/b")
    first = find.rows([str(tmp_path / "outputs")])
    read: list[str] = []
    original = LocalRunFiles.read
    monkeypatch.setattr(LocalRunFiles, "read", lambda self, *name: read.append(self.place) or original(self, *name))
    assert find.rows([str(tmp_path / "outputs")]) == first
    assert read == []
    run_files.change_tags(LocalRunFiles(run_dir), [], ["+new"])
    assert by_name(tmp_path / "outputs")["a"].tags == ["new"]
    assert set(read) == {str(run_dir)}
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    assert by_name(tmp_path / "outputs")["b"].status == "interrupted"
    os.rename(run_dir, tmp_path / "away")  # noqa: PTH104
    assert set(by_name(tmp_path / "outputs")) == {"b"}
    (index,) = (user_cache() / "runs").iterdir()
    assert len(json.loads(index.read_text())["rows"]) == 1


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff\xfe", b'{"version": 1, "columns": [], "rows": 7}', b"[" * 100_000],
)
def test_a_damaged_index_is_as_good_as_none(make_run, tmp_path, damage, monkeypatch):
    make_run("outputs/a")
    first = find.rows([str(tmp_path)])
    (index,) = (user_cache() / "runs").iterdir()
    index.write_bytes(damage)
    assert find.rows([str(tmp_path)]) == first
    assert json.loads(index.read_bytes())["version"] == find.VERSION
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find.rows([str(tmp_path)]) == first, "nor can one be written"


HOSTILE = {
    "status": "\x1b]0;title\x07", "tags": {"a": 1}, "metrics": {"x" * 9000: 1e999, "y": "1", "z": True, "w": 10**400},
    "started": 1e300, "wall_s": "long", "steps": -1.5, "failure": "no table", "project": ["no text"],
    "objective": {"metric": 7},
}  # fmt: skip


@pytest.mark.parametrize("content", [json.dumps(HOSTILE), "null", "{" * 100_000, '{"metrics": [1], "objective": []}'])
def test_odd_files_give_an_odd_row_and_no_error(tmp_path, content):
    for name in ("summary.json", "status.json", "tags.json"):
        (tmp_path / name).write_text(content)
    (tmp_path / ".hydra").mkdir()
    for name in ("config", "hydra", "overrides"):
        (tmp_path / ".hydra" / f"{name}.yaml").write_text("a: !!python/object/apply:os.system ['touch pwned']\n")
    (row,) = find.rows([str(tmp_path)])
    assert row.status == "unreadable"
    assert json.loads(json.dumps(asdict(row), allow_nan=False)) == asdict(row)
    assert find.rows([str(tmp_path)]) == [row]


def test_links_pipes_and_huge_files_are_not_read(tmp_path):
    (tmp_path / "secret.json").write_text('{"status": "done", "project": "secret"}')
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "summary.json").symlink_to(tmp_path / "secret.json")
    os.mkfifo(run_dir / "status.json")
    with (run_dir / "tags.json").open("wb") as file:
        file.truncate(2**30)
    (row,) = find.rows([str(run_dir)])
    assert (row.project, row.tags, row.status) == ("", [], "killed")


def test_jobs_of_another_app_are_what_their_sweep_says(tmp_path):
    rows = []
    for number, state in enumerate([JobState.done, JobState.failed, JobState.running, JobState.queued]):
        (tmp_path / str(number) / ".hydra").mkdir(parents=True)
        objective = 0.5 if state is JobState.done else None
        rows.append(SweepRow(number, [f"x={number}"], str(number), state, objective, message="why"))
    (tmp_path / "sweep.json").write_text(json_text(rows, SweepObjective("result", False)))
    found = by_name(tmp_path)
    assert [found[str(number)].status for number in range(4)] == ["done", "failed", "killed", "unknown"]
    assert (found["0"].objective, found["0"].value, found["0"].overrides) == ("result", 0.5, ["x=0"])


def test_jobs_whose_subdir_has_slashes_are_what_their_sweep_says(tmp_path, monkeypatch):
    folders = ("lr0.1/w", "lr0.1/w/inner", "lr0.2/./w")
    for folder in folders:
        (tmp_path / "s" / folder / ".hydra").mkdir(parents=True)
    rows = [SweepRow(number, [], folders[number], JobState.done, 0.5) for number in (0, 2)]
    (tmp_path / "s" / "sweep.json").write_text(json_text(rows, SweepObjective("result", False)))
    monkeypatch.chdir(tmp_path)
    assert {row.run: (row.status, row.value) for row in find.rows(["s"])} == {
        "s/lr0.1/w": ("done", 0.5), "s/lr0.1/w/inner": ("unknown", None), "s/lr0.2/w": ("done", 0.5),
    }  # fmt: skip
    monkeypatch.chdir("s/lr0.1")
    assert [row.status for row in find.rows(["w"])] == ["done", "unknown"]
    monkeypatch.chdir("w")
    assert [row.status for row in find.rows(["."])] == ["done", "unknown"]


def test_options_of_the_groups_are_read_as_hydra_writes_them(hydra_files):
    found = choices((hydra_files("model=resnet18") / "hydra.yaml").read_bytes())
    assert (found["model"], found["optimizer"], found["hydra/launcher"]) == ("resnet18", "sgd", "dask_ddp")
    assert choices(b"") == choices(b"\n    choices:\nno: 1") == {}
