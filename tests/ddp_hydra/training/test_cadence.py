"""What is due after a step and after an epoch, as a table: 12 steps, 4 in an epoch; and by the clock."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config.schema import TrainerConfig
from ddp_hydra.training import cadence
from ddp_hydra.training.cadence import Actions, Cadence, LogClock, is_due
from tests.support.clocks import set_time

TOTAL, EPOCH = 12, 4
NOTHING = Actions()
LOG = Actions(log=True)
SAVE = Actions(log=True, save=True)
STOP = Actions(log=True, save=True, leave=True)
END = Actions(log=True, leave=True)


@pytest.mark.parametrize(
    ("step", "log_every", "save_every", "stop", "due"),
    [
        (1, 1, 0, False, LOG),
        (1, 3, 0, False, NOTHING),
        (3, 3, 0, False, LOG),
        (3, 5, 3, False, SAVE),  # a save is always logged, too
        (3, 3, 3, False, SAVE),
        (4, 3, 0, False, LOG),  # the epoch's end is always logged
        (4, 3, 4, False, LOG),  # and saved after its validation
        (5, 3, 0, True, STOP),
        (4, 3, 0, True, STOP),  # not validated any more
        (12, 5, 0, False, END),
        (12, 5, 12, False, END),
        (12, 5, 0, True, STOP),
        (13, 5, 0, False, END),
    ],
)
def test_what_follows_a_step(step, log_every, save_every, stop, due):
    cadence = Cadence(TOTAL, log_every, save_every)
    assert cadence.after_step(step, epoch_ends=step % EPOCH == 0, stop=stop) == due


VALIDATE = Actions(log=True, validate=True)


@pytest.mark.parametrize(
    ("step", "validate_every", "save_every", "stop", "due"),
    [
        (3, 3, 0, False, VALIDATE),  # logged at the same step
        (2, 3, 0, False, NOTHING),
        (4, 2, 0, False, LOG),  # at the end of an epoch it waits for `after_epoch`
        (3, 3, 3, False, Actions(log=True, save=True, validate=True)),
        (3, 3, 0, True, STOP),  # a resume validates first
        (12, 3, 0, False, END),
        (3, 0, 0, False, NOTHING),
    ],
)
def test_a_validation_may_follow_a_step(step, validate_every, save_every, stop, due):
    cadence = Cadence(TOTAL, 10, save_every, validate_every_steps=validate_every)
    assert cadence.after_step(step, epoch_ends=step % EPOCH == 0, stop=stop) == due


@pytest.mark.parametrize(
    ("epochs", "by_epochs", "by_steps", "validate"),
    [(1, 0, 4, True), (1, 0, 3, False), (1, 1, 3, True), (2, 0, 4, True), (3, 0, 5, True)],
)
def test_an_epoch_may_end_where_a_validation_by_steps_is_due(epochs, by_epochs, by_steps, validate):
    cadence = Cadence(TOTAL, 10, 0, 0, by_epochs, by_steps)
    assert cadence.after_epoch(epochs * EPOCH, epochs).validate is validate


def test_a_run_that_ends_amid_an_epoch_is_saved_after_its_validation():
    assert Cadence(6, log_every_steps=5, checkpoint_every_steps=6).after_step(6, epoch_ends=False, stop=False) == END
    assert Cadence(6, 5, 0, 0, 0).after_epoch(6, epochs=1) == Actions(validate=True, save=True)


@pytest.mark.parametrize(
    ("epochs", "validate_every", "save_every_epochs", "save_every_steps", "validate", "save"),
    [
        (1, 1, 1, 0, True, True),
        (1, 2, 1, 0, False, True),
        (2, 2, 0, 0, True, False),
        (1, 0, 0, 0, False, False),
        (1, 0, 0, 4, False, True),
        (1, 0, 0, 3, False, False),
        (3, 0, 0, 0, True, True),
        (3, 2, 2, 5, True, True),
    ],
)
def test_what_follows_an_epoch(epochs, validate_every, save_every_epochs, save_every_steps, validate, save):
    cadence = Cadence(TOTAL, 10, save_every_steps, save_every_epochs, validate_every)
    assert cadence.after_epoch(epochs * EPOCH, epochs) == Actions(validate=validate, save=save)


@pytest.mark.parametrize(("count", "every", "due"), [(6, 3, True), (7, 3, False), (6, 0, False), (0, 3, True)])
def test_an_interval_of_0_is_never_due(count, every, due):
    assert is_due(count, every) is due


def test_the_config_gives_the_intervals():
    trainer = OmegaConf.structured(
        TrainerConfig(
            log_every_steps=2,
            checkpoint_every_steps=3,
            checkpoint_every_epochs=4,
            validate_every_epochs=5,
            validate_every_steps=6,
        )
    )
    assert Cadence.from_config(trainer, 100) == Cadence(100, 2, 3, 4, 5, 6)


# -- by the clock ----------------------------------------------------------------------------------------------


def test_a_clock_tells_when_to_log_at_growing_intervals(monkeypatch):
    now = 0.0
    set_time(monkeypatch, cadence, monotonic=lambda: now)
    clock, due = LogClock(10.0, growth=2.0), []
    for second in range(100):
        now = float(second)
        if clock.is_due():
            due.append(second)
            clock.restart()
    assert due == [10, 30, 70]
    assert not LogClock(None).is_due()


def test_what_was_logged_for_another_reason_begins_the_interval_anew(monkeypatch):
    now = 0.0
    set_time(monkeypatch, cadence, monotonic=lambda: now)
    clock = LogClock(10.0, growth=2.0)
    now = 9.0
    clock.restart()
    now = 18.0
    assert not clock.is_due()
    now = 19.0
    assert clock.is_due()
