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
