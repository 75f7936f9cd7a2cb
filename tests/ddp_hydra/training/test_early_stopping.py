from __future__ import annotations

import pytest

from ddp_hydra.training.early_stopping import EarlyStopping

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
