"""The metrics that callbacks log and read, on one rank in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra import results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training.callbacks import Callback
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import (
    FALLING,
    STEPS,
    Run,
    check_resume,
    repeated,
    same,
    with_callbacks,
)

HERE = "tests.ddp_hydra.training.test_callback_metrics"


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
