"""Rules that judge jobs by their reports: each by a table, and all in any order of arrival."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.stopping.decisions import Decisions, Rule, Seen
from ddp_hydra.sweep.stopping.pruner import Pruner
from ddp_hydra.sweep.stopping.rules import Halving, Median, Patient, Threshold

NAN = math.nan


def play(
    rule: Rule,
    curves: Sequence[Sequence[float]],
    order: random.Random,
    kill_after: int | None = None,
    stopped: Mapping[int, tuple[int, str]] | None = None,
) -> dict[int, tuple[int, str]]:
    """Let reports arrive in some order; return the jobs that were stopped, with their last report and why.

    Args:
        rule: judges them.
        curves: the reports of each job.
        order: which job reports next, how much at once, and whether its end is noticed with its last report.
        kill_after: after so many steps the sweep is killed.
        stopped: the jobs that were stopped before that, in the sweep that goes on now.
    """
    given, stops = dict.fromkeys(range(len(curves)), 0), {}
    decisions = Decisions(rule)
    for number in given:
        if number in (stopped or {}):
            decisions.add(number, curves[number][: stopped[number][0]], "stopped")
        else:
            decisions.add(number)
    steps = 0
    while live := [n for n in given if n not in stops and decisions.trials[n].end == ""]:
        steps += 1
        if steps == kill_after:
            break
        number = order.choice(live)
        length = len(curves[number])
        given[number] = min(length, given[number] + order.randrange(3))
        is_whole = given[number] == length
        end = "done" if is_whole and order.random() < 0.5 else ""
        decisions.update(number, curves[number][: given[number]], end, is_complete=is_whole)
        stops |= {stop.number: (stop.report, stop.reason) for stop in decisions.decide()}
    return stops


@pytest.mark.parametrize(
    ("options", "own", "earlier", "stops"),
    [
        ({}, [1.0], [[2.0], [3.0]], False),  # of too few
        ({}, [1.0], [[2.0], [3.0], [4.0]], True),
        ({}, [3.0], [[2.0], [3.0], [4.0]], False),
        ({}, [1.0], [[2.0], [3.0], [NAN]], True),
        ({}, [NAN], [[2.0], [3.0], [4.0]], True),
        ({}, [9.0, 1.0], [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], False),  # its best counts
        ({}, [3.1, 1.0], [[2.0, 9.0], [3.0, 9.0], [4.0, 9.0]], True),  # and the average of the others
        ({}, [1.0, 1.0], [[2.0, 2.0], [3.0, 3.0], [4.0]], False),  # one was stopped before
        ({"after": 3}, [1.0, 1.0], [[2.0, 2.0]] * 3, False),
        ({"trials": 1}, [1.0], [[2.0]], True),
    ],
)
def test_median(options, own, earlier, stops):
    assert bool(Median(True, **options).judge(own, [Seen(values) for values in earlier])) is stops
    mirrored = Median(False, **options).judge([-v for v in own], [Seen([-v for v in values]) for values in earlier])
    assert bool(mirrored) is stops


@pytest.mark.parametrize(
    ("options", "own", "stops"),
    [
        ({}, [1.0, 1.0, 1.0], False),
        ({}, [1.0, 1.0, 1.0, 1.0], True),
        ({}, [1.0, 1.0, 1.0, 1.1], False),
        ({"min_delta": 0.2}, [1.0, 1.1, 1.15, 1.19], True),
        ({"min_delta": 0.2}, [1.0, 1.1, 1.15, 1.21], False),
        ({"patience": 1}, [NAN], True),
        ({"patience": 2}, [NAN, 1.0, NAN], False),
    ],
)
def test_patient(options, own, stops):
    assert bool(Patient(True, **options).judge(own, [])) is stops
    assert bool(Patient(False, **options).judge([-value for value in own], [])) is stops


@pytest.mark.parametrize(
    ("options", "own", "reason"),
    [
        ({"bound": 0.5}, [0.6], ""),
        ({"bound": 0.5}, [0.5], "its best value 0.5 is not better than 0.5"),
        ({"bound": 0.5, "after": 2}, [0.4], ""),
        ({"bound": 0.5, "after": 2}, [0.4, 0.3], "its best value 0.4 is not better than 0.5"),
        ({"bound": 0.5, "after": 9}, [0.9, NAN], "its objective is NaN"),
    ],
)
def test_threshold(options, own, reason):
    assert Threshold(True, **options).judge(own, []) == reason


@pytest.mark.parametrize(
    ("own", "earlier", "reason"),
    [
        ([1.0], [], ""),
        ([1.0], [[2.0]], "rung 0: place 2 of 2, and the best 1 go on"),
        ([2.0], [[2.0]], "rung 0: place 2 of 2, and the best 1 go on"),  # the one before wins
        ([2.0], [[1.0], [1.0], [3.0], [4.0], [1.0]], "rung 0: place 3 of 6, and the best 2 go on"),
        ([3.5], [[1.0], [1.0], [3.0], [4.0], [1.0]], ""),
        ([2.0, 0.0], [[9.0, 9.0]] * 5, ""),  # between two rungs
        ([2.0, 0.0, 1.0], [[9.0, 9.0, 9.0]], "rung 1: place 2 of 2, and the best 1 go on"),
    ],
)
def test_halving(own, earlier, reason):
    assert Halving(True).judge(own, [Seen(values) for values in earlier]) == reason


def test_a_decision_waits_for_the_jobs_before_and_what_comes_after_it_does_not_count():
    decisions = Decisions(Median(True, trials=2))
    for number in range(3):
        decisions.add(number)
    decisions.update(2, [1.0, 9.0, 9.0], "done", is_complete=True)
    decisions.update(0, [5.0])
    assert not list(decisions.decide())
    assert not decisions.is_settled(2)
    decisions.update(1, [5.0])
    (stop,) = decisions.decide()
    assert (stop.number, stop.report) == (2, 1)
    assert decisions.is_settled(2)


def test_a_job_that_has_failed_keeps_nobody_waiting():
    decisions = Decisions(Median(True, trials=1))
    for number in range(3):
        decisions.add(number)
    decisions.update(1, [3.0])
    decisions.update(2, [1.0])
    assert not list(decisions.decide())
    decisions.update(0, [], "failed")
    assert [stop.number for stop in decisions.decide()] == [2]


def test_what_ended_in_an_earlier_run_of_the_sweep_is_not_decided_again():
    decisions = Decisions(Patient(True, patience=1))
    decisions.add(0, [1.0, 1.0, 1.0], "done")
    assert not list(decisions.decide())
    assert decisions.is_settled(0)


def test_the_last_report_of_a_whole_run_stops_nothing():
    decisions = Decisions(Patient(True, patience=1))
    decisions.add(0)
    decisions.update(0, [1.0, 1.0], is_complete=True)
    assert not list(decisions.decide())


def optuna() -> Any:
    """Import Optuna, whose version 2 warns of another package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("optuna")


@pytest.mark.medium
def test_what_is_no_pruner_is_refused():
    optuna()
    with pytest.raises(ConfigError, match="makes a dict, not a pruner of Optuna"):
        Pruner(True, {})


def pruners() -> list[Callable[[], Rule]]:
    known = optuna().pruners
    return [
        lambda: Pruner(True, known.MedianPruner(n_startup_trials=2)),
        lambda: Pruner(True, known.SuccessiveHalvingPruner(reduction_factor=2)),
        lambda: Pruner(True, known.HyperbandPruner(max_resource=8)),
        lambda: Pruner(True, known.ThresholdPruner(lower=0.0)),
    ]


@pytest.mark.medium
def test_a_median_pruner_stops_the_bad_ones_after_its_warm_up():
    order = random.Random(3)
    curves = [[order.random() + number % 4 for _ in range(8)] for number in range(20)]
    pruner = optuna().pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2)
    found = play(Pruner(True, pruner), curves, random.Random(0))
    assert 2 < len(found) < 18
    assert all(reason == "MedianPruner has pruned it" and report > 1 for report, reason in found.values())
    assert {number % 4 for number in found} <= {0, 1, 2}, "the best are not among them"


values = st.one_of(st.floats(-5, 5), st.just(NAN), st.sampled_from([0.0, 1.0]))
curves = st.lists(st.lists(values, min_size=0, max_size=8), min_size=1, max_size=9)


@pytest.mark.medium
@given(curves=curves, seed=st.integers(0, 10**6), kill_after=st.integers(1, 30), which=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_no_order_of_arrival_and_no_kill_of_the_sweep_changes_a_decision(curves, seed, kill_after, which):
    rules: list[Callable[[], Rule]] = [
        lambda: Median(True, trials=2),
        lambda: Patient(True, patience=2),
        lambda: Threshold(True, bound=0.5, after=2),
        lambda: Halving(True, reduction=2),
    ]
    make = (rules + pruners())[which]
    one = play(make(), curves, random.Random(seed))
    assert play(make(), curves, random.Random(seed + 1)) == one
    before = play(make(), curves, random.Random(seed + 2), kill_after)
    assert before.items() <= one.items()
    assert before | play(make(), curves, random.Random(seed + 3), stopped=before) == one
