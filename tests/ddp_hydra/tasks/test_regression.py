from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.tasks import Regression


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_precision_of_the_model_does_not_round_the_targets(dtype):
    y = torch.tensor([1000.3, 0.1])
    step = Regression(nn.MSELoss()).step(lambda x: x.to(dtype), (torch.tensor([1000.0, 0.0]), y))
    assert torch.equal(step.target, y)
    assert step.loss.item() == pytest.approx((0.3**2 + 0.1**2) / 2, rel=1e-3)


class Known(nn.Module):
    """The mean squared error of the targets that are known."""

    def forward(self, prediction, target):
        return (prediction - target)[~target.isnan()].square().mean()


def test_the_metrics_leave_out_targets_that_are_not_known():
    y = torch.tensor([[1.0, torch.nan], [2.0, 3.0], [torch.nan, 5.0], [4.0, torch.nan]])
    task = Regression(Known())
    step = task.step(lambda x: x, (torch.zeros(4, 2), y))
    sums = {name: torch.as_tensor(part).double() for name, part in step.sums.items()}
    found = task.metrics(sums)
    assert found["mae"] == pytest.approx(((1 + 2 + 4) / 3 + (3 + 5) / 2) / 2)
    r2 = [1 - (1 + 4 + 16) / (14 / 3), 1 - (9 + 25) / 2]
    assert found["r2"] == pytest.approx(sum(r2) / 2)


def test_an_output_without_a_target_has_no_metrics():
    y = torch.tensor([[1.0, torch.nan], [2.0, torch.nan]])
    task = Regression(Known())
    step = task.step(lambda x: x, (torch.zeros(2, 2), y))
    sums = {name: torch.as_tensor(part).double() for name, part in step.sums.items()}
    assert task.metrics(sums)["mae"] == 1.5
    assert task.metrics({name: torch.zeros_like(part) for name, part in sums.items()}) == {}
