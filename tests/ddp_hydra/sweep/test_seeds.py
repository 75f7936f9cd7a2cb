"""Jobs that differ in their seed only are summed up."""

from __future__ import annotations

import math

import pytest

from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.tables import repeated

LOSS = SweepObjective("val/loss", maximize=False)


def row(
    number: int, objective: float | None, *overrides: str, state: JobState = JobState.done, **filled: str
) -> JobRow:
    return JobRow(number, list(overrides), str(number), state, objective, filled=filled)


@pytest.mark.parametrize(
    ("maximize", "order", "best"), [(False, ["a", "b"], [1.0, 3.0]), (True, ["b", "a"], [3.0, 5.0])]
)
def test_configs_are_ranked_by_the_mean(maximize, order, best):
    values = {("a", 1): 1.0, ("a", 2): 3.0, ("b", 1): 5.0, ("b", 2): 3.0}
    rows = [row(n, value, f"x={x}", f"seed={s}") for n, ((x, s), value) in enumerate(values.items())]
    found = repeated(rows, SweepObjective("m", maximize))
    assert [one.values["x"] for one in found] == order
    assert [one.mean for one in found] == ([2.0, 4.0] if order[0] == "a" else [4.0, 2.0])
    assert {one.sd for one in found} == {math.sqrt(2)}
    assert sorted(one.best for one in found) == sorted([1.0, 3.0] if maximize is False else [3.0, 5.0]) == best


def test_without_a_direction_nothing_is_ranked():
    rows = [row(n, value, f"x={n // 2}", f"seed={n % 2}") for n, value in enumerate([1.0, 1.0, 2.0, 2.0])]
    for values in (rows, rows[::-1]):
        found = repeated(values, SweepObjective("m", None))
        assert [one.jobs for one in found] == [[row.number for row in values[:2]], [row.number for row in values[2:]]]
        assert [(one.best, one.worst) for one in found] == [(None, None)] * 2


def test_only_done_jobs_with_a_value_count():
    rows = [
        row(0, 1.0, "seed=0"),
        row(1, None, "seed=1"),
        row(2, 9.0, "seed=2", state=JobState.failed),
        row(3, 9.0, "seed=3", state=JobState.running),
    ]
    (found,) = repeated(rows, LOSS)
    assert (found.n, found.mean, found.sd, found.best, found.worst) == (1, 1.0, None, 1.0, 1.0)
    assert found.jobs == [0, 1, 2, 3]
    (none,) = repeated(rows[1:], LOSS)
    assert (none.n, none.mean, none.best) == (0, None, None)
    (found,) = repeated([row(0, 1.0, "lr=1", seed="0"), row(1, 3.0, "lr=1", "seed=1")], LOSS)
    assert (found.mean, found.n, found.values) == (2.0, 2, {}), "a default seed is one of them"
    rows = [row(n, [5.0, 1.0][n % 2], f"data={'ab'[n % 2]}", f"data.seed={n // 2}") for n in range(4)]
    assert [one.values for one in repeated(rows, LOSS)] == [{"data": "a"}, {"data": "b"}], "other data stay apart"


@pytest.mark.parametrize(
    "overrides",
    [[["lr=1"], ["lr=2"]], [["lr=1", "seed=0"], ["lr=2", "seed=1"]], [["seed=0"]], []],
)
def test_a_sweep_that_repeats_no_seed_has_no_means(overrides):
    assert repeated([row(n, 1.0, *words) for n, words in enumerate(overrides)], LOSS) == []
