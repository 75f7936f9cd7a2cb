"""Filters and orders of rows."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.runs.describe import RunRow
from ddp_hydra.runs.find import Comparison, Filter, begin_of, comparison, ordered

NOVEMBER = datetime(2026, 11, 1).timestamp()
ROWS = [
    RunRow("a", "done", NOVEMBER + 1, 10.0, 5, objective="val/loss", maximize=False, value=0.5,
        metrics={"val/loss": 0.5, "val/accuracy": 0.8}, model="resnet18", data="digits", tags=["good", "x"]),
    RunRow("b", "failed", NOVEMBER - 1, 30.0, 2, objective="val/loss", maximize=False, value=0.2,
        metrics={"val/loss": 0.2, "val/accuracy": None}, model="resnet50", data="wids", tags=["old"]),
    RunRow("c", "killed", NOVEMBER + 2, None, None, model="mlp", data="digits"),
]  # fmt: skip


def names(rows: list[RunRow]) -> str:
    return "".join(row.run for row in rows)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "abc"),
        ({"status": "done,killed"}, "ac"),
        ({"tag": "o*,x"}, "ab"),
        ({"model": "resnet*", "data": "digits"}, "a"),
        ({"since": "2026-11-01T00:00:02"}, "c"),
        ({"comparisons": (Comparison("val/accuracy", ">", 0.7),)}, "a"),
        ({"comparisons": (Comparison("objective", "<=", 0.2),)}, "b"),
    ],
)
def test_what_is_given_has_to_be_so(given, found):
    assert names(Filter(**given).choose(ROWS)) == found
    assert time.time() - begin_of("1.5d") == pytest.approx(129_600, abs=60)


@pytest.mark.parametrize(
    ("by", "found"),
    [
        ("when", "cab"), ("duration", "bac"), ("steps", "abc"), ("status", "abc"), ("folder", "abc"),
        ("objective", "bac"), ("val/accuracy", "abc"), ("val/loss", "bac"),
    ],
)  # fmt: skip
def test_orders(by, found):
    assert names(ordered(ROWS, by)) == found


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("val/accuracy>0.9", Comparison("val/accuracy", ">", 0.9)),
        ("val/loss <= 1e-3", Comparison("val/loss", "<=", 1e-3)),
        ("status=done", None),
    ],
)
def test_comparisons(word, found):
    assert comparison(word) == found


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: comparison("val/loss<low"), "compared with a number"),
        (lambda: Filter(status="finished").choose(ROWS), "status=finished: give running, done"),
        (lambda: Filter(since="yesterday").choose(ROWS), "since=yesterday: give a date"),
        (lambda: ordered(ROWS, "val/accuracies"), r"val/accuracies: no run has this metric; there are .*val/accuracy"),
        (lambda: Filter(comparisons=[Comparison("loss", ">", 1)]).choose(ROWS), "loss: no run has this metric"),
    ],
)
def test_mistakes_are_said(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()
