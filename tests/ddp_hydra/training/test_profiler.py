"""What `debug=profile`, `debug=anomaly` and a full memory say of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import ddp_hydra.training.loop as loop
from ddp_hydra import results
from ddp_hydra.config.schema import resolved
from ddp_hydra.data.loader import MicroBatch
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.errors import ConfigError, NonFiniteLoss, OutOfMemory
from ddp_hydra.rank.world import ALONE
from ddp_hydra.tasks import Classification, Task
from ddp_hydra.training.monitor import Monitor
from ddp_hydra.training.profiler import Profiler
from tests.ddp_hydra.training.loop_runs import STEPS, config

HERE = "tests.ddp_hydra.training.test_profiler"


@pytest.fixture
def job(group, tmp_path) -> Callable[..., dict[str, Any]]:
    """Train a model of this module, as a rank does; returns what that returns."""

    def run(model: str, **trainer: Any) -> dict[str, Any]:
        data = {"train": {"_target_": "tests.ddp_hydra.training.loop_runs.Numbers", "n": 9}, "val": None}
        changes = {"faults": [], "data": data, "model": {"_target_": f"{HERE}.{model}"}, "objective": {"metric": None}}
        results.connect(DirectSender(lambda record: None, tmp_path))
        return loop.train(ALONE, resolved(OmegaConf.merge(config(**trainer), changes)))

    return run


# -- memory ------------------------------------------------------------------------------------------------


class Hungry(nn.Linear):
    """Wants all memory in its second step."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 2:
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(x)


def test_a_memory_that_is_full_amid_a_run_is_told_with_the_step_the_sizes_and_what_to_type(job):
    said = (
        r"no memory left on cpu in step 2, phase forward: at most \d+\.\d\d of \d+\.\d GiB were taken, "
        r"0\.00 GiB for the weights.*\. Type data\.batch_size=1 "
        r"trainer\.gradient_accumulation_steps=2 \(the same steps\), or trainer\.precision=bf16\. torch said: "
    )
    with pytest.raises(OutOfMemory, match=said):
        job("Hungry")


# -- gradients that are not numbers -------------------------------------------------------------------------


class Rooted(nn.Linear):
    """Its loss is a number, and its gradient is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * (0 * self.weight).sqrt().sum()


def test_anomaly_names_the_operation_and_where_it_was_called(job):
    with (
        pytest.warns(UserWarning, match=r"(?s)Error detected in SqrtBackward0.*in forward\n.*\.sqrt\(\)\.sum\(\)"),
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"),
    ):
        job("Rooted", detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


def test_without_it_the_gradient_tells_and_advises_it(job):
    with pytest.raises(NonFiniteLoss, match=r"the gradient of weight is not finite in step 1.*debug=anomaly"):
        job("Rooted")


# -- the profile -------------------------------------------------------------------------------------------


class Sleepy(torch.optim.SGD):
    """Takes 20 ms."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step(closure)


class Deep(torch.nn.Sequential):
    """Has parts."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(torch.nn.Linear(in_features, 50_000), torch.nn.Linear(50_000, out_features))


@pytest.mark.medium
def test_a_profile_has_the_operations_of_each_part(train):
    run = train(profile_steps=2, parts={"model": {"_target_": f"{HERE}.Deep"}})
    (table,) = run.texts
    parts = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[-2:]]
    assert parts == [["0", "Linear", "250,000", "0.4"], ["1", "Linear", "150,003", "0.3"]]


@pytest.mark.medium
def test_the_last_step_of_a_profile_counts_as_the_others_do(train):
    run = train(profile_steps=4, parts={"optimizer": {"_target_": f"{HERE}.Sleepy"}})
    (table,) = run.texts
    rows = {row.split("|")[1].strip(): row.split("|")[2] for row in table.splitlines() if row.startswith("| ")}
    assert float(rows["optimizer"]) >= 20
    assert float(rows["all"]) >= float(rows["optimizer"])


def test_a_run_too_short_for_its_profile_is_refused_with_what_to_type(train):
    with pytest.raises(ConfigError, match=r"profile_steps=2 takes 5 steps.*this run has 4: give trainer\.max_steps=5"):
        train(epochs=1, profile_steps=2)


def test_samples_and_tokens_of_each_micro_batch_are_counted():
    loader = SimpleNamespace(device=torch.device("cpu"), waited_s=0.0)
    profiler = Profiler(0, nn.Linear(1, 1), loader.device, config().trainer, 2)
    profiler.trace = "under way"
    monitor = Monitor(SimpleNamespace(world=ALONE), Classification(nn.MSELoss()), loader, [], profiler, 0, None)
    for size in (3, 2):
        monitor.count(MicroBatch(torch.zeros(size, 7, dtype=torch.long), size, size == 2))
    assert (profiler.samples, monitor.tokens) == (5, 35)


class Repeats(Task):
    """Updates a part of the model twice in a step."""

    def updates(self, step: int) -> list[str] | str:
        return ["0", "0", "1"] if step % 2 else "1"

    def step(self, model: Any, batch: Any, update: str = "") -> torch.Tensor:
        return model(batch[0]).mean()


class Tokens:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(7), torch.tensor(0)


def of_parts() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 2), nn.Linear(2, 2))


def test_tokens_of_a_run_count_once_whatever_the_updates_of_a_step(train, monkeypatch):
    counted: list[int] = []
    monkeypatch.setattr("ddp_hydra.training.monitor.n_tokens", lambda batch: counted.append(batch[0].numel()) or 0)
    whole = {"model": {"_target_": f"{HERE}.of_parts"}, "task": {"_target_": f"{HERE}.Repeats"}}
    whole["objective"] = {"metric": "train/1/loss", "direction": "minimize"}
    whole["parallel"] = {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"}
    train(whole=whole, data=Tokens, val=0, epochs=1)
    assert counted == [14] * STEPS


# -- who is slow -------------------------------------------------------------------------------------------


def test_a_rank_that_is_alone_is_not_slow(train):
    run = train(epochs=1)
    assert run.value["slowest"] == {}
    assert run.metrics("slowest_rank") == []
