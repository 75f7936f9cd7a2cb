from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.training.parallel.weights import Ema


def test_the_average_by_hand():
    model = nn.BatchNorm1d(1)
    ema = Ema(model, decay=0.5)
    expected = None
    for step, value in enumerate([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0]):
        with torch.no_grad():
            model.weight.fill_(value)
            model.num_batches_tracked.fill_(step)
        ema.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = value if expected is None else decay * expected + (1 - decay) * value
        assert ema.model.weight.item() == pytest.approx(expected)
        assert ema.model.num_batches_tracked.item() == step
    assert not ema.model.weight.requires_grad


def test_it_goes_on_where_it_was():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = Ema(model, 0.9), Ema(other, 0.9)
    for _ in range(3):
        first.update(model)
    second.load_state_dict(first.state_dict())
    for ema in (first, second):
        ema.update(other)
    assert torch.equal(first.model.weight, second.model.weight)
    assert first.state_dict()["steps"] == 4
