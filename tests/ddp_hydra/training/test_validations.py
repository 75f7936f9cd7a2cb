"""Validations amid an epoch and before the first step: when they come, and what goes by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.parallel import Parallel
from tests.ddp_hydra.training.loop_runs import BY_LOSS, FALLING, RISING, STEPS, Run, flat


def validated(run: Run) -> list[int]:
    return [step for step, _ in run.metrics("val/loss")]


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ({"validate_every_steps": 3}, [3, 4, 6, 8]),
        ({"validate_every_steps": 2}, [2, 4, 6, 8]),  # one at the epoch's end, not two
        ({"validate_every_steps": 3, "validate_every_epochs": 0}, [3, 6, 8]),
        ({"validate_every_steps": 3, "validate_every_epochs": 0, "epochs": None, "max_steps": 7}, [3, 6, 7]),
    ],
    ids=str,
)
def test_they_come_after_so_many_steps(train, trainer, steps):
    run = train(**trainer)
    assert validated(run) == steps
    assert {step for step, _ in run.metrics("train/loss")} >= set(steps)  # in the same row


def test_they_change_nothing_of_the_training(train):
    ends = [flat(read(train(parts=FALLING, **more).last)) for more in ({}, {"validate_every_steps": 1})]
    assert ends[0]["model"] == ends[1]["model"]
    assert ends[0]["optimizer"] == ends[1]["optimizer"]


def test_the_model_is_told_that_forward_passes_follow_one_another(train, monkeypatch):
    """A sharded one keeps what it has gathered until they are over."""
    begun, ended = [], []

    @contextmanager
    def many_passes(self: Parallel) -> Iterator[None]:
        begun.append(self)
        yield
        ended.append(self)

    monkeypatch.setattr(Parallel, "many_passes", many_passes)
    assert len(validated(train(validate_every_steps=3))) == len(begun) == len(ended) == 4
    assert validated(train(stop_at=("validate", 4))) == []
    assert len(begun) == len(ended) == 5


@pytest.mark.medium
def test_the_best_is_saved_amid_an_epoch(train):
    for parts, sign in ((RISING, 1), (FALLING, -1)):
        run, known, expected = train(validate_every_steps=3, parts=parts), float("-inf"), []
        for step, value in run.metrics("val/loss"):
            expected += [(step, sign * value > known)] if sign * value > known or step % STEPS == 0 else []
            known = max(known, sign * value)
        assert run.bests == expected
    assert train(validate_every_steps=3, parts=RISING, checkpoint_every_epochs=0).bests == [(8, True)]
    assert train(validate_every_steps=3, parts=FALLING, checkpoint_every_steps=3).steps_saved == [3, 4, 6, 8]


def test_an_objective_of_the_training_waits_for_the_end_of_the_epoch(train):
    run = train(
        validate_every_steps=1, parts=BY_LOSS, early_stopping_patience=1, early_stopping_min_delta=9.0, epochs=5
    )
    assert (validated(run), run.steps_saved) == (list(range(1, 9)), [4, 8])
    assert run.value["stopped_early"] == "no progress in train/loss for 1 epoch"


def test_early_stopping_counts_them_and_says_so(train):
    options = {"early_stopping_patience": 2, "early_stopping_min_delta": 9.0, "epochs": 9}
    run = train(validate_every_steps=2, **options)
    assert (run.value["steps"], run.value["interrupted"]) == (6, "")
    assert run.value["stopped_early"] == "no progress in val/accuracy for 2 validations"
    assert run.steps_saved[-1] == 6
    said = run.texts
    assert said == ["no progress in val/accuracy for 2 validations"]
    again = train(resume=run.last, validate_every_steps=2, **options)
    assert (again.value["steps"], again.value["stopped_early"]) == (6, run.value["stopped_early"])


def test_a_run_that_comes_to_its_end_was_not_stopped_early(train):
    run = train(early_stopping_patience=1, early_stopping_min_delta=9.0, epochs=2)
    assert (run.value["steps"], run.value["stopped_early"]) == (2 * STEPS, "")


@pytest.mark.medium
@pytest.mark.parametrize("stop_at", [("update", 2), ("update", 3), ("validate", 3), ("update", 6)], ids=str)
def test_a_resume_validates_and_decides_as_the_run_without_a_stop(train, stop_at):
    options = {"validate_every_steps": 3, "early_stopping_patience": 3, "parts": FALLING, "epochs": 3}
    whole, stopped = train(**options), train(stop_at=stop_at, **options)
    assert stopped.value["interrupted"] == "interrupt"
    resumed = train(resume=stopped.last, **options)
    assert sorted({*validated(stopped), *validated(resumed)}) == validated(whole)
    ends = [flat(read(run.last)) for run in (whole, resumed)]
    assert ends[0] == ends[1]


@pytest.mark.medium
def test_a_run_pauses_after_one_amid_an_epoch(train):
    paused = train(validate_every_steps=3, pause_after_validations=1)
    assert (paused.value["interrupted"], paused.value["steps"], validated(paused)) == ("pause", 3, [3])
    resumed = train(resume=paused.last, validate_every_steps=3)
    assert validated(resumed) == [4, 6, 8]
    assert flat(read(resumed.last))["model"] == flat(read(train().last))["model"]


def test_a_rollback_goes_back_over_one(train):
    run = train(validate_every_steps=3, on_nonfinite="rollback", fault=["nan,step=7"], parts=FALLING)
    assert validated(run)[-1] == 8
    assert read(run.last)["validations"] == 4


def test_a_rollback_validates_again_what_was_due_amid_an_epoch(train):
    options = {"validate_every_steps": 2, "checkpoint_every_epochs": 0, "on_nonfinite": "rollback"}
    stopped = train(stop_at=("update", 2), **options)
    run = train(resume=stopped.last, fault=["nan,step=3"], **options)
    assert validated(run) == [2, 2, 4, 6, 8]
    assert [step for step, _ in run.metrics("train_epoch/loss")] == [4, 8]


def test_one_before_the_first_step_is_logged_at_step_0_and_nothing_goes_by_it(train):
    parts = {**FALLING, "optimizer": {"lr": 5.0}}  # the first validation is the best
    run, plain = train(validate_first=True, parts=parts), train(parts=parts)
    assert validated(run) == [0, 4, 8]
    assert run.bests == plain.bests
    assert flat(read(run.last)) == flat(read(plain.last))
    assert validated(train(resume=run.last, validate_first=True, epochs=3, parts=parts)) == [12]


def test_a_stop_during_the_first_one_comes_after_the_first_step(train):
    run = train(validate_first=True, stop_at=("validate", 0))
    assert (run.value["interrupted"], run.value["steps"], validated(run)) == ("interrupt", 1, [])
