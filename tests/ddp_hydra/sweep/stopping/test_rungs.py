"""Asynchronous successive halving: which jobs go on, whatever the order in which results arrive."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.sweep.stopping.rungs import Rungs, bracket_pattern

LENGTH = 12
"""Reports of a job that runs to its end."""


def run(
    curves: Sequence[Sequence[float]],
    order: random.Random,
    failures: Sequence[int | None] | None = None,
    kill_after: int | None = None,
    batch: int | None = None,
    **options: int,
) -> tuple[dict[int, tuple[str, int]], list[list[list[int]]]]:
    """Play a sweep: any job that may run ends next; return how each ended, and the entrants of all rungs.

    Args:
        curves: the reports of each job, to its end.
        order: which job ends next.
        failures: by job, the report after which it fails.
        kill_after: the sweep is killed after so many ends, and goes on from what is on disk.
        batch: so many jobs come at once; None for all.
        options: of the rungs.
    """
    failures = failures or [None] * len(curves)
    disk: dict[int, tuple[Sequence[float], str]] = {}
    size = batch or len(curves)

    def play(rungs: Rungs, limit: int | None) -> bool:
        done = 0
        for begin in range(0, len(curves), size):
            numbers = range(begin, min(begin + size, len(curves)))
            for number in numbers:
                rungs.add(number, *disk.get(number, ((), "")))
            rungs.advance()
            while True:
                ready = [number for number in numbers if rungs.must_run(number)]
                if not ready:
                    if rungs.finish() is None:
                        break
                    rungs.advance()
                    continue
                if done == limit:
                    return False
                done += 1
                number = order.choice(ready)
                curve, fails, goal = curves[number], failures[number], rungs.goal(number)
                end = "failed" if fails is not None and fails < min(goal, len(curve)) else ""
                values = curve[: fails if end else goal]
                end = end or ("done" if len(curve) <= goal else "")
                disk[number] = values, end
                rungs.update(number, values, end)
                rungs.advance()
            for standing in rungs.stop_rest():
                disk[standing.number] = disk[standing.number][0], "stopped"
        return True

    rungs = Rungs(True, **options)
    if not play(rungs, kill_after):
        rungs = Rungs(True, **options)
        assert play(rungs, None)
    ends = {number: (end, len(values)) for number, (values, end) in disk.items()}
    return ends, [[rung.entrants for rung in bracket] for bracket in rungs.rungs]


def flat(values: Sequence[float]) -> list[list[float]]:
    """Curves that don't cross."""
    return [[value + report / 1000 for report in range(LENGTH)] for value in values]


@pytest.mark.medium
def test_of_nine_jobs_three_go_on_and_one_of_them_to_the_end():
    ends, rungs = run(flat([1, 2, 3, 4, 5, 6, 7, 8, 9][::-1]), random.Random(0))
    assert rungs == [[list(range(9)), [0, 1, 2], [0], [0]]]
    assert ends.pop(0) == ("done", LENGTH), "the last one goes on alone"
    assert ends == {number: ("stopped", 3 if number < 3 else 1) for number in range(1, 9)}


def test_the_best_go_on_before_all_are_there_and_so_some_who_would_not_have():
    ends, rungs = run(flat([1, 2, 3, 4, 5, 6, 7, 8, 9]), random.Random(0))
    assert rungs[0][1] == [2, 3, 4, 5, 6, 7, 8], "each was the best, or the second or third, when it came"
    assert rungs[0][2] == [4, 5, 6, 7, 8]
    assert ends[8] == ("done", LENGTH)


def test_equal_values_go_to_the_lower_number_and_nan_never():
    ends, _ = run(flat([5, 5, 5, math.nan, math.nan, math.nan]), random.Random(0))
    assert ends.pop(0) == ("done", LENGTH)
    assert ends == {number: ("stopped", 3 if number < 2 else 1) for number in range(1, 6)}
    nothing, _ = run(flat([math.nan] * 9), random.Random(0))
    assert set(nothing.values()) == {("stopped", 1)}


def test_a_job_that_fails_is_the_worst_where_it_failed_and_keeps_nobody_waiting():
    curves = flat([9, 8, 7, 6, 5, 4])
    ends, rungs = run(curves, random.Random(0), [0, None, None, None, None, None])
    assert ends[0] == ("failed", 0)
    assert rungs[0][1] == [1, 2]
    ends, rungs = run(curves, random.Random(0), [2, None, None, None, None, None])
    assert ends[0] == ("failed", 2)
    assert rungs[0][1:] == [[0, 1], [1], [1]]


def test_lower_is_better_where_that_is_wanted():
    rungs = Rungs(False)
    for number in range(3):
        rungs.add(number, [float(number)])
    assert [standing.number for standing in rungs.advance()] == [0]
    assert rungs.goal(0) == 3
    assert rungs.must_run(0)
    assert not rungs.must_run(1)


def test_a_job_that_ends_by_itself_at_a_rung_does_not_go_on_but_counts():
    ends, rungs = run([[9.0], *flat([1, 2])], random.Random(0))
    assert ends[0] == ("done", 1)
    assert rungs == [[[0, 1, 2]]]


def test_a_batch_that_is_over_is_not_woken_up_by_the_next_but_counts_in_its_ranking():
    ends, rungs = run(flat([5, 4, 3, 2, 1, 0]), random.Random(0), batch=2)
    assert ends.pop(0) == ("done", LENGTH), "the best of its batch, when none had come to its end"
    assert ends == dict.fromkeys(range(1, 6), ("stopped", 1)), "1 is the second of 6, but its batch is over"
    assert rungs[0][1:] == [[0], [0], [0]]
    ends, _ = run(flat([1, 2, 3, 4, 5, 6]), random.Random(0), batch=2)
    assert {number for number, (_, reports) in ends.items() if reports > 1} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("brackets", "sizes"), [(1, {0: 1}), (2, {0: 3, 1: 2}), (3, {0: 9, 1: 5, 2: 3})])
def test_the_brackets_of_hyperband_have_the_sizes_of_the_paper(brackets, sizes):
    pattern = bracket_pattern(brackets, 3)
    assert {bracket: pattern.count(bracket) for bracket in sizes} == sizes
    assert len(pattern) == sum(sizes.values())


def test_a_later_bracket_pauses_later():
    rungs = Rungs(True, brackets=3)
    for number in range(17):
        rungs.add(number)
    goals = [rungs.goal(number) for number in range(17)]
    assert (goals.count(1), goals.count(3), goals.count(9)) == (9, 5, 3)


values = st.one_of(st.floats(-5, 5), st.just(math.nan), st.sampled_from([0.0, 1.0]))
curve = st.integers(1, LENGTH).flatmap(lambda n: st.lists(values, min_size=n, max_size=n))


@pytest.mark.medium
@given(
    curves=st.lists(curve, min_size=1, max_size=14),
    seed=st.integers(0, 10**6),
    kill_after=st.integers(0, 20),
    fails=st.lists(st.one_of(st.none(), st.integers(0, LENGTH)), min_size=14, max_size=14),
    first=st.integers(1, 2),
    reduction=st.integers(2, 3),
    brackets=st.integers(1, 2),
    batch=st.one_of(st.none(), st.integers(1, 6)),
)
@settings(max_examples=200, deadline=None)
def test_no_order_of_arrival_and_no_kill_of_the_sweep_changes_a_decision(
    curves, seed, kill_after, fails, first, reduction, brackets, batch
):
    options = {"first": first, "reduction": reduction, "brackets": brackets, "batch": batch}
    fails = fails[: len(curves)]
    one = run(curves, random.Random(seed), fails, **options)
    assert run(curves, random.Random(seed + 1), fails, **options) == one
    assert run(curves, random.Random(seed + 2), fails, kill_after=kill_after, **options) == one
