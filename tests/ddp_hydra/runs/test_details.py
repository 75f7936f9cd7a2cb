"""What two runs differ in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hydra.runs import details, run_files


@pytest.mark.medium
def test_other_names_of_the_same_keys_are_no_differences(make_run):
    runs = [make_run(name) for name in "ab"]
    for run, name in zip(runs, ("${data.size}", "${..size}"), strict=True):
        (run / ".hydra" / "config.yaml").write_text(f"data: {{size: 3, train: {{_target_: A, size: '{name}'}}}}")
    assert details.between(*map(run_files.open_run, runs))["config"] == {}


@pytest.mark.medium
def test_variables_that_were_typed_are_compared_and_told_without_secrets(make_run):
    given = ("+hydra.job.env_set={PLACE: /%s, TOKEN: hunter%s}", "hydra.job.env_copy=[HOME]", "hydra.verbose=false")
    one, two = (
        run_files.open_run(make_run(name, *(word.replace("%s", name) for word in given), "seed=1")) for name in "ab"
    )
    assert details.between(one, two)["config"] == {"hydra.job.env_set.PLACE": ["/a", "/b"]}
    typed = ["seed=1", "+hydra.job.env_set={PLACE: /a, TOKEN: ***}", "hydra.job.env_copy=[HOME]"]
    assert details.row(one).overrides == typed
    (Path(two.place) / ".hydra" / "hydra.yaml").unlink()
    found = details.between(one, two)["config"]
    assert found == {}, "what is unknown makes no difference"
    assert details.row(two).overrides == ["seed=1"]


@pytest.mark.medium
def test_values_of_the_environment_are_compared_where_each_run_has_kept_them(make_run):
    runs = [make_run(name) for name in "ab"]
    for run in runs:
        (run / ".hydra" / "config.yaml").write_text("data: {scale: '${oc.env:SCALE}'}")
    for number, run in enumerate(runs):
        assert details.between(*map(run_files.open_run, runs))["config"] == {}
        (run / ".hydra" / "environment.yaml").write_text(f"data.scale: {number}\n")
    assert details.between(*map(run_files.open_run, runs))["config"] == {"data.scale": [0, 1]}
