"""What two runs differ in."""

from __future__ import annotations

import pytest

from ddp_hydra.runs import details, run_files


@pytest.mark.medium
def test_other_names_of_the_same_keys_are_no_differences(make_run):
    runs = [make_run(name) for name in "ab"]
    for run, name in zip(runs, ("${data.size}", "${..size}"), strict=True):
        (run / ".hydra" / "config.yaml").write_text(f"data: {{size: 3, train: {{_target_: A, size: '{name}'}}}}")
    assert details.between(*map(run_files.open_run, runs))["config"] == {}


@pytest.mark.medium
def test_values_of_the_environment_are_compared_where_each_run_has_kept_them(make_run):
    runs = [make_run(name) for name in "ab"]
    for run in runs:
        (run / ".hydra" / "config.yaml").write_text("data: {scale: '${oc.env:SCALE}'}")
    for number, run in enumerate(runs):
        assert details.between(*map(run_files.open_run, runs))["config"] == {}
        (run / ".hydra" / "environment.yaml").write_text(f"data.scale: {number}\n")
    assert details.between(*map(run_files.open_run, runs))["config"] == {"data.scale": [0, 1]}
