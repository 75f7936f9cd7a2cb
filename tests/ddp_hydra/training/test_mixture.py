"""A validation of several sets has the loss of each, and the one of all samples."""

from __future__ import annotations

import pytest
from torch.utils.data import ConcatDataset

from ddp_hydra.data.mix import Mix
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError
from tests.ddp_hydra.training.loop_runs import Numbers, check_resume


def mixed(n: int) -> Mix:
    return look_into(Mix({"one": Numbers(n), "two": Numbers(n + 3)}))


def test_each_set_has_its_loss(train):
    run = train(data=mixed, parts={"objective": {"metric": "val/loss/two", "direction": "minimize"}})
    for metric in ("loss", "accuracy"):
        whole, one, two = (dict(run.metrics(f"val/{metric}{name}")) for name in ("", "/one", "/two"))
        assert whole
        for step, value in whole.items():
            assert value == pytest.approx((5 * one[step] + 8 * two[step]) / 13)


def test_the_loss_of_all_is_the_one_of_the_sets_one_after_the_other(train):
    sets = (lambda n: look_into(ConcatDataset([Numbers(n), Numbers(n + 3)]))), mixed
    runs = [train(data=lambda n, own=own: Numbers(9) if n == 9 else own(n)) for own in sets]
    one, other = (dict(run.metrics("val/loss")) for run in runs)
    assert one == pytest.approx(other)


def test_a_name_of_no_set_is_refused(train):
    with pytest.raises(ConfigError, match=r"val/loss/three"):
        train(data=mixed, parts={"objective": {"metric": "val/loss/three", "direction": "minimize"}})


def test_a_run_goes_on_amid_an_epoch(train):
    _, stopped = check_resume(train, ("load", 4), data=mixed)
    assert stopped.steps_saved == [4]
