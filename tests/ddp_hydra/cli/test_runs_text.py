"""How `ddp-hydra runs` writes numbers, times and sizes, and what it says of a run's code."""

from __future__ import annotations

import math
import re
import sys
from datetime import date
from types import SimpleNamespace

import pytest

from ddp_hydra.cli.runs import again_text, diff_text, digits, steps, table_of, when
from ddp_hydra.console.text import size_text
from ddp_hydra.runs.describe import RunRow
from ddp_hydra.runs.details import ABSENT, Reproduction, differing


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 B"), (12_345, "12.3 kB"), (2.5e15, "2,500.0 TB")],
)
def test_sizes(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), ("x", ""), (True, ""), (12, "12"), (1234567, "1234567"), (0.123456, "0.1235"), (1e20, "1e+20")],
)
def test_numbers(value, text):
    assert digits(value) == text


@pytest.mark.parametrize("value", [None, 1e30, -1e30, math.nan])
def test_a_time_that_is_none_is_empty(value):
    assert when(value) == ""


def test_steps_show_the_goal_of_a_run_that_has_not_come_to_it():
    def row(**values):
        return SimpleNamespace(**{"step": 40, "total_steps": 4000, "status": "running", **values})

    assert [steps(row()), steps(row(status="done")), steps(row(total_steps=None)), steps(row(step=None))] == [
        "40/4,000", "40", "40", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("then", "kept", "said"),
    [
        ("", "", "the run has not noted the hash of its code, so it is not known whether this one is the same"),
        ("b" * 64, "", "the code is the same: bbbbbbbbbbbbbbbb"),
        (
            "a" * 64,
            "outputs/x/project.zip",
            "a then, bbbbbbbbbbbbbbbb in this folder; the run's is taken",
        ),
        ("a" * 64, "", "the run has not kept its own, so check out what it was made with"),
    ],
)
def test_it_is_said_whether_the_code_is_the_same(then, kept, said):
    again = Reproduction([], "/there\x07", code_then=then, code_now="b" * 64, kept=kept, hidden=["a.token"])
    text = again_text(again)
    assert said in text
    assert "it was typed in /there" in text
    assert "\x07" not in text
    assert text.endswith("secrets were not kept: fill in a.token")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_cuts_what_was_typed(is_terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    typed = [f"optimizer.name={letter * 60}" for letter in "ab"]
    table = table_of([RunRow(run=word[-1], status="done", overrides=[word]) for word in typed])
    assert (typed[0] in table) is not is_terminal


def compared(*values: object) -> list[str]:
    """Return the cells of a key that has these values."""
    tables = [{} if value is ABSENT else {"key": value} for value in values]
    found = {"runs": "ab", "status": ["done"] * 2, "code": None, "choices": {}, "metrics": {}, "problems": []}
    return re.split("  +", diff_text({**found, "config": differing(*tables)}).splitlines()[1])[1:]


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ((0.1, 0.25), ["0.1", "0.25"]),
        ((0.123456, 0.5), ["0.1235", "0.5"]),
        ((0.0123451, 0.0123452), ["0.0123451", "0.0123452"]),
        ((1, "1"), ["1", '"1"']),
        ((1, 1.0), ["1", "1.0"]),
        ((None, "null"), ["null", '"null"']),
        ((True, "true"), ["true", '"true"']),
        ((math.nan, math.inf), ["nan", "inf"]),
        ((ABSENT, "(missing)"), ["(missing)", '"(missing)"']),
        (("a\nb", "a b"), [r'"a\nb"', '"a b"']),
        (("a ", "a"), ['"a "', '"a"']),
        (([date(2026, 1, 1)], ["2026-01-01"]), ["[datetime.date(2026, 1, 1)]", "['2026-01-01']"]),
    ],
)
def test_different_values_never_read_the_same(values, cells):
    assert compared(*values) == cells


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_cuts_values_and_not_where_they_differ_behind_the_cut(is_terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    long = "x" * 80
    assert compared(f"{long}1", f"{long}2") == [f"{long}1", f"{long}2"]
    assert (compared(long, "y")[0] == long) is not is_terminal
