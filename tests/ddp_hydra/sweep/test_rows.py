"""Rows: order, what is swept, counts."""

from __future__ import annotations

import pytest

from ddp_hydra.sweep.rows import Objective, Row, State, best_first, counted, swept


def row(number: int, objective: float | None = None, state: State = State.done, *overrides: str) -> Row:
    return Row(number, list(overrides), str(number), state, objective)


@pytest.mark.parametrize(("maximize", "order"), [(True, [2, 0, 3, 4, 1]), (False, [0, 2, 3, 4, 1])])
def test_the_best_comes_first_and_what_failed_last(maximize, order):
    rows = [row(0, 0.5), row(1, 9.0, State.failed), row(2, 0.9), row(3, float("nan")), row(4, None, State.queued)]
    assert [found.number for found in best_first(rows, Objective("m", maximize))] == order


def test_without_an_objective_the_number_counts():
    rows = [row(2, 0.1), row(0, 0.2), row(1, 0.3, State.failed)]
    assert [found.number for found in best_first(rows, None)] == [0, 2, 1]


def test_what_is_swept_is_what_differs():
    rows = [row(0, None, State.done, "data=a", "lr=1"), row(1, None, State.done, "data=a", "lr=2", "+new.key=3")]
    assert swept(rows) == {0: {"lr": "1"}, 1: {"lr": "2", "new.key": "3"}}
    assert swept(rows[:1]) == {0: {"data": "a", "lr": "1"}}


def test_jobs_are_counted_by_how_they_ended():
    rows = [row(0), row(1), row(2, None, State.failed), row(3, None, State.queued)]
    assert counted(rows) == "4 jobs: 2 done, 1 failed, 1 queued"
    assert counted(rows[:1]) == "1 job: 1 done"
