"""Only the best jobs keep their checkpoints."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path

import pytest

from ddp_hydra.errors import CheckpointError
from ddp_hydra.storage import run_ref
from ddp_hydra.storage.manifest import (
    CheckpointEntry,
    CheckpointPart,
    encode_manifest,
    find_checkpoint,
    name_in_store,
    read_manifest,
)
from ddp_hydra.storage.run_ref import fetch_checkpoint
from ddp_hydra.storage.urls import POINTER
from ddp_hydra.sweep.pruning import Pruning, losers, number_kept
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.writers.run_dir import locked

ACCURACY = SweepObjective("val/accuracy", maximize=True)
LOSS = SweepObjective("val/loss", maximize=False)


def row(number: int, objective: float | None, state: JobState = JobState.done, *overrides: str) -> JobRow:
    return JobRow(number, list(overrides), str(number), state, objective)


def with_checkpoints(run_dir: Path, mirror: Path | None = None) -> Path:
    """Make a run's checkpoints, and those of its mirror."""
    content = run_dir.name.encode()
    part = CheckpointPart(name="step-000010.pt", size=len(content), sha256=hashlib.sha256(content).hexdigest())
    entry = CheckpointEntry(parts=[part], step=10)
    for place in filter(None, (run_dir, mirror)):
        step = "step-000010.pt" if place == run_dir else name_in_store("step-000010.pt", entry)
        folder = place / "checkpoints"
        folder.mkdir(parents=True)
        for name in (step, "last.pt", "best.pt") if place == run_dir else (step,):
            (folder / name).write_bytes(content)
        names = (step, "last.pt", "best.pt")
        (folder / "manifest.json").write_bytes(encode_manifest(dict.fromkeys(names, entry)))
        (folder / "notes.txt").write_text("the user's own")
    return run_dir / "checkpoints"


@pytest.mark.parametrize(
    ("objective", "most", "expected"),
    [(ACCURACY, 2, [0, 3]), (LOSS, 2, [1, 3]), (ACCURACY, 0, [0, 1, 2, 3]), (ACCURACY, 9, [])],
)
def test_losers_are_done_or_stopped_and_worse_than_enough_others(objective, most, expected):
    ended = [row(0, 0.1), row(1, 0.8), row(2, 0.5, JobState.stopped), row(3, math.nan)]
    others = [state for state in JobState if state not in (JobState.done, JobState.stopped)]
    rows = ended + [row(number, 0.0, state) for number, state in enumerate(others, 4)]
    assert sorted(one.number for one in losers(rows, objective, most)) == expected


def test_a_job_whose_best_checkpoint_is_better_than_its_last_one_stays_too():
    rows = [row(0, 0.8), row(1, 0.2), row(2, 0.3), row(3, 0.7)]
    rows[1].best, rows[2].best = 0.9, 0.4
    assert [one.number for one in losers(rows, ACCURACY, 1)] == [2, 3]
    assert [one.number for one in losers(rows, ACCURACY, 0)] == [0, 1, 2, 3]


def test_each_data_set_has_its_best():
    for key in ("data", "data.target"):
        rows = [row(n, n / 10, JobState.done, f"{key}={'ab'[n % 2]}") for n in range(4)]
        assert [one.number for one in losers(rows, ACCURACY, 1)] == [0, 1]


def member(number: int, generation: int, objective: float | None, state: JobState = JobState.paused) -> JobRow:
    found = row(number, objective, state)
    found.labels = {"generation": str(generation)}
    return found


def test_a_generation_loses_once_all_members_of_the_next_one_have_ended_well():
    first = [member(0, 0, 0.9), member(1, 0, 0.2, JobState.done)]
    assert losers(first, ACCURACY, 0) == [], "one has paused: the next generation begins with both"
    second = [member(2, 1, 0.3), member(3, 1, None, JobState.queued)]
    for state in (JobState.queued, JobState.running, JobState.failed, JobState.interrupted):
        second[1].state = state
        assert losers([*first, *second], ACCURACY, 0) == []
    second[1].state = JobState.paused
    assert losers([*first, *second], ACCURACY, 9) == first, "also the best of all: the last generation counts"


def test_of_the_last_generation_the_best_stay():
    first = [member(0, 0, 0.9), member(1, 0, 0.2)]
    last = [member(2, 1, 0.3, JobState.done), member(3, 1, 0.4, JobState.running)]
    assert losers([*first, *last], ACCURACY, 1) == []
    last[1].state = JobState.done
    assert losers([*first, *last], ACCURACY, 1) == [*first, last[0]]
    last[1].state = JobState.failed
    assert losers([*first, *last], ACCURACY, 1) == [], "a retry of it begins with a checkpoint of the first one"
    assert losers([*first, *last], ACCURACY, 0) == [last[0]]


def test_checkpoints_go_as_soon_as_a_job_is_a_loser(tmp_path):
    rows = [row(n, None, JobState.running) for n in range(4)]
    folders = [with_checkpoints(tmp_path / str(n)) for n in range(4)]
    pruning = Pruning(tmp_path, "best:1", ACCURACY)
    for number, value in ((2, 0.5), (0, 0.7), (1, 0.6)):
        pruning.finish(rows)
        rows[number].state, rows[number].objective = JobState.done, value
    rows[3].state, rows[3].objective = JobState.failed, 0.1
    pruning.finish(rows)
    assert [(folder / "last.pt").exists() for folder in folders] == [True, False, False, True]
    assert [one.message for one in rows[1:3]] == ["its checkpoints were removed: hydra.launcher.keep=best:1"] * 2
    assert rows[0].message == rows[3].message == ""
    for folder in folders[1:3]:
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "notes.txt"]
        assert read_manifest(folder) == {}
        for which in ("last", "best"):
            with pytest.raises(CheckpointError, match=r"were removed: hydra\.launcher\.keep=best:1"):
                find_checkpoint(folder.parent, which)
    assert find_checkpoint(tmp_path / "0").name == "last.pt"
    pruning.finish(rows)
    assert rows[1].message.count("removed") == 1


def test_a_job_whose_folder_was_removed_is_not_among_the_best(tmp_path):
    rows, folder = [row(0, 0.9), row(1, 0.2)], with_checkpoints(tmp_path / "1")
    Pruning(tmp_path, "best:1", ACCURACY).finish(rows)
    assert (folder / "last.pt").is_file()
    assert [one.message for one in rows] == ["", ""]


def test_a_sweep_that_was_killed_while_it_removed_goes_on_with_it(tmp_path):
    rows = [row(0, 0.1), row(1, 0.2)]
    folder = with_checkpoints(tmp_path / "0")
    (tmp_path / "1").mkdir()
    (folder / "manifest.json").write_bytes(encode_manifest({}, removed="hydra.launcher.keep=best:1"))
    (folder / "best.pt").unlink()
    Pruning(tmp_path, "best:1", ACCURACY).finish(rows)
    assert not list(folder.glob("*.pt"))
    assert "removed" in rows[0].message


@pytest.mark.medium
def test_a_run_that_somebody_writes_or_whose_manifest_is_odd_is_left_alone(tmp_path, caplog):
    rows = [row(0, 0.1), row(1, 0.2), row(2, 0.3), row(3, 0.0)]
    folder, odd = with_checkpoints(tmp_path / "0"), with_checkpoints(tmp_path / "1")
    (odd / "manifest.json").write_text("[]")
    for number in (2, 3):
        (tmp_path / str(number)).mkdir()
    pruning = Pruning(tmp_path, "best:1", ACCURACY)
    with locked(tmp_path / "0"):
        pruning.finish(rows)
    assert (folder / "last.pt").is_file()
    assert (odd / "last.pt").is_file()
    assert [one.message for one in rows] == [""] * 4
    assert len(caplog.messages) == 2
    pruning.finish(rows)
    assert len(caplog.messages) == 2
    Pruning(tmp_path, "best:1", ACCURACY).finish(rows)
    assert not (folder / "last.pt").exists(), "when the sweep is resumed"


@pytest.mark.parametrize(("keep", "most"), [("all", None), (None, None), ("none", 0), ("best:12", 12)])
def test_what_is_kept(keep, most, tmp_path):
    assert number_kept(keep) == most
    folder = with_checkpoints(tmp_path / "0")
    Pruning(tmp_path, keep, SweepObjective("m", True)).finish([row(0, 0.1)])
    assert (folder / "last.pt").exists() == (most != 0)


@pytest.mark.integration
def test_checkpoints_go_from_the_mirror_and_then_from_the_run_directory(tmp_path, monkeypatch):
    remove_checkpoints = run_ref.remove_checkpoints

    def remove(place, *rest):  # in the forked process
        number = Path(place).name
        (tmp_path / f"there-{number}").write_text(str((folders[int(number)] / "last.pt").exists()))
        remove_checkpoints(place, *rest)

    monkeypatch.setattr(run_ref, "remove_checkpoints", remove)
    rows, mirror = [row(n, n / 10) for n in range(3)], tmp_path / "mirror"
    folders = [with_checkpoints(tmp_path / str(n), mirror / str(n)) for n in range(3)]
    pruning = Pruning(tmp_path, "best:1", ACCURACY, f"{mirror}/")
    pruning.update(rows)
    pruning.finish(rows)
    assert [(tmp_path / f"there-{number}").read_text() for number in range(2)] == ["True"] * 2, "the store is first"
    assert [one.message for one in rows] == [pruning.note, pruning.note, ""]
    for number in range(2):
        for folder in (folders[number], mirror / str(number) / "checkpoints"):
            assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "notes.txt"]
        with pytest.raises(CheckpointError, match=r"were removed: hydra\.launcher\.keep=best:1"):
            fetch_checkpoint(str(mirror / str(number)), tmp_path / "back")
    assert fetch_checkpoint(str(mirror / "2"), tmp_path / "back").read_bytes() == b"2"
    assert find_checkpoint(tmp_path / "2").name == "last.pt"


@pytest.mark.integration
def test_checkpoints_that_are_in_a_store_only_go_from_there(tmp_path):
    rows, root = [row(n, n / 10) for n in range(2)], tmp_path / "root"
    for number in range(2):
        with_checkpoints(tmp_path / "made" / str(number), root / str(number))
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / POINTER).write_text(f"{root / str(number)}\n")
    pruning = Pruning(tmp_path, "best:1", ACCURACY)
    pruning.finish(rows)
    assert [one.message for one in rows] == [pruning.note, ""]
    assert [len(list((root / str(n) / "checkpoints").glob("step-*"))) for n in range(2)] == [0, 1]


@pytest.mark.integration
def test_what_a_store_refuses_to_remove_stays_everywhere_and_is_said_once(tmp_path, caplog):
    rows, mirror = [row(n, n / 10) for n in range(4)], tmp_path / "mirror"
    folders = [with_checkpoints(tmp_path / str(n), mirror / str(n)) for n in range(4)]
    (mirror / "0" / "checkpoints" / "manifest.json").write_text("garbage")
    rows[1].overrides = ["results.mirror=s3://bucket/a?x"]
    (folders[2] / "manifest.json").write_text("garbage")
    pruning = Pruning(tmp_path, "best:1", ACCURACY, str(mirror))
    pruning.finish(rows)
    pruning.finish(rows)
    assert [one.message for one in rows] == [""] * 4
    assert all((folder / "last.pt").exists() for folder in folders)
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(": ")[0] for text in said] == [f"the checkpoints of job {n} stay" for n in range(3)]
    assert "is not the manifest of checkpoints" in said[0]
    assert "a bucket is given as s3://bucket/folder" in said[1]


@pytest.mark.integration
def test_the_end_of_a_sweep_does_not_wait_for_ever_for_a_store(tmp_path, monkeypatch, caplog):
    rows, mirror = [row(n, n / 10) for n in range(2)], tmp_path / "mirror"
    folders = [with_checkpoints(tmp_path / str(n), mirror / str(n)) for n in range(2)]
    monkeypatch.setattr(run_ref, "remove_checkpoints", lambda *_: time.sleep(60))
    pruning = Pruning(tmp_path, "best:1", ACCURACY, str(mirror))
    pruning.finish(rows, lambda: 0.0)
    assert (folders[0] / "last.pt").exists()
    assert "the checkpoints of job 0 stay: the process that removes them " in caplog.text
