"""Callbacks in the loop, on one rank in this process."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ddp_hydra import results
from ddp_hydra.errors import CheckpointError, ConfigError, RecordError
from ddp_hydra.rank.world import World
from ddp_hydra.training import callbacks
from ddp_hydra.training.callbacks import Callback, Callbacks, WallClock
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import (
    BY_LOSS,
    STEPS,
    Run,
    check_resume,
    flat,
    with_callbacks,
)

HERE = "tests.ddp_hydra.training.test_callbacks"


class Diary(Callback):
    """Notes when it is called."""

    def __init__(self) -> None:
        self.days: list[str] = []

    def on_start(self, run: Any) -> None:
        self.days.append(f"start {run.step}/{run.total_steps}")

    def on_step(self, run: Any) -> None:
        self.days.append(f"step {run.step}")
        run.log({"diary/pages": len(self.days)})

    def on_validation(self, run: Any) -> None:
        run.model.eval()  # it may be needed to look at the model
        self.days.append(f"validation {run.epoch} {'val/loss' in run.metrics}")

    def on_checkpoint(self, run: Any) -> None:
        self.days.append(f"checkpoint {run.samples}")

    def on_end(self, run: Any) -> None:
        self.days.append("end")
        run.text("diary", ", ".join(self.days))

    def state_dict(self) -> dict[str, Any]:
        return {"days": list(self.days)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.days = state["days"]


class FailsAtTheEnd(Callback):
    """Gives a file a path that is refused."""

    def on_end(self, run: Any) -> None:
        results.submit("swa.pt", b"x")


class Meddler(Callback):
    """Changes what it is told to change."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step(self, run: Any) -> None:
        if self.what == "weights":
            with torch.no_grad():
                run.model.bias.mul_(2)
        elif self.what == "rate":
            run._run.state.optimizer.param_groups[0]["lr"] = 0.5
        elif self.what == "frozen":
            run.model.bias.requires_grad_(False)
        elif self.what in ("stop", "interrupt"):
            run.stop("enough", done=self.what == "stop")


class Satisfied(Callback):
    """Calls the first validation good enough."""

    def on_validation(self, run: Any) -> None:
        run.stop("good enough")


class Admitted(Meddler):
    changes_training = True


@pytest.mark.medium
def test_they_are_called_at_their_moments_and_change_nothing(train):
    parts = with_callbacks(diary=(f"{HERE}.Diary", {}))
    watched, plain = train(parts=parts), train()
    assert watched.texts == [
        "start 0/8, step 1, step 2, step 3, step 4, validation 1 True, checkpoint 8, "
        "step 5, step 6, step 7, step 8, validation 2 True, checkpoint 16, end"
    ]
    assert watched.metrics("diary/pages") == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 8), (6, 9), (7, 10), (8, 11)]
    ours, theirs = flat(read(watched.last)), flat(read(plain.last))
    assert ours.pop("callbacks")["diary"]["days"][-1] == "checkpoint 16"
    assert ours == theirs


@pytest.mark.medium
def test_their_state_is_resumed(train):
    parts = with_callbacks(diary=(f"{HERE}.Diary", {}))
    begun = train(parts=parts, epochs=1)
    went_on = train(parts=parts, resume=begun.last)
    assert went_on.texts[0].startswith(
        "start 0/4, step 1, step 2, step 3, step 4, validation 1 True, checkpoint 8, start 4/8, step 5"
    )


class Counts(Callback):
    """Counts on each rank, from what each began with."""

    on_each_rank = True

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_a_state_of_each_rank_comes_back_to_its_rank():
    of_ranks = [{"n": 10}, {"n": 20}]
    state = SimpleNamespace()
    kept = Callbacks({"it": Counts(10)}, state, World(0, 2))
    kept.gather(lambda value: of_ranks)
    content = kept.state_dict()
    assert content == {"it": {"ranks": of_ranks}}
    for rank, n in enumerate([10, 20, 10]):
        callback = Counts(0)
        Callbacks({"it": callback}, state, World(rank, 3)).load_state_dict(content)
        assert callback.n == n


class Averaging(Callback):
    """Makes what it has a state of when the run starts."""

    state: dict[str, Any] | None = None

    def on_start(self, run: Any) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(run.model)
        if self.state is not None:
            self.average.load_state_dict(self.state)

    def on_step(self, run: Any) -> None:
        self.average.update_parameters(run.model)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        if hasattr(self, "average"):  # the run goes back
            self.average.load_state_dict(state)


class Seldom(Callback):
    """Has a state once there is something to keep. It takes all of its states."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, run: Any) -> None:
        self.steps.append(run.step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)} if self.steps else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state.get("steps", [])


def test_a_rollback_goes_back_to_a_state_that_was_empty(train):
    parts = with_callbacks(it=(f"{HERE}.Seldom", {}))
    rolled = train(fault=["nan,step=3"], on_nonfinite="rollback", parts=parts, epochs=1)
    assert read(rolled.last)["callbacks"] == {"it": {"steps": [1, 2, 3, 4]}}


class Picky(Seldom):
    """Takes no empty state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_callback_that_takes_no_empty_state_keeps_its_own_and_is_named(train, capsys):
    parts = with_callbacks(it=(f"{HERE}.Picky", {}))
    run = train(fault=["nan,step=3"], on_nonfinite="rollback", parts=parts, epochs=1)
    assert capsys.readouterr().err.count("callbacks.it (Picky) keeps the state that it has") == 1
    assert run.value["steps"] == STEPS


class OfInstance(Callback):
    """Has a state that no class defines."""

    def __init__(self) -> None:
        self.n = 0
        self.state_dict = lambda: {"n": self.n}

    def on_step(self, run: Any) -> None:
        self.n += 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def test_a_state_that_the_instance_defines_is_saved(train):
    run = train(parts=with_callbacks(it=(f"{HERE}.OfInstance", {})), epochs=1)
    assert read(run.last)["callbacks"] == {"it": {"n": STEPS}}


class OnRankOne(Callback):
    """Has a state on rank 1 only."""

    on_each_rank = True

    def __init__(self) -> None:
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_states_of_ranks_are_saved_also_where_rank_0_has_none():
    model = nn.Linear(1, 1)
    made = Callbacks({"one": OnRankOne()}, SimpleNamespace(model=model))
    made.gather(lambda own: [own, {"n": 1}])
    assert made.state_dict() == {"one": {"ranks": [{}, {"n": 1}]}}
    for rank, state in ((0, None), (1, {"n": 1})):
        made.world = SimpleNamespace(rank=rank)
        made.load_state_dict(made.state_dict())
        assert made.callbacks["one"].loaded == state


class Renamed(Diary):
    """Reads another key than the former class has written."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.days = state["pages"]


def test_a_callback_that_does_not_take_its_state_is_named(train):
    begun = train(parts=with_callbacks(diary=(f"{HERE}.Diary", {})), epochs=1)
    said = r"callbacks\.diary \(Renamed\) does not take its state of the checkpoint \(KeyError: 'pages'\): resume with"
    with pytest.raises(CheckpointError, match=said):
        train(parts=with_callbacks(diary=(f"{HERE}.Renamed", {})), resume=begun.last)


class Unsaveable(Averaging):
    on_step = Callback.on_step

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}


AVERAGING = with_callbacks(average=(f"{HERE}.Averaging", {}))


@pytest.mark.medium
def test_the_state_of_what_a_callback_makes_when_the_run_starts_is_saved_and_resumed(train):
    whole, _ = check_resume(train, parts=AVERAGING)
    state = read(whole.last)["callbacks"]["average"]
    assert state["n_averaged"] == 2 * STEPS
    assert not torch.equal(state["module.weight"], read(whole.last)["model"]["weight"])


def test_a_rollback_goes_back_to_what_a_callback_has_made_when_the_run_started(train):
    rolled = train(fault=["nan,step=3"], on_nonfinite="rollback", parts=AVERAGING, epochs=1)
    assert read(rolled.last)["callbacks"]["average"]["n_averaged"] == STEPS


def test_a_state_that_can_not_be_saved_is_refused_before_the_first_step(train):
    runs: list[Run] = []
    with pytest.raises(
        CheckpointError, match=r"average is a torch\.optim\.swa_utils\.AveragedModel, which a checkpoint"
    ):
        train(parts=with_callbacks(average=(f"{HERE}.Unsaveable", {})), into=runs, log_every_steps=1)
    assert runs[0].metrics("train/loss") == []


def test_a_callback_that_has_not_started_has_the_state_that_it_was_given():
    callbacks = Callbacks({"average": Averaging()}, SimpleNamespace())
    assert callbacks.state_dict() == {}
    given = {"average": {"n_averaged": 3}}
    callbacks.load_state_dict(given)
    assert callbacks.state_dict() == given


def test_without_a_validation_set_epochs_count(train):
    run = train(parts={**with_callbacks(diary=(f"{HERE}.Diary", {})), "objective": {"metric": "train/loss"}}, val=0)
    assert "validation 1 False, checkpoint 8" in run.texts[0]


class Mode(Callback):
    def on_validation(self, run: Any) -> None:
        run.log({"my/training": run.model.training, "my/average": run.average is not None and run.average.training})


@pytest.mark.parametrize(("ema_decay", "val"), [(0.9, 5), (0.9, 0), (None, 0)])
def test_a_validation_leaves_the_model_in_evaluation_mode_for_callbacks(train, ema_decay, val):
    parts = {**with_callbacks(mode=(f"{HERE}.Mode", {})), **BY_LOSS}
    run = train(parts=parts, ema_decay=ema_decay, val=val, validate_every_steps=3)
    assert {value for name in ("my/training", "my/average") for _, value in run.metrics(name)} == {0}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("what", "said"),
    [("weights", "changed weights"), ("rate", "the optimizer's settings"), ("frozen", "what is frozen")],
)
def test_what_a_resume_would_not_repeat_is_refused_unless_it_is_admitted(train, what, said):
    with pytest.raises(ConfigError, match=rf"callbacks\.it \(Meddler\) has changed.*{said.split()[-1]}.*set changes_t"):
        train(parts=with_callbacks(it=(f"{HERE}.Meddler", {"what": what})))
    if what != "frozen":  # DDP needs each gradient
        assert train(parts=with_callbacks(it=(f"{HERE}.Admitted", {"what": what}))).value["steps"] == 8


def test_one_may_ask_to_stop_and_to_be_resumed(train, capsys):
    run = train(parts=with_callbacks(it=(f"{HERE}.Meddler", {"what": "interrupt"})))
    assert (run.value["interrupted"], run.value["stopped_early"], run.steps_saved) == ("callback", "", [2])
    assert run.metrics("val/loss") == []
    assert capsys.readouterr().err == "a callback asked to stop after step 1: enough\n"


def test_one_may_call_the_run_done_which_is_validated_then(train):
    run = train(parts=with_callbacks(it=(f"{HERE}.Meddler", {"what": "stop"})))
    assert (run.value["interrupted"], run.value["stopped_early"], run.value["steps"]) == ("", "enough", 2)
    assert [step for step, _ in run.metrics("val/loss")] == run.steps_saved == [2]
    assert read(run.last)["validation_due"] is False
    assert run.texts == ["enough"]


class SatisfiedBy(Callback):
    """Asks for the end at some step."""

    def __init__(self, event: str, step: int, done: bool = True) -> None:
        self.step, self.done = step, done
        setattr(self, f"on_{event}", self._look)

    def _look(self, run: Any) -> None:
        if run.step == self.step:
            run.stop("good enough", done=self.done)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("every", [0, 5])
@pytest.mark.parametrize(("event", "step"), [("step", 5), ("checkpoint", 5), ("start", 0)])
def test_a_run_ends_where_it_was_asked_to_also_after_a_rollback(train, event, step, every, done):
    parts = with_callbacks(it=(f"{HERE}.SatisfiedBy", {"event": event, "step": step, "done": done}))
    options = {"on_nonfinite": "rollback", "checkpoint_every_epochs": 0, "checkpoint_every_steps": every}
    run = train(parts=parts, fault=[f"nan,step={step + 1}"], **options)
    expected = step + 1 if every or event != "checkpoint" else 2 * STEPS
    assert (run.value["steps"], run.steps_saved[-1]) == (expected, expected)
    if expected < 2 * STEPS:
        ends = ("", "good enough") if done else ("callback", "")
        assert (run.value["interrupted"], run.value["stopped_early"]) == ends


@pytest.mark.medium
@pytest.mark.parametrize("trainer", [{}, {"validate_every_steps": 3}], ids=str)
def test_a_run_that_is_done_at_a_validation_takes_no_further_step(train, trainer):
    run = train(parts=with_callbacks(it=(f"{HERE}.Satisfied", {})), **trainer)
    steps = trainer.get("validate_every_steps", STEPS)
    assert (run.value["interrupted"], run.value["stopped_early"], run.value["steps"]) == ("", "good enough", steps)
    assert [step for step, _ in run.metrics("val/loss")] == run.steps_saved == [steps]
    resumed = train(resume=run.last)  # without the callback it goes on
    assert (resumed.value["steps"], resumed.value["stopped_early"]) == (2 * STEPS, "")


# -- those that ship -------------------------------------------------------------------------------------------


def test_histograms(train):
    node = ("ddp_hydra.training.callbacks.Histograms", {"parameters": "wei*", "every_steps": 4})
    run = train(parts=with_callbacks(histograms=node))
    shown = [(record.step, record.data.name) for record in run.records if record.kind == "histogram"]
    none = train(parts=with_callbacks(histograms=(node[0], {"every_steps": 0})), epochs=1)
    assert not [record for record in none.records if record.kind == "histogram"]
    assert shown == [(4, "weights/weight"), (4, "gradients/weight"), (8, "weights/weight"), (8, "gradients/weight")]
    assert all(sum(record.data.counts) == 12 for record in run.records if record.kind == "histogram")


@pytest.fixture
def berlin(monkeypatch) -> Iterator[None]:
    """The time zone of a place whose clocks are set back on 2026-10-25 at 03:00."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "end"),
    [
        ("2026-11-29 05:00", "2026-11-29T07:30:00+01:00"),
        ("2026-11-29 07:30", "2026-11-30T07:30:00+01:00"),
        ("2026-10-24 20:00", "2026-10-25T07:30:00+01:00"),
        ("2026-10-25 01:00", "2026-10-25T07:30:00+01:00"),
        ("2026-12-31 08:00", "2027-01-01T07:30:00+01:00"),
        ("2026-10-25 01:00", "2026-10-25T02:50:00+02:00"),  # which comes twice
        ("2026-10-25 02:55", "2026-10-25T02:50:00+01:00"),
        ("2026-10-25 02:45+01:00", "2026-10-25T02:50:00+01:00"),
        ("2026-10-25 02:55+01:00", "2026-10-26T02:50:00+01:00"),
        ("2026-03-28 12:00", "2026-03-29T03:30:00+02:00"),  # when there is no 02:30
        ("2026-03-29 01:45", "2026-03-29T03:30:00+02:00"),
        ("2026-03-29 03:45", "2026-03-30T02:30:00+02:00"),
    ],
)
def test_a_wall_clock_stops_at_its_time(now, end, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, zone: Any = None) -> datetime:
            return time_now.astimezone()

    monkeypatch.setattr(callbacks, "datetime", Clock)
    asked: list[str] = []
    run = type("run", (), {"rank": 0, "stop": lambda self, reason, done: asked.append(reason)})()
    time_now, until = datetime.fromisoformat(now), datetime.fromisoformat(end)
    clock = WallClock("02:30" if "03-2" in now else f"{until:%H:%M}")
    assert clock.end.isoformat() == end
    time_now = until - timedelta(seconds=1)
    clock.on_step(run)
    assert asked == []
    time_now = until
    clock.on_step(run)
    assert asked == [f"it is {until:%H:%M}"]


def test_a_time_of_day_has_hours_and_minutes():
    with pytest.raises(ConfigError, match=r"at='7.30' is not a time of day"):
        WallClock("7.30")


def test_a_callback_that_fails_at_the_end_loses_nothing(train):
    runs: list[Run] = []
    parts = {"callbacks": {"it": {"_target_": f"{HERE}.FailsAtTheEnd"}}}
    with pytest.raises(RecordError, match=r"rank 0 submitted 'swa\.pt': give a folder of its own"):
        train(epochs=1, parts=parts, into=runs)
    assert runs[0].steps_saved == [STEPS]


def test_an_image_of_another_shape_is_refused_with_its_shape():
    view = callbacks.RunView(SimpleNamespace(rank=0))
    with pytest.raises(RecordError, match=r"^run\.image\('grid', …\) takes pixels of shape .* got \(3, 8, 9\)$"):
        view.image("grid", torch.zeros(3, 8, 9, dtype=torch.uint8))
    with pytest.raises(RecordError, match=r"^run\.image\('grid', …\) takes pixels of shape .* got str$"):
        view.image("grid", "a.png")
    for odd in ([[1], [1, 2]], np.array([[2**70]], dtype=object)):
        with pytest.raises(RecordError, match=r"^run\.image\('grid', …\) takes pixels of shape .* got "):
            view.image("grid", odd)


@pytest.mark.parametrize(
    ("pixels", "shown"),
    [
        (np.array([[0.0, 0.5, 1.0]]), [0, 128, 255]),
        (torch.tensor([[-0.5, 0.2, 7.0]], dtype=torch.bfloat16), [0, 51, 255]),
        (np.array([[True, False, True]]), [255, 0, 255]),
        (np.array([[0, 7, 255]]), [0, 7, 255]),
        (torch.tensor([[0.0, float("nan"), 1.0]]), [0, 0, 255]),
    ],
    ids=str,
)
def test_fractions_are_shown_as_torch_shows_them(monkeypatch, pixels, shown):
    sent: list[bytes] = []
    monkeypatch.setattr(results, "image", lambda name, png, step: sent.append(png))
    callbacks.RunView(SimpleNamespace(rank=0, position=SimpleNamespace(step=1))).image("grid", pixels)
    assert np.asarray(Image.open(io.BytesIO(sent[0]))).tolist() == [shown]


@pytest.mark.parametrize("pixels", [np.array([[0, 300]]), torch.tensor([[-1, 3]])], ids=str)
def test_numbers_that_no_picture_holds_are_refused(pixels):
    with pytest.raises(
        RecordError, match=r"takes whole numbers from 0 to 255, or fractions from 0 to 1, got (0 to 300|-1 to 3)$"
    ):
        callbacks.RunView(SimpleNamespace(rank=0)).image("grid", pixels)
