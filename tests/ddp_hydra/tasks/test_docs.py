"""The task of docs/tasks.md, as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.ddp_hydra.training.conftest import group as group
from tests.ddp_hydra.training.conftest import train as train

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()


@pytest.fixture
def quantiles(monkeypatch):
    source = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Quantiles" in code)
    assert len(source.splitlines()) <= 25
    module = types.ModuleType("quantiles_of_the_docs")
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Numbers:
    """A number, and another that hangs on it."""

    def __init__(self, n: int) -> None:
        self.x = torch.linspace(-1, 1, n)[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], 2 * self.x[index, 0]


def test_a_task_of_ones_own_trains_and_counts(train, quantiles):
    task = {"_target_": "quantiles_of_the_docs.Quantiles", "metric": "loss", "direction": "minimize"}
    parts = {"task": task, "model": {"in_features": 1}, "objective": {"metric": "val/loss", "direction": "minimize"}}
    run = train(data=Numbers, parts=parts, epochs=5)
    losses = [value for _, value in run.metrics("val/loss")]
    assert losses[-1] < losses[0]
    assert [step for step, _ in run.metrics("val/inside")] == [4, 8, 12, 16, 20]
    found = quantiles.Quantiles().predict(torch.nn.Linear(1, 3), (torch.zeros(7, 1), torch.zeros(7)))
    assert {name: tuple(part.shape) for name, part in found.items()} == dict.fromkeys(("low", "middle", "high"), (7,))
