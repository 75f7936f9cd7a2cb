"""A job that leaves a key out is shown with the value that its config has."""

from __future__ import annotations

from enum import Enum

import pytest
from omegaconf import OmegaConf

from ddp_hydra.sweep.rows import JobRow, swept
from ddp_hydra.sweep.summary_files import fill_row, fill_row_from_folder

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
