"""Callbacks in the loop, on one rank in this process."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ddp_hydra import results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.errors import CheckpointError, ConfigError, RecordError
from ddp_hydra.rank.world import World
from ddp_hydra.tasks import Task
from ddp_hydra.training import callbacks
from ddp_hydra.training.callbacks import Callback, Callbacks, Unfreeze, WallClock
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import BY_LOSS, FALLING, STEPS, Run, check_resume, flat, repeated, same

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


def with_callbacks(**nodes: Any) -> dict[str, Any]:
    return {"callbacks": {name: {"_target_": target, **rest} for name, (target, rest) in nodes.items()}}


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


class Scores(Callback):
    """Logs a score of its own: it rises, is no number, and falls."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def on_validation(self, run: Any) -> None:
        if run.epoch % self.every == 0:
            run.log({"my/score": torch.tensor([0.0, 1.0, float("nan"), 0.5, 0.25][run.epoch])})


BY_SCORE = {"metric": "my/score", "direction": "maximize"}


def test_the_objective_may_be_what_a_callback_logs_at_each_validation(train):
    parts = {**with_callbacks(score=(f"{HERE}.Scores", {})), "objective": BY_SCORE}
    run = train(parts=parts, epochs=9, early_stopping_patience=3)
    assert [is_best for _, is_best in run.bests] == [True, False, False, False]
    assert run.value["stopped_early"] == "no progress in my/score for 3 validations"
    assert run.value["metrics"]["my/score"] == 0.25
    check_resume(train, stop_at=("forward", 6), parts=parts, epochs=4)
    amid = train(parts=parts, epochs=1, validate_every_steps=2)
    assert read(amid.last)["best"] == 1


class Reader(Callback):
    """Notes the metrics that it meets."""

    met: dict[tuple[str, int], dict[str, float]]

    def note(self, event: str, run: Any) -> None:
        Reader.met[event, run.step] = repeated(run.metrics)

    def on_start(self, run: Any) -> None:
        self.note("start", run)

    def on_step(self, run: Any) -> None:
        self.note("step", run)

    def on_validation(self, run: Any) -> None:
        self.note("validation", run)

    def on_checkpoint(self, run: Any) -> None:
        self.note("checkpoint", run)

    def on_end(self, run: Any) -> None:
        self.note("end", run)


@pytest.fixture
def met(monkeypatch) -> dict[tuple[str, int], dict[str, float]]:
    monkeypatch.setattr(Reader, "met", {}, raising=False)
    return Reader.met


READ = {
    **with_callbacks(score=(f"{HERE}.Scores", {}), reader=(f"{HERE}.Reader", {})),
    "objective": BY_SCORE,
}


@pytest.mark.medium
@pytest.mark.parametrize("stop_at", [("update", 1), ("validate", 4), ("update", 6), ("validate", 6), ("update", 8)])
def test_a_resumed_run_goes_on_with_the_metrics_of_the_one_before(train, met, stop_at):
    options = {"parts": READ, "log_every_steps": 1, "validate_every_steps": 3, "clip_norm": 1.0}
    train(**options)
    never = dict(met)
    stopped = train(stop_at=stop_at, **options)
    met.clear()
    train(resume=stopped.last, **options)
    begun = met.pop(("start", stopped.value["steps"]))
    assert begun == repeated(stopped.saved[-1].data.checkpoint.metrics)
    assert met
    assert repr({moment: never[moment] for moment in met}) == repr(met)  # with NaN


@pytest.mark.parametrize("node", ["task", "loss", "metrics", "data"])
def test_metrics_whose_meaning_may_have_changed_are_unknown_after_a_resume(train, met, node):
    first = train(parts=READ)
    more = {
        "task": {"metric": "loss"},
        "loss": {"label_smoothing": 0.1},
        "metrics": {"top": None},
        "data": {"val": {"size": 5}},
    }
    train(resume=first.last, parts={**READ, "data": {"batch_size": 4, "workers": 0}})
    assert met["end", 8]["val/loss"] == first.value["metrics"]["val/loss"]
    train(resume=first.last, parts={**READ, node: more[node]})
    assert met["end", 8] == {}


def test_metrics_of_a_validation_set_that_refers_to_another_key_are_unknown_once_its_value_is_another(train, met):
    parts = {
        **READ,
        "data": {"size": "${data.rows}", "rows": 5, "val": {"size": "${data.size}", "at": "${oc.env:HOME}"}},
    }
    first = train(parts=parts)
    train(resume=first.last, parts=parts)
    assert "val/loss" in met["end", 8]
    train(resume=first.last, parts={**parts, "data": {**parts["data"], "rows": 6}})
    assert met["end", 8] == {}


def test_another_objective_leaves_the_metric_of_a_callback_that_was_one_before(train, met):
    train(resume=train(parts=READ).last, parts={**READ, "objective": {"metric": "val/loss", "direction": "minimize"}})
    assert "val/loss" in met["end", 8]
    assert "my/score" not in met["end", 8]


def test_a_rollback_goes_back_to_the_metrics_of_its_checkpoint(train, met):
    train(parts=READ, log_every_steps=1, epochs=1, fault=["nan,step=3"], on_nonfinite="rollback")
    assert met["step", 1] == {}  # of the second time: a step is logged after it
    assert "lr" in met["step", 2]


def test_a_checkpoint_without_metrics_is_read(train, met, tmp_path):
    first = train(parts=READ)
    content = {name: value for name, value in read(first.last).items() if name != "metrics"}
    torch.save(content, tmp_path / "before.pt")
    assert train(resume=tmp_path / "before.pt", parts=READ, epochs=3).value["steps"] == 3 * STEPS
    assert met["start", 8] == {}


class Apart(Task):
    """Trains the layers of a model apart."""

    def updates(self, step: int) -> tuple[str, ...]:
        return ("0", "1")

    def step(self, model: Any, batch: Any, update: str = "") -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_metric_of_an_update_is_the_runs_own_beside_callbacks(train):
    whole = {
        **with_callbacks(score=(f"{HERE}.Epochs", {})),
        "model": {"_target_": f"{HERE}.two_layers"},
        "parallel": {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"},
        "task": {"_target_": f"{HERE}.Apart"},
        "objective": {"metric": "1/lr", "direction": "maximize"},
    }
    assert train(whole=whole).bests == [(STEPS, True), (2 * STEPS, False)]


class EveryThird(Apart):
    """Trains the second layer in every third step only."""

    def updates(self, step: int) -> tuple[str, ...]:
        return ("0", "1") if step % 3 == 1 else ("0",)


@pytest.mark.parametrize("fault", [[], ["nan,step=6"], ["nan,step=7"]])
def test_an_update_has_the_rate_of_its_last_step_also_after_a_resume_and_a_rollback(train, fault):
    given = {
        "model": {"_target_": f"{HERE}.two_layers"},
        "parallel": {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"},
        "task": {"_target_": f"{HERE}.EveryThird"},
        **FALLING,
    }
    options = {"whole": given, "log_every_steps": 1, "clip_norm": 1.0, "checkpoint_every_steps": 5}
    never = train(**options, fault=fault, on_nonfinite="skip")
    rolled = train(**options, fault=fault, on_nonfinite="rollback")
    stopped = train(stop_at=("update", 2), **options)
    resumed = train(resume=stopped.last, **options, fault=fault, on_nonfinite="skip")
    for name in ("1/lr", "1/grad_norm"):
        known = dict(never.metrics(name))
        assert sorted(known) == list(range(1, 9))
        assert dict(rolled.metrics(name)) == known
        assert dict(stopped.metrics(name)) | dict(resumed.metrics(name)) == known


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


class InSteps(Callback):
    """Logs the score after some steps; it may do so at the first validation, too."""

    def __init__(self, also: bool) -> None:
        self.also = also

    def on_step(self, run: Any) -> None:
        if run.step % STEPS == 1:
            run.log({"my/score": run.step})

    def on_validation(self, run: Any) -> None:
        if self.also and run.epoch == 1:
            run.log({"my/score": 0.5})


@pytest.mark.parametrize("also", [False, True])
def test_what_a_callback_logs_after_a_step_is_no_objective_as_a_resume_would_not_know_it(train, also):
    found: list[Run] = []
    parts = {**with_callbacks(score=(f"{HERE}.InSteps", {"also": also})), "objective": BY_SCORE}
    with pytest.raises(ConfigError, match="no callback has logged it for this validation"):
        train(parts=parts, into=found)
    assert found[0].steps_saved == ([STEPS, 2 * STEPS] if also else [STEPS])


@pytest.mark.parametrize(("every", "bests"), [(2, [8, 16]), (0, [16])])
def test_without_a_validation_set_the_objective_counts_where_callbacks_are_called(train, every, bests):
    parts = {**with_callbacks(score=(f"{HERE}.Epochs", {})), "objective": BY_SCORE}
    run = train(parts=parts, val=0, epochs=4, validate_every_epochs=every, early_stopping_patience=1)
    assert run.steps_saved == [4, 8, 12, 16]
    assert [step for step, is_best in run.bests if is_best] == bests


class Epochs(Callback):
    """Logs the number of epochs."""

    def on_validation(self, run: Any) -> None:
        run.log({"my/score": run.epoch})


def test_a_callback_that_leaves_a_validation_out_is_named_and_nothing_is_lost(train):
    found: list[Run] = []
    parts = {**with_callbacks(score=(f"{HERE}.Scores", {"every": 2})), "objective": BY_SCORE}
    said = r"objective\.metric=my/score: no callback has logged it for this validation; there are .*The run is saved"
    with pytest.raises(ConfigError, match=said):
        train(parts=parts, epochs=4, into=found)
    assert found[0].steps_saved == [STEPS]


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


class Net(nn.Sequential):
    """Two layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def unfrozen(**trainer: Any) -> dict[str, Any]:
    node = ("ddp_hydra.training.callbacks.Unfreeze", {"after_epochs": 2, "parameters": ["0.*", "1.*"], "lr": 0.01})
    return {"model": {"_target_": f"{HERE}.Net", "in_features": None, "out_features": None}, **with_callbacks(u=node)}


@pytest.fixture
def net(monkeypatch):
    """Without the arguments that the loop's tests give their model."""
    monkeypatch.setattr(Net, "__init__", lambda self, in_features, out_features: nn.Sequential.__init__(
        self, nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    ))  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("epochs", [2, 3])
def test_what_was_frozen_is_trained_from_some_epoch_on_also_after_a_resume(train, net, decay_all, epochs):
    given = {"freeze": ["*", "!2.*"], "decay_all": decay_all, "checkpoint_every_steps": 1}
    whole = train(parts=unfrozen(), epochs=4, **given)
    states = {step: read(path) for step, path in zip(whole.steps_saved, map(path_of, whole.saved), strict=True)}
    weights = {step: state["model"]["0.weight"] for step, state in states.items()}
    means = {step: state["model"]["1.running_mean"] for step, state in states.items()}
    assert torch.equal(weights[1], weights[8])
    assert not torch.equal(weights[8], weights[9])
    assert (torch.equal(means[1], means[8]), torch.equal(means[8], means[9])) == (True, False)
    assert [group["initial_lr"] for group in states[9]["optimizer"]["param_groups"]] in (
        [0.1, 0.01],
        [0.1] * 2 + [0.01] * 2,
    )
    resumed = train(parts=unfrozen(), epochs=4, resume=path_of(whole.saved[4 * epochs - 1]), **given)
    assert same(resumed.last, whole.last)


@pytest.mark.medium
def test_a_run_that_is_made_longer_unfreezes_as_one_that_was_so_from_the_beginning(train, net):
    given = {"parts": unfrozen(), "freeze": ["*", "!2.*"]}
    given["parts"]["scheduler"] = {"_target_": "ddp_hydra.training.lr_schedules.constant"}
    first, never = train(epochs=2, **given), train(epochs=4, **given)
    assert "unfrozen" not in read(first.last)
    assert same(train(epochs=4, resume=first.last, **given).last, never.last)


class Thaw(Callback):
    """Unfreezes after some step, of which no checkpoint follows."""

    def on_step(self, run: Any) -> None:
        if run.step == 2:
            run.unfreeze("0.*")


@pytest.mark.medium
@pytest.mark.parametrize(("callback", "bad"), [("ddp_hydra.training.callbacks.Unfreeze", 6), (f"{HERE}.Thaw", 4)])
def test_a_rollback_goes_back_to_where_parameters_were_unfrozen(train, net, callback, bad):
    options = {"after_epochs": 1, "parameters": "0.*"} if callback.endswith("Unfreeze") else {}
    given = {"parts": {**unfrozen(), **with_callbacks(u=(callback, options))}, "freeze": ["*", "!2.*"]}
    given |= {"fault": [f"nan,step={bad}"], "checkpoint_every_epochs": 0}
    rolled = train(on_nonfinite="rollback", **given)
    assert same(rolled.last, train(on_nonfinite="skip", **given).last)


class ThawAgain(Thaw):
    """Unfreezes after the first step, once the run has gone back to it."""

    runs = 0

    def on_step(self, run: Any) -> None:
        self.runs += run.step == 1
        if run.step == 1 and self.runs == 2:
            run.unfreeze(["0.*"])


@pytest.mark.medium
def test_two_rollbacks_lose_nothing_of_the_epoch_means(train, net):
    given = {"parts": {**unfrozen(), **with_callbacks(u=(f"{HERE}.ThawAgain", {}))}, "freeze": ["*", "!2.*"]}
    given["parts"]["optimizer"] = {"lr": 0.0}  # the losses are the same, whatever is frozen
    given |= {"fault": ["nan,step=3", "nan,step=4"], "log_every_steps": 2, "epochs": 1}
    skipped, rolled = (train(on_nonfinite=way, **given) for way in ("skip", "rollback"))
    assert rolled.metrics("train_epoch/loss") == skipped.metrics("train_epoch/loss")


class ThawAmidEpoch(Callback):
    """Unfreezes a layer and its BatchNorm amid the second epoch."""

    def on_step(self, run: Any) -> None:
        if run.step == 6:
            run.unfreeze(["0.*", "1.*"])


@pytest.mark.medium
def test_layers_that_are_unfrozen_amid_an_epoch_change_mode_at_once_as_in_a_resumed_run(train, net):
    given = {"parts": {**unfrozen(), **with_callbacks(u=(f"{HERE}.ThawAmidEpoch", {}))}, "freeze": ["*", "!2.*"]}
    given["checkpoint_every_steps"] = 1
    whole = train(**given)
    paths = dict(zip(whole.steps_saved, map(path_of, whole.saved), strict=True))
    means = {step: read(path)["model"]["1.running_mean"] for step, path in paths.items()}
    # It is called after the step: the next one is the first that counts.
    assert [torch.equal(means[step], means[step + 1]) for step in (4, 5, 6, 7)] == [True, True, False, False]
    for step in (5, 6, 7):
        assert same(train(resume=paths[step], **given).last, whole.last)


def path_of(record: Any) -> Path:
    return Path(record.data.source)


@pytest.mark.medium
def test_what_can_not_be_unfrozen_is_said(train, net):
    with pytest.raises(ConfigError, match=r"unfreeze\(.* fits no frozen parameter; nothing is frozen"):
        train(parts=unfrozen(), epochs=3)
    torchs = {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2}}
    with pytest.raises(ConfigError, match="can't be unfrozen with StepLR"):
        train(parts={**unfrozen(), **torchs}, epochs=3, freeze=["*", "!2.*"])


def test_a_frozen_part_stays_so_at_the_end_of_the_run():
    callback = Unfreeze(1)
    callback.on_validation(type("run", (), {"epoch": 1, "step": 8, "total_steps": 8})())
    assert callback.state_dict() == {"due": True, "done": False}


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


# -- by the clock ----------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_records_may_come_by_time_alone(train):
    every = train(log_every_steps=0, log_every_s=1e-9)
    assert [step for step, _ in every.metrics("train/loss")] == list(range(1, 9))
    rare = train(log_every_steps=0, log_every_s=1e9)
    assert [step for step, _ in rare.metrics("train/loss")] == [4, 8]  # before each checkpoint
    assert same(every.last, rare.last)


class Impostor(Callback):
    def on_step(self, run: Any) -> None:
        run.log({"val/loss": 1.0})


def test_names_of_the_run_and_of_a_validation_to_come_are_taken(train):
    runs: list[Any] = []
    with pytest.raises(ConfigError, match=r"'val/loss' is a name of the run's own.*'my/loss'"):
        train(parts=with_callbacks(it=(f"{HERE}.Impostor", {})), into=runs)
    assert not runs[0].metrics("val/loss")
    assert not runs[0].metrics("train/loss")


class Reporter(Callback):
    def on_validation(self, run: Any) -> None:
        run.log({"val/précision": 0.5})


def test_a_callback_logs_beside_the_metrics_of_a_validation(train):
    run = train(parts=with_callbacks(it=(f"{HERE}.Reporter", {})))
    assert [value for _, value in run.metrics("val/précision")] == [0.5] * len(run.metrics("val/loss"))


class Talkative(nn.Linear):
    """Logs a number of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(4, 3)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results.log({self.name: 1.0}, step=1)
        return super().forward(x)


@pytest.mark.parametrize("name", ["val/loss", "train_epoch/loss", "data/retries", "lr", "grad_norm"])
def test_a_model_does_not_take_the_names_of_the_run_either(train, name):
    model = {"_target_": f"{HERE}.Talkative", "name": name}
    own = name.rpartition("/")[2]
    with pytest.raises(ConfigError, match=rf"results\.log.*'{name}' is a name of the run's own.*'my/{own}'"):
        train(whole={"model": model})


def test_a_model_logs_under_names_of_its_own(train):
    run = train(whole={"model": {"_target_": f"{HERE}.Talkative", "name": "my/loss"}}, epochs=1)
    assert run.metrics("my/loss")[0] == (1, 1.0)
    results.connect(DirectSender(run.records.append, run.folder))
    results.log({"val/loss": 2.0}, step=9)  # a function that is no job
    assert (9, 2.0) in run.metrics("val/loss")


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
