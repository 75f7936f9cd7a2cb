from __future__ import annotations

import pytest

from ddp_hydra.training.cadence import EarlyStopping
from tests.ddp_hydra.training.loop_runs import BY_LOSS, STEPS, repeated, same

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "maximize", "patience", "min_delta", "ends_after"),
    [
        ([1, 2, 3, 2, 2], True, 2, 0.0, 5),
        ([1, 2, 3, 2, 4, 3], True, 2, 0.0, None),
        ([3, 2, 1, 1, 1], False, 2, 0.0, 5),
        ([1, 1.05, 1.08], True, 2, 0.1, 3),
        ([1, NAN, NAN], True, 2, 0.0, 3),
        ([NAN, NAN, 1], True, 3, 0.0, None),
        ([3, 2, 1, 0], True, None, 0.0, None),
    ],
)
def test_it_ends_after_validations_without_progress(values, maximize, patience, min_delta, ends_after):
    stop = EarlyStopping("val/x", maximize, patience, min_delta)
    ended = [number for number, value in enumerate(values, start=1) if stop.update({"val/x": value})]
    assert (ended[0] if ended else None) == ends_after
    assert stop.should_stop is (ends_after is not None)


def test_what_it_knows_is_kept():
    first, second = EarlyStopping("val/x", True, 2), EarlyStopping("val/x", True, 2)
    first.update({"val/x": 5.0})
    first.update({"val/x": 4.0})
    second.load_state_dict(first.state_dict())
    assert second.update({"val/x": 4.0}) is True


def test_other_metrics_do_not_count():
    stop = EarlyStopping("val/x", True, 1)
    assert [stop.update({"val/y": 1.0}) for _ in range(3)] == [False] * 3


def test_a_run_whose_validation_gets_no_better_ends_early_and_stays_ended(train):
    options = {"early_stopping_patience": 2, "early_stopping_min_delta": 5.0, "epochs": 9}
    run = train(**options)
    assert run.value["steps"] == 3 * STEPS  # the first is the best, and two more are no better
    assert run.steps_saved[-1] == 3 * STEPS
    again = train(resume=run.last, **options)
    assert again.value["steps"] == 3 * STEPS
    assert again.steps_saved == []


def test_a_run_that_is_over_when_it_is_resumed_elsewhere_leaves_a_checkpoint_there(train):
    options = {"early_stopping_patience": 1, "early_stopping_min_delta": 5.0, "epochs": 9}
    run = train(**options)
    measured = repeated(run.saved[-1].data.checkpoint.metrics)
    copy = train(resume=run.last, first_save=True, **options)
    assert copy.steps_saved == run.steps_saved[-1:]
    assert copy.saved[0].data.checkpoint.metrics == measured == copy.value["metrics"]
    assert same(run.last, copy.last)
    assert train(resume=copy.last, epochs=3).steps_saved[-1] == 3 * STEPS
    assert train(resume=run.last, first_save=True, epochs=3).steps_saved == [3 * STEPS]


def test_only_what_was_validated_counts(train):
    options = {"early_stopping_patience": 1, "early_stopping_min_delta": 5.0, "epochs": 9, "validate_every_epochs": 3}
    assert train(**options).value["steps"] == 6 * STEPS


def test_a_run_without_validation_goes_by_its_training(train):
    run = train(val=0, early_stopping_patience=1, early_stopping_min_delta=5.0, epochs=9, parts=BY_LOSS)
    assert run.value["steps"] == 2 * STEPS


def test_a_run_that_gets_better_goes_on(train):
    loss = {"objective": {"metric": "val/loss", "direction": "maximize"}}  # which such a small set does
    run = train(early_stopping_patience=1, epochs=3, parts=loss)
    values = [value for _, value in run.metrics("val/loss")]
    assert values == sorted(values)
    assert run.value["steps"] == 3 * STEPS
