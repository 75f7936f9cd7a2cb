"""What decides is a mean over the whole epoch, however often it is logged, stopped and resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.metrics import EpochMeans
from tests.ddp_hydra.training.loop_runs import BY_LOSS, STEPS, Run

STILL: dict[str, Any] = {"optimizer": {"lr": 0.0}}
"""Weights that stay as they are: then each epoch's mean is over the same losses, in another order."""


def means(run: Run) -> list[tuple[int, float]]:
    return run.metrics("train_epoch/loss")


@pytest.mark.medium
@pytest.mark.parametrize("every", [1, 3, 4, 9])
def test_the_mean_is_that_over_the_epoch_whatever_is_logged_between(train, every):
    steps = dict(train(log_every_steps=1).metrics("train/loss"))
    run = train(log_every_steps=every)
    expected = [sum(steps[first + number] for number in range(1, 5)) / 4 for first in (0, 4)]
    assert [step for step, _ in means(run)] == [4, 8]
    assert [value for _, value in means(run)] == pytest.approx(expected, rel=1e-12)
    assert run.value["metrics"]["train/loss"] == means(run)[-1][1]  # that of the run: for sweeps, summary.json


def test_it_goes_by_the_mean_without_a_validation_set(train):
    options = {"val": 0, "parts": {**BY_LOSS, **STILL}, "epochs": 4, "log_every_steps": 3}
    run = train(**options)
    assert read(run.last)["best"] == pytest.approx(min(value for _, value in means(run)), rel=1e-15)


def test_a_few_steps_at_the_end_of_a_run_do_not_decide(train):
    """Of an epoch that the run leaves in its middle."""
    run = train(val=0, parts=BY_LOSS, epochs=None, max_steps=5)
    assert [step for step, _ in means(run)] == [STEPS]
    assert run.bests == [(4, True), (5, False)]
    assert run.value["metrics"]["train/loss"] == means(run)[0][1]


def test_a_run_shorter_than_an_epoch_goes_by_all_its_steps(train):
    run = train(val=0, parts=BY_LOSS, epochs=None, max_steps=3, log_every_steps=1)
    losses = [value for _, value in run.metrics("train/loss")]
    assert means(run) == [(3, pytest.approx(sum(losses) / 3, rel=1e-12))]
    assert run.bests == [(3, True)]


@pytest.mark.medium
@pytest.mark.parametrize("stop_at", [("update", 2), ("update", 4), ("log", 6), ("forward", 8)], ids=str)
def test_a_resume_decides_as_the_run_without_a_stop(train, stop_at):
    options = {"val": 0, "parts": BY_LOSS, "epochs": 3, "early_stopping_patience": 2}
    whole, stopped = train(**options), train(stop_at=stop_at, **options)
    assert stopped.value["interrupted"] == "interrupt"
    resumed = train(resume=stopped.last, **options)
    got = dict(means(stopped)) | dict(means(resumed))
    assert got == {step: pytest.approx(value, rel=1e-12) for step, value in means(whole)}
    assert read(resumed.last)["best"] == pytest.approx(read(whole.last)["best"], rel=1e-12)
    assert read(resumed.last)["early_stopping"]["best"] == pytest.approx(read(whole.last)["early_stopping"]["best"])


def test_a_resume_whose_validation_is_due_counts_its_epoch_for_an_objective_of_the_training(train):
    stopped = train(stop_at=("update", STEPS), parts=BY_LOSS, early_stopping_patience=9)
    assert read(stopped.last)["validation_due"] is True
    resumed = train(resume=stopped.last, parts=BY_LOSS, early_stopping_patience=9, epochs=1)
    assert resumed.bests == [(STEPS, True)]
    assert read(resumed.last)["best"] == means(resumed)[0][1]


@pytest.mark.medium
@pytest.mark.parametrize("policy", ["rollback", "skip"])
@pytest.mark.parametrize("every", [1, 3])
def test_steps_that_are_left_out_or_taken_again_count_once_or_not_at_all(train, policy, every):
    parts = {**BY_LOSS, **STILL}
    steps = dict(train(log_every_steps=1, parts=parts).metrics("train/loss"))
    run = train(fault=["nan,step=6"], on_nonfinite=policy, parts=parts, log_every_steps=every, checkpoint_every_steps=1)
    right = sum(steps[step] for step in (5, 7, 8)) / 3
    assert means(run)[-1] == (8, pytest.approx(right, rel=1e-6))


def test_sums_go_on_after_a_resume_and_an_epoch_without_steps_keeps_the_last_means():
    class Task:
        def metrics(self, sums):
            return {name: float(part / sums["n"]) for name, part in sums.items() if name != "n"}

    first, second = EpochMeans(Task()), EpochMeans(Task())
    first.add({"loss": torch.tensor(6.0), "n": torch.tensor(2.0)})
    first.end_epoch()
    first.add({"loss": torch.tensor(1.0), "n": torch.tensor(1.0)})
    second.load_state_dict(first.state_dict())
    second.add({"loss": torch.tensor(2.0), "n": torch.tensor(2.0)})
    assert (second.last, second.so_far(), first.so_far()) == ({"loss": 3.0}, {"loss": 1.0}, {"loss": 1.0})
    second.end_epoch()
    second.end_epoch()  # nothing counted
    assert second.last == {"loss": 1.0}
