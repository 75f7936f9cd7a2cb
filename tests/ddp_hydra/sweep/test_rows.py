"""Rows: order, what is swept, defaults that a job leaves out, counts."""

from __future__ import annotations

from enum import Enum

import pytest
from omegaconf import OmegaConf

from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, best_first, describe_counts, swept
from ddp_hydra.sweep.summary_files import fill_row, fill_row_from_folder


def row(number: int, objective: float | None = None, state: JobState = JobState.done, *overrides: str) -> JobRow:
    return JobRow(number, list(overrides), str(number), state, objective)


@pytest.mark.parametrize(("maximize", "order"), [(True, [2, 0, 3, 4, 1]), (False, [0, 2, 3, 4, 1])])
def test_the_best_comes_first_and_what_failed_last(maximize, order):
    rows = [row(0, 0.5), row(1, 9.0, JobState.failed), row(2, 0.9), row(3, float("nan")), row(4, None, JobState.queued)]
    assert [found.number for found in best_first(rows, SweepObjective("m", maximize))] == order


def test_without_a_direction_nothing_is_better_and_the_number_counts():
    rows = [row(2, 0.1), row(0, 0.2), row(1, 0.3, JobState.failed)]
    assert [found.number for found in best_first(rows, SweepObjective("m", None))] == [0, 2, 1]
    assert not SweepObjective("m", None).ranks(rows)


def test_jobs_with_other_data_stand_apart():
    given = [("data=a", "lr=1"), ("data=b", "lr=1"), ("data=a", "lr=2"), ("data=b", "lr=2"), ("data=a", "lr=3")]
    rows = [row(n, n / 10, JobState.failed if n == 4 else JobState.done, *words) for n, words in enumerate(given)]
    objective = SweepObjective("m", maximize=True)
    assert [found.number for found in best_first(rows, objective)] == [2, 0, 3, 1, 4]
    assert not objective.ranks(rows)
    sizes = [row(n, n / 10, JobState.done, "data=a", f"data.batch_size={n}") for n in range(3)]
    assert objective.ranks(sizes), "how data are read makes no other data"


@pytest.mark.parametrize(
    ("key", "metric", "is_other"),
    [
        ("data.target", "val/r2", True),
        ("+data.my_own", "val/accuracy", True),
        ("data.val.n", "val/accuracy", True),
        ("data.train.n", "val/accuracy", False),
        ("data.train.n", "train/accuracy", True),
        ("data.batch_size", "val/accuracy", False),
        ("data.val.transform.size", "val/accuracy", False),
        ("transform@data.train.transform", "val/accuracy", False),
        ("+data/split", "val/accuracy", True),
        ("data/transform", "val/accuracy", False),
        ("data/augment@data.train.augment", "val/accuracy", False),
        ("split@data", "val/accuracy", True),
        ("split@data.val", "val/accuracy", True),
        ("split@_global_.data.val", "val/accuracy", True),
        ("data@_global_", "val/accuracy", True),
        ("data@data.train", "val/accuracy", False),
        ("split@data.train", "train/accuracy", True),
        ("split@model.split", "val/accuracy", False),
        ("experiment/digits", "val/accuracy", True),
        ("loss/kind", "val/loss", True),
        ("loss/kind", "val/accuracy", False),
        ("task/x", "val/loss", True),
        ("kind@task.ignore", "val/accuracy", True),
        ("loss", "val/loss", True),
        ("loss", "val/accuracy", False),
        ("task.alpha", "val/discriminator/loss", True),
        ("task.ignore", "val/accuracy", True),
        ("optimizer.lr", "val/loss", False),
    ],
)
def test_a_key_for_which_values_can_not_be_compared_makes_other_data(key, metric, is_other):
    rows = [row(number, number / 10, JobState.done, f"{key}={value}") for number, value in enumerate("ab")]
    assert SweepObjective(metric, maximize=False).ranks(rows) is not is_other


def test_what_is_swept_is_what_differs():
    rows = [row(0, None, JobState.done, "data=a", "lr=1"), row(1, None, JobState.done, "data=a", "lr=2", "+new.key=3")]
    assert swept(rows) == {0: {"lr": "1"}, 1: {"lr": "2", "new.key": "3"}}
    assert swept(rows[:1]) == {0: {"data": "a", "lr": "1"}}


def test_jobs_are_counted_by_how_they_ended():
    rows = [row(0), row(1, None, JobState.failed), row(2, None, JobState.running), row(3, None, JobState.running)]
    rows[3].workers = 2
    assert describe_counts(rows) == "4 jobs: 1 done, 1 failed, 1 running, 1 waiting"
    assert describe_counts(rows[:1]) == "1 job: 1 done"


CHOICES = {"model": "resnet18", "mix": None, "experiment@here": "a"}


class Kind(Enum):
    fast = 1


CONFIG = OmegaConf.create(
    {
        "optimizer": {"lr": 0.1, "betas": [0.9, None], "nesterov": False, "momentum": None, "far": "${none.such}"},
        "model": {"width": 8},
        "kind": Kind.fast,
        "double": "${model.width}",
        "cluster": {"password": "a"},
        "sizes": {"d_key": [8, "${model.width}"], "private_key": [8, 16], "n": ["${none.such}"]},
    }
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", "0.1"),
        ("optimizer.nesterov", "false"),
        ("optimizer.momentum", "null"),
        ("optimizer.betas", "[0.9,null]"),
        ("model", "resnet18"),
        ("mix", None),
        ("experiment@here", "a"),
        ("optimizer", None),
        ("optimizer.far", None),
        ("optimizer.lr.deep", None),
        ("cluster.password", "***"),
        ("sizes.d_key", "[8,8]"),
        ("sizes.private_key", "***"),
        ("sizes.n", None),
        ("a[b", None),
    ],
)
def test_a_value_is_that_of_the_config_as_one_would_type_it(key, value):
    row = JobRow(0, ["other=1"], "0")
    fill_row(row, [key], CONFIG, CHOICES)
    assert row.filled.get(key) == value


def test_what_a_job_gives_itself_is_not_filled_in():
    row = JobRow(0, ["optimizer.lr=1", "+model=b"], "0", filled={"double": "9"})
    fill_row(row, ["optimizer.lr", "model", "double"], CONFIG, CHOICES)
    assert row.filled == {"double": "9"}


def test_a_job_that_has_started_is_filled_in_from_its_folder(tmp_path):
    folder = tmp_path / ".hydra"
    folder.mkdir()
    OmegaConf.save(OmegaConf.create({"optimizer": {"lr": 0.1}, "model": {}}), folder / "config.yaml")
    hydra = {"hydra": {"runtime": {"choices": {"model": "resnet18"}}}}
    OmegaConf.save(OmegaConf.create(hydra), folder / "hydra.yaml")
    row = JobRow(0, [], "0")
    fill_row_from_folder(row, ["optimizer.lr", "model"], tmp_path)
    assert row.filled == {"optimizer.lr": "0.1", "model": "resnet18"}
    (folder / "config.yaml").unlink()
    fill_row_from_folder(row, ["optimizer.lr", "model"], tmp_path)
    fill_row_from_folder(row, ["more"], tmp_path)
    (folder / "config.yaml").write_text("{")
    fill_row_from_folder(row, ["more"], tmp_path)
    assert set(row.filled) == {"optimizer.lr", "model"}


def test_only_what_differs_with_the_defaults_is_a_column():
    rows = [
        JobRow(0, ["lr=0.1", "size=32"], "0"),
        JobRow(1, ["lr=0.2"], "1", filled={"size": "32"}),
        JobRow(2, ["size=32"], "2", filled={"lr": "1e-1", "nobody.gives": "1"}),
    ]
    assert swept(rows) == {0: {"lr": "0.1"}, 1: {"lr": "0.2"}, 2: {"lr": "1e-1"}}
    assert swept([rows[0], rows[2]]) == {0: {}, 2: {}}, "0.1 and 1e-1 are one value"
