"""The loop's way through steps, epochs and checkpoints, and what it says of itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from ddp_hydra import heartbeat
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.tasks import Classification
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.seeds import seed_step
from tests.ddp_hydra.training.loop_runs import BY_LOSS, RISING, STEPS, Numbers, Run, flat, same, weights

# -- from end to end ---------------------------------------------------------------------------------------


def test_a_run_of_two_epochs_logs_validates_and_saves(train):
    run = train()
    assert (run.value["steps"], run.value["samples"], run.value["interrupted"]) == (8, 16, "")
    assert [step for step, _ in run.metrics("train/loss")] == [3, 4, 6, 8]
    assert [step for step, _ in run.metrics("val/loss")] == [4, 8]
    epochs = {record.step: record.data.epoch for record in run.records if record.kind == "metrics"}
    assert epochs == {3: 1, 4: 1, 6: 2, 8: 2}
    assert run.steps_saved == [4, 8]
    assert run.value["metrics"].keys() >= {"train/loss", "val/accuracy", "lr"}
    content = read(run.last)
    assert content["position"] == {"step": 8, "epoch": 2, "samples": 16, "offset": 0}
    assert content["validation_due"] is False
    assert run.value["peak_memory"] > 2**25


@pytest.mark.medium
@pytest.mark.parametrize("epochs", [None, 99])
def test_a_run_may_end_in_the_middle_of_an_epoch(epochs, train):
    run = train(epochs=epochs, max_steps=6)
    assert (run.value["steps"], run.steps_saved) == (6, [4, 6])
    assert [step for step, _ in run.metrics("val/loss")] == [4, 6]
    assert read(run.last)["position"] == {"step": 6, "epoch": 1, "samples": 12, "offset": 4}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("by_steps", "by_epochs", "saved"),
    [(0, 0, [12]), (0, 2, [8, 12]), (3, 0, [3, 6, 9, 12]), (4, 0, [4, 8, 12]), (2, 1, [2, 4, 6, 8, 10, 12])],
)
def test_checkpoints_come_when_they_are_due_also_at_the_end_of_an_epoch(by_steps, by_epochs, saved, train):
    run = train(epochs=3, checkpoint_every_steps=by_steps, checkpoint_every_epochs=by_epochs)
    assert run.steps_saved == saved


@pytest.mark.medium
def test_only_a_checkpoint_whose_weights_were_just_validated_can_be_the_best(train):
    run = train(epochs=6, validate_every_epochs=2, checkpoint_every_epochs=3, parts=RISING)
    assert run.bests == [(12, False), (24, True)]
    assert read(run.last)["best"] == dict(run.metrics("val/loss"))[24]


def test_a_rollback_remembers_the_best_value_of_its_checkpoint(train):
    falling = {"objective": {"metric": "val/loss", "direction": "minimize"}}  # so the first stays the best
    run = train(epochs=3, fault=["nan,step=6"], on_nonfinite="rollback", parts=falling)
    assert run.bests == [(4, True), (8, False), (12, False)]
    assert read(run.last)["best"] == dict(run.metrics("val/loss"))[4]


class OwnNames(Classification):
    """Its metrics may have other names with more samples."""

    def metrics(self, sums):
        return super().metrics(sums)


@pytest.mark.medium
@pytest.mark.parametrize(("metric", "val"), [("val/acc", 5), ("train/acc", 0)])
def test_an_unknown_objective_is_said_at_the_first_validation_and_nothing_is_lost(metric, val, train):
    options = {"val": val, "checkpoint_every_epochs": 0, "early_stopping_patience": 9}
    found, task = [], {"task": {"_target_": f"{__name__}.OwnNames"}}
    said = rf"objective.metric={metric}: .*there are train/accuracy, train/loss.*The run is saved.*={metric}uracy"
    with pytest.raises(ConfigError, match=said):
        train(parts={"objective": {"metric": metric}, **task}, into=found, **options)
    assert found[0].steps_saved == [STEPS]
    again = train(resume=found[0].last, parts={"objective": {"metric": f"{metric}uracy"}, **task}, **options)
    assert [step for step, _ in again.metrics("val/loss")] == ([4, 8] if val else [])
    assert again.value["steps"] == 2 * STEPS


class Line(Numbers):
    """What is to be learnt is a number."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.y = self.x.sum(1, keepdim=True) / 9


def test_a_regression_has_no_accuracy_and_its_best_is_that_of_the_least_loss(train):
    parts = {
        "model": {"out_features": 1}, "loss": {"_target_": "torch.nn.MSELoss"},
        "objective": {"metric": "val/loss", "direction": "minimize"},
    }  # fmt: skip
    run = train(data=Line, parts=parts, epochs=4, early_stopping_patience=2)
    assert not [name for name in run.value["metrics"] if "accuracy" in name]
    losses = [loss for _, loss in run.metrics("val/loss")]
    assert losses == sorted(losses, reverse=True)
    assert [record.data.checkpoint.best for record in run.saved] == [True] * 4


# -- pauses ------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("val", [5, 0], ids=["validated", "no validation set"])
@pytest.mark.parametrize("settings", [{}, {"checkpoint_every_epochs": 0, "ema_decay": 0.9, "epochs": 3}], ids=str)
def test_a_run_pauses_after_a_validation_with_one_checkpoint_and_goes_on_to_the_same_end(settings, val, train):
    given = {"val": val, **settings} | ({} if val else {"parts": {"objective": {"metric": "train/loss"}}})
    whole = train(**given)
    paused = train(pause_after_validations=1, **given)
    assert (paused.value["interrupted"], paused.value["steps"], paused.steps_saved) == ("pause", STEPS, [STEPS])
    assert [step for step, _ in paused.metrics("val/loss")] == ([STEPS] if val else [])
    resumed = train(resume=paused.last, **given)
    assert resumed.value["interrupted"] == ""
    ends = [flat(read(run.last)) | {"best": None} for run in (resumed, whole)]  # the best of those that were saved
    assert ends[0] == ends[1]
    assert paused.metrics("lr") + resumed.metrics("lr") == whole.metrics("lr")
    assert "changed" not in str(resumed.header)


@pytest.mark.medium
def test_validations_are_counted_over_the_whole_run(train):
    first = train(epochs=5, pause_after_validations=1)
    second = train(epochs=5, pause_after_validations=3, resume=first.last)
    assert (second.value["interrupted"], second.steps_saved) == ("pause", [2 * STEPS, 3 * STEPS])
    assert read(second.last)["validations"] == 3
    again = train(epochs=5, pause_after_validations=3, resume=second.last)
    assert (again.value["interrupted"], again.value["steps"], again.steps_saved) == ("pause", 3 * STEPS, [])
    assert same(train(epochs=5, resume=second.last).last, train(epochs=5).last)


def test_a_validation_that_was_stopped_does_not_count_for_a_pause(train):
    stopped = train(stop_at=("validate", STEPS), pause_after_validations=1)
    assert (stopped.value["interrupted"], read(stopped.last)["validations"]) == ("interrupt", 0)
    resumed = train(resume=stopped.last, pause_after_validations=1)
    assert (resumed.value["interrupted"], resumed.value["steps"], resumed.steps_saved) == ("pause", STEPS, [STEPS])


@pytest.mark.parametrize(
    "more", [{"epochs": 2}, {"epochs": 9, "early_stopping_patience": 1, "early_stopping_min_delta": 9}]
)
def test_a_run_that_is_at_its_end_does_not_pause(more, train):
    run = train(pause_after_validations=2, **more)
    assert (run.value["interrupted"], run.value["steps"]) == ("", 2 * STEPS)


# -- randomness --------------------------------------------------------------------------------------------


class Noisy(torch.nn.Linear):
    """Draws from the global generators of torch, numpy and Python, and remembers what."""

    drawn: ClassVar[list[tuple[float, ...]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return super().forward(x) + sum(self.drawn[-1])


@pytest.mark.medium
def test_a_resumed_run_draws_the_same_from_every_generator(train):
    loss = {"metric": "train/loss", "direction": "minimize"}
    parts = {"model": {"_target_": f"{__name__}.Noisy"}, "objective": loss}
    Noisy.drawn.clear()
    whole = [train(val=0, parts=parts), *Noisy.drawn]
    Noisy.drawn.clear()
    train(resume=train(val=0, parts=parts, stop_at=("update", 3)).last, val=0, parts=parts)
    assert whole[1:] == Noisy.drawn
    assert len({numbers for drawn in Noisy.drawn for numbers in drawn}) == 3 * 8


def test_ranks_draw_different_numbers():
    drawn = set()
    for step, rank in product(range(3), range(4)):
        seed_step(0, step, rank)
        drawn |= {torch.rand(()).item(), np.random.rand(), random.random()}
    assert len(drawn) == 3 * 4 * 3


# -- what it says of itself --------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_profile_is_a_trace_and_a_table(train):
    import gzip
    import json

    run = train(epochs=5, profile_steps=4)
    files = {record.data.path: record for record in run.records if record.kind == "file"}
    with gzip.open(files["profile/rank-0.json.gz"].data.source) as trace:
        events = json.load(trace)["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert {name: spans.count(name) for name in ("forward", "backward", "update")} == {
        "forward": 4, "backward": 4, "update": 4
    }  # fmt: skip
    (table,) = run.texts
    for part in ("| waiting for data |", "| forward pass |", "| optimizer |", "GFLOP a sample", "| all |", "Memory:"):
        assert part in table
    assert "profile/table.md" in files
    assert weights(run).tolist() == weights(train(epochs=5)).tolist()  # looking changes nothing


@pytest.mark.medium
def test_one_batch_can_be_learnt_by_heart(train):
    run = train(epochs=30, overfit_batches=1, val=0, parts=BY_LOSS)
    losses = [loss for _, loss in run.metrics("train/loss")]
    assert losses[-1] < 0.05 < losses[0]


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n, self.places = n, list[tuple[str, int]]()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        heartbeat.on_phase(lambda *place: self.places.append(place))
        return (Numbers(self.n)[index] for index in range(self.n))


def test_a_rank_that_waits_for_what_a_stream_gives_next_is_in_the_loading(train):
    streams = []

    def data(n: int) -> Stream:
        streams.append(Stream(n))
        return streams[0]

    run = train(data=data, val=0, epochs=1, max_steps=9, parts=BY_LOSS)
    assert streams[0].places[-4:] == [("load", 5), ("update", 4), ("log", 4), ("save", 4)]  # there is no fifth batch
    assert run.value["steps"] == 4


class Changing(Numbers):
    """Sets of training (9 samples) and validation (5), which change their lengths in the second epoch."""

    sets: ClassVar[dict[int, Changing]] = {}
    change: ClassVar[dict[int, int]] = {}

    def __init__(self, n: int) -> None:
        super().__init__(n + 2)
        self.n, self.looks = n, 0
        self.sets[n] = self

    def set_epoch(self, epoch: int) -> None:
        self.looks = 0
        for n, one in self.sets.items():
            one.n += self.change.get(n, 0) * (epoch == 1)

    def __len__(self) -> int:
        self.looks += 1
        return self.n


@pytest.mark.parametrize(
    ("n", "change", "when"), [(9, 2, " in epoch 2"), (9, -2, " in epoch 2"), (5, 1, ""), (5, -1, "")]
)
def test_a_length_that_changes_is_told_in_that_epoch(n, change, when, train, monkeypatch, caplog):
    monkeypatch.setattr(Changing, "change", {n: change})
    runs: list[Run] = []
    if change > 0:
        train(data=Changing, epochs=3)
        (said,) = (text for text in caplog.messages if "Changing had" in text)
        assert said.startswith(f"Changing had {n} samples when the run began, and has {n + change}{when}: the run goes")
        return
    with pytest.raises(DataError, match=rf"^Changing had {n} samples .*, and has {n + change}{when}: .* one length"):
        train(data=Changing, into=runs, log_every_steps=1)
    assert runs[0].metrics("train/loss")[-1][0] == (STEPS if n == 9 else 2 * STEPS - 1)


def test_the_length_is_asked_for_once_in_an_epoch(train):
    train(data=Changing, epochs=3)
    assert Changing.sets[9].looks == 1
