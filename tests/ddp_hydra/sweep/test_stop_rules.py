"""Policies that decide which jobs are stopped and which go on: rules by tables, and all in any order of arrival."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import SweepObjective
from ddp_hydra.sweep.settings import stop_policy
from ddp_hydra.sweep.stop_rules import (
    Halving,
    Median,
    OptunaRule,
    Patient,
    ReportPolicy,
    Rule,
    Rungs,
    Threshold,
    Trial,
    Verdict,
    bracket_pattern,
)

NAN = math.nan
ROOT = Path(__file__).parents[3]


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
    reported, stops = dict.fromkeys(range(len(curves)), 0), {}
    policy = ReportPolicy(rule)
    for number in reported:
        if number in (stopped or {}):
            policy.add(number, curves[number][: stopped[number][0]], "stopped")
        else:
            policy.add(number)
    steps = 0
    while live := [n for n in reported if n not in stops and policy.trials[n].end == ""]:
        steps += 1
        if steps == kill_after:
            break
        number = order.choice(live)
        length = len(curves[number])
        reported[number] = min(length, reported[number] + order.randrange(3))
        is_whole = reported[number] == length
        end = "done" if is_whole and order.random() < 0.5 else ""
        policy.update(number, curves[number][: reported[number]], end, is_complete=is_whole)
        stops |= {stop.number: (stop.report, stop.reason) for stop in policy.decide()}
    return stops


@pytest.mark.parametrize(
    ("options", "own", "earlier", "stops"),
    [
        ({}, [1.0], [[2.0], [3.0]], False),  # of too few
        ({}, [1.0], [[2.0], [3.0], [4.0]], True),
        ({}, [1.0], [[2.0], [3.0], [NAN]], True),
        ({}, [NAN], [[2.0], [3.0], [4.0]], True),
        ({}, [9.0, 1.0], [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], False),  # its best counts
        ({}, [3.1, 1.0], [[2.0, 9.0], [3.0, 9.0], [4.0, 9.0]], True),  # and the average of the others
        ({}, [1.0, 1.0], [[2.0, 2.0], [3.0, 3.0], [4.0]], False),  # one was stopped before
        ({"after": 3}, [1.0, 1.0], [[2.0, 2.0]] * 3, False),
    ],
)
def test_median(options, own, earlier, stops):
    assert bool(Median(True, **options).judge(own, [Trial(0, values) for values in earlier])) is stops
    mirrored = Median(False, **options).judge([-v for v in own], [Trial(0, [-v for v in values]) for values in earlier])
    assert bool(mirrored) is stops


@pytest.mark.parametrize(
    ("options", "own", "stops"),
    [
        ({}, [1.0, 1.0, 1.0], False),
        ({}, [1.0, 1.0, 1.0, 1.0], True),
        ({"min_delta": 0.2}, [1.0, 1.1, 1.15, 1.19], True),
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
        ([3.5], [[1.0], [1.0], [3.0], [4.0], [1.0]], ""),
        ([2.0, 0.0], [[9.0, 9.0]] * 5, ""),  # between two rungs
        ([2.0, 0.0, 1.0], [[9.0, 9.0, 9.0]], "rung 1: place 2 of 2, and the best 1 go on"),
    ],
)
def test_halving(own, earlier, reason):
    assert Halving(True).judge(own, [Trial(0, values) for values in earlier]) == reason


def test_a_decision_waits_for_the_jobs_before_and_what_comes_after_it_does_not_count():
    policy = ReportPolicy(Median(True, trials=2))
    for number in range(3):
        policy.add(number)
    policy.update(2, [1.0, 9.0, 9.0], "done", is_complete=True)
    policy.update(0, [5.0])
    assert not list(policy.decide())
    assert not policy.is_settled(2)
    policy.update(1, [5.0])
    (stop,) = policy.decide()
    assert (stop.number, stop.report) == (2, 1)
    assert policy.is_settled(2)


def optuna() -> Any:
    """Import Optuna, whose version 2 warns of another package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("optuna")


@pytest.mark.medium
def test_a_pruner_of_optuna_is_given_by_its_class():
    known = optuna().pruners
    ours = {"cluster": {"_target_": "a"}, "dispatch": {}, "trainer": {}, "results": {"handler": "client"}}

    def made(target: str, **options: Any) -> Any:
        given = {"_target_": target, **options}
        return stop_policy(given, SweepObjective("val/loss", False), OmegaConf.create(ours), None)

    rule = made("optuna.pruners.SuccessiveHalvingPruner", reduction_factor=2).rule
    assert isinstance(rule.pruner, known.SuccessiveHalvingPruner)
    with pytest.raises(ConfigError, match="makes a dict, not a pruner of Optuna"):
        made("builtins.dict")
    with pytest.raises(ConfigError, match=r"optuna\.pruners\.Nothing can't be made"):
        made("optuna.pruners.Nothing")


def pruners() -> list[Callable[[], Rule]]:
    known = optuna().pruners
    return [
        lambda: OptunaRule(True, known.MedianPruner(n_startup_trials=2)),
        lambda: OptunaRule(True, known.SuccessiveHalvingPruner(reduction_factor=2)),
        lambda: OptunaRule(True, known.HyperbandPruner(max_resource=8)),
        lambda: OptunaRule(True, known.ThresholdPruner(lower=0.0)),
    ]


PLAY = """
import random
from tests.ddp_hydra.sweep import test_stop_rules as rules
curves = [[random.Random(number).random()] * 8 for number in range(24)]
pruner = rules.optuna().pruners.HyperbandPruner(max_resource=8)
print(rules.play(rules.OptunaRule(True, pruner), curves, random.Random(0)))
"""


@pytest.mark.medium
def test_hyperband_of_optuna_decides_the_same_in_each_process():
    optuna()
    played = {
        subprocess.run(
            [sys.executable, "-c", PLAY], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(played) == 1
    assert "HyperbandPruner has pruned it" in played.pop()


values = st.one_of(st.floats(-5, 5), st.just(NAN), st.sampled_from([0.0, 1.0]))
curves = st.lists(st.lists(values, min_size=0, max_size=8), min_size=1, max_size=9)


@pytest.mark.medium
@given(curves=curves, seed=st.integers(0, 10**6), kill_after=st.integers(1, 30), which=st.integers(0, 7))
@settings(max_examples=max(60, settings().max_examples), deadline=None)
def test_no_order_of_arrival_and_no_kill_of_the_sweep_changes_what_a_rule_decides(curves, seed, kill_after, which):
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


LENGTH = 12
"""Reports of a job that runs to its end."""


def search(
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
            rungs.decide()
            while True:
                ready = [number for number in numbers if rungs.must_run(number)]
                if not ready:
                    if not (verdicts := rungs.finish()):
                        break
                    for verdict in verdicts:
                        if not verdict.goes_on:
                            disk[verdict.number] = disk[verdict.number][0], "stopped"
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
                rungs.decide()
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
    ends, rungs = search(flat([1, 2, 3, 4, 5, 6, 7, 8, 9][::-1]), random.Random(0))
    assert rungs == [[list(range(9)), [0, 1, 2], [0], [0]]]
    assert ends.pop(0) == ("done", LENGTH), "the last one goes on alone"
    assert ends == {number: ("stopped", 3 if number < 3 else 1) for number in range(1, 9)}


def test_the_best_go_on_before_all_are_there_and_so_some_who_would_not_have():
    ends, rungs = search(flat([1, 2, 3, 4, 5, 6, 7, 8, 9]), random.Random(0))
    assert rungs[0][1] == [2, 3, 4, 5, 6, 7, 8], "each was the best, or the second or third, when it came"
    assert rungs[0][2] == [4, 5, 6, 7, 8]
    assert ends[8] == ("done", LENGTH)


def test_equal_values_go_to_the_lower_number_and_nan_never():
    ends, _ = search(flat([5, 5, 5, math.nan, math.nan, math.nan]), random.Random(0))
    assert ends.pop(0) == ("done", LENGTH)
    assert ends == {number: ("stopped", 3 if number < 2 else 1) for number in range(1, 6)}
    nothing, _ = search(flat([math.nan] * 9), random.Random(0))
    assert set(nothing.values()) == {("stopped", 1)}


def test_a_job_that_fails_is_the_worst_where_it_failed_and_keeps_nobody_waiting():
    curves = flat([9, 8, 7, 6, 5, 4])
    ends, rungs = search(curves, random.Random(0), [0, None, None, None, None, None])
    assert ends[0] == ("failed", 0)
    assert rungs[0][1] == [1, 2]
    ends, rungs = search(curves, random.Random(0), [2, None, None, None, None, None])
    assert ends[0] == ("failed", 2)
    assert rungs[0][1:] == [[0, 1], [1], [1]]


def test_lower_is_better_where_that_is_wanted():
    rungs = Rungs(False)
    for number in range(3):
        rungs.add(number, [float(number)])
    assert rungs.decide() == [Verdict(0, 3, "rung 0: place 1 of 3, and the best 1 go on", goes_on=True)]
    assert rungs.goal(0) == 3
    assert rungs.must_run(0)
    assert not rungs.must_run(1)


def test_a_job_that_ends_by_itself_at_a_rung_does_not_go_on_but_counts():
    ends, rungs = search([[9.0], *flat([1, 2])], random.Random(0))
    assert ends[0] == ("done", 1)
    assert rungs == [[[0, 1, 2]]]


def test_a_batch_that_is_over_is_not_woken_up_by_the_next_but_counts_in_its_ranking():
    ends, rungs = search(flat([5, 4, 3, 2, 1, 0]), random.Random(0), batch=2)
    assert ends.pop(0) == ("done", LENGTH), "the best of its batch, when none had come to its end"
    assert ends == dict.fromkeys(range(1, 6), ("stopped", 1)), "1 is the second of 6, but its batch is over"
    assert rungs[0][1:] == [[0], [0], [0]]
    ends, _ = search(flat([1, 2, 3, 4, 5, 6]), random.Random(0), batch=2)
    assert {number for number, (_, reports) in ends.items() if reports > 1} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("brackets", "sizes"), [(1, {0: 1}), (2, {0: 3, 1: 2}), (3, {0: 9, 1: 5, 2: 3})])
def test_the_brackets_of_hyperband_have_the_sizes_of_the_paper(brackets, sizes):
    pattern = bracket_pattern(brackets, 3)
    assert {bracket: pattern.count(bracket) for bracket in sizes} == sizes
    assert len(pattern) == sum(sizes.values())
    rungs = Rungs(True, brackets=brackets)
    for number in range(len(pattern)):
        rungs.add(number)
    goals = [rungs.goal(number) for number in range(len(pattern))]
    assert {bracket: goals.count(3**bracket) for bracket in sizes} == sizes, "a later bracket pauses later"


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
@settings(max_examples=max(80, settings().max_examples), deadline=None)
def test_no_order_of_arrival_and_no_kill_of_the_sweep_changes_what_rungs_decide(
    curves, seed, kill_after, fails, first, reduction, brackets, batch
):
    options = {"first": first, "reduction": reduction, "brackets": brackets, "batch": batch}
    fails = fails[: len(curves)]
    one = search(curves, random.Random(seed), fails, **options)
    assert search(curves, random.Random(seed + 1), fails, **options) == one
    assert search(curves, random.Random(seed + 2), fails, kill_after=kill_after, **options) == one
