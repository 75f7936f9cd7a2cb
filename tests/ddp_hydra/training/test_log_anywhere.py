"""`ddp_hydra.log` in a model, a loss, a data set and a callback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_hydra
from ddp_hydra import results
from ddp_hydra.data.workers.loader import InWorkers
from ddp_hydra.data.workers.worker import Result
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.training.callbacks import Callback
from tests.ddp_hydra.training.loop_runs import STEPS, Numbers

HERE = "tests.ddp_hydra.training.test_log_anywhere"


class Model(nn.Module):
    """Logs the mean of its input."""

    def __init__(self, name: str = "inputs") -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(4, 3), name

    def forward(self, x: Any) -> Any:
        ddp_hydra.log(**{self.name: x.mean(), "half": 0.5})
        return self.layer(x)


class Loss(nn.CrossEntropyLoss):
    def forward(self, prediction: Any, target: Any) -> Any:
        ddp_hydra.log(**{"loss/largest": prediction.max()})
        return super().forward(prediction, target)


class Logged(Numbers):
    def __getitem__(self, index: int) -> Any:
        ddp_hydra.log(index=index)
        return super().__getitem__(index)


class Watch(Callback):
    def on_step(self, run: Any) -> None:
        ddp_hydra.log(watched=run.step)


def means(run: Any, name: str) -> list[float]:
    return [value for _, value in run.metrics(name)]


@pytest.mark.parametrize("recomputed", [[], ["Linear"]], ids=str)
def test_model_loss_data_and_callback_log_means(train, recomputed):
    run = train(
        parts={"callbacks": {"watch": {"_target_": f"{HERE}.Watch"}}, "objective": {"metric": "val/inputs"}},
        whole={"model": {"_target_": f"{HERE}.Model"}, "loss": {"_target_": f"{HERE}.Loss"}},
        data=Logged, log_every_steps=1, activation_checkpointing=recomputed,
    )  # fmt: skip
    batches = [float(batch.mean()) for batch in Numbers(5).x.split(2)]
    assert means(run, "val/inputs") == pytest.approx([sum(batches) / len(batches)] * 2)  # each call counts once
    assert set(means(run, "train/half")) == set(means(run, "val/half")) == {0.5}
    epochs = [sum(means(run, "train/inputs")[first : first + STEPS]) / STEPS for first in (0, STEPS)]
    assert means(run, "train_epoch/inputs") == pytest.approx(epochs)
    assert len(means(run, "train/loss/largest")) == 2 * STEPS
    assert all(0 <= value < 9 for value in means(run, "train/index"))
    assert means(run, "watched") == list(range(1, 2 * STEPS + 1))
    assert run.value["metrics"]["val/half"] == 0.5


def test_the_first_interval_of_a_run_has_nothing_of_before(train):
    Model()(torch.full((1, 4), 1e9))
    run = train(whole={"model": {"_target_": f"{HERE}.Model"}})
    assert max(means(run, "train/inputs")) < 1e3


def test_names_of_the_task_and_what_is_no_number_are_refused(train):
    with pytest.raises(ConfigError, match=r"ddp_hydra\.log\(accuracy=…\): the task has a metric of this name"):
        train(whole={"model": {"_target_": f"{HERE}.Model", "name": "accuracy"}})
    for wrong in ("many", torch.ones(2)):
        with pytest.raises(RecordError, match=r"metric 'x' is .*; give a number"):
            ddp_hydra.log(x=wrong)
    with pytest.raises(RecordError, match=r"ddp_hydra\.log\(\{'x': 1\}\): give a name, ddp_hydra\.log\(name=value\)"):
        ddp_hydra.log({"x": 1})


def test_what_a_worker_of_data_has_logged_comes_back_with_its_batch():
    results.take_means()
    data = InWorkers.__new__(InWorkers)
    data._stats, data._bad, data._bad_counts, data._errors = {}, {}, {}, {}
    for value in (1.0, 3.0):
        data.hear(Result(None, report={"logged": {"width": (value, 1)}}))
    assert results.take_means() == {"width": (4.0, 2)}
