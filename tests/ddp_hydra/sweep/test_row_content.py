"""What a job says of itself is taken over, whatever it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.sweep import summary_files
from ddp_hydra.sweep.pruning import losers
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective

ACCURACY = SweepObjective("val/accuracy", maximize=True)


@pytest.fixture
def row():
    return JobRow(0, [], "0")


def test_a_status_and_then_a_summary_are_taken_over(row, tmp_path):
    status = {"step": 5, "total_steps": 10, "epoch": 1, "epochs": 2, "world_size": 2, "eta_s": 1.5}
    (tmp_path / "status.json").write_text(json.dumps(status | {"metrics": {"val/accuracy": 0.5, "lr": None}}))
    summary_files.read_status(row, tmp_path, ACCURACY)
    assert (row.step, row.total_steps, row.workers, row.eta_s, row.objective) == (5, 10, 2, 1.5, 0.5)
    (tmp_path / "summary.json").write_text(
        json.dumps({"status": "done", "steps": 10, "metrics": {"val/accuracy": 0.75}})
    )
    summary_files.read_summary(row, tmp_path, ACCURACY)
    assert (row.step, row.workers, row.objective, row.metrics) == (10, 2, 0.75, {"val/accuracy": 0.75, "lr": None})
    assert (row.epoch, row.epochs) == (2, 2)


@pytest.mark.parametrize("last", ["status.json", "summary.json"])
def test_a_job_whose_last_value_is_not_finite_does_not_count_by_an_earlier_one(row, tmp_path, last):
    (tmp_path / "status.json").write_text(json.dumps({"step": 5, "metrics": {"val/accuracy": 0.9}}))
    summary_files.read_status(row, tmp_path, ACCURACY)
    (tmp_path / "status.json").write_text(json.dumps({"step": 6, "metrics": {"lr": 0.1}}))
    summary_files.read_status(row, tmp_path, ACCURACY)
    assert row.objective == 0.9, "the epoch is not over"
    (tmp_path / last).write_text(json.dumps({"status": "done", "steps": 10, "metrics": {"val/accuracy": None}}))
    if last == "status.json":
        summary_files.read_status(row, tmp_path, ACCURACY)
    else:
        summary_files.take_end(row, tmp_path, ACCURACY)
    assert (row.objective, row.metrics["val/accuracy"], row.value) == (None, None, None)
    good = JobRow(1, [], "1", JobState.done, 0.5)
    row.state = JobState.done
    assert losers([row, good], ACCURACY, 1) == [row]


@pytest.mark.parametrize(("status", "state"), [("done", JobState.done), ("failed", JobState.interrupted)])
def test_a_job_that_was_done_when_the_sweep_was_killed_is_done(row, tmp_path, status, state):
    row.state = JobState.interrupted
    summary = {"status": status, "steps": 10, "metrics": {"val/accuracy": 0.75}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    summary_files.take_end(row, tmp_path, ACCURACY)
    assert row.state == state
    assert row.value == row.objective == (0.75 if status == "done" else None)
    summary_files.take_end(row, tmp_path / "nowhere", ACCURACY)


def test_a_job_that_ends_keeps_its_number_of_steps(row, tmp_path):
    (tmp_path / "status.json").write_text(json.dumps({"step": 5, "total_steps": 10}))
    summary_files.read_status(row, tmp_path, ACCURACY)
    (tmp_path / "status.json").unlink()
    summary_files.read_status(row, tmp_path, ACCURACY)
    assert (row.step, row.total_steps) == (5, 10)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done", "steps": 8}))
    summary_files.read_summary(row, tmp_path, ACCURACY)
    assert (row.step, row.total_steps, row.epoch) == (8, 10, None), "it ended before its last step"
    quick = JobRow(1, [], "1")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done", "steps": 10}))
    summary_files.read_summary(quick, tmp_path, ACCURACY)
    assert (quick.step, quick.total_steps) == (10, 10)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"step": "many", "metrics": [1], "epoch": true}', '{"metrics": {"a": "x"}}']
)
def test_what_is_none_changes_nothing_that_matters(row, tmp_path, text):
    for name in ("status.json", "summary.json"):
        (tmp_path / name).write_text(text)
    summary_files.read_status(row, tmp_path, ACCURACY)
    summary_files.read_summary(row, tmp_path / "nowhere", ACCURACY)
    assert (row.step, row.objective, row.epoch) == (None, None, None)


@pytest.mark.parametrize(
    ("value", "kept"),
    [(0.5, 0.5), ((1, 2.0), [1, 2.0]), ({"a": 1}, {"a": 1}), ({1: 2}, None), (object(), None), ("t", "t")],
)
def test_a_value_is_kept_where_json_keeps_it(row, value, kept):
    summary_files.take_value(row, value, ACCURACY)
    assert row.value == kept
    assert row.objective == (0.5 if value == 0.5 else None)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_a_scalar_of_numpy_or_torch_is_a_number(row, value):
    summary_files.take_value(row, value, ACCURACY)
    assert (row.value, row.objective) == (0.5, 0.5)
    assert type(row.value) is float
    assert summary_files.plain_value({"a": [value, np.int64(3)]}) == {"a": [0.5, 3]}
    assert summary_files.plain_value(np.array([0.5])) is None


@pytest.mark.medium
@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_value_is_taken_without_an_error(value):
    json.dumps(summary_files.plain_value(value))
