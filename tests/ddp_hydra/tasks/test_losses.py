from __future__ import annotations

import pytest
import torch

from ddp_hydra.tasks.losses import CrossEntropy


def test_shares_of_one_class_are_that_class():
    logits, target = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    shares = torch.nn.functional.one_hot(target, 3).float()
    assert CrossEntropy()(logits, shares).item() == pytest.approx(CrossEntropy()(logits, target).item())


def test_shares_over_time():
    logits, shares = torch.randn(2, 4, 3), torch.rand(2, 4, 3).softmax(-1)
    by_hand = -(logits.log_softmax(-1) * shares).sum(-1).mean()
    assert CrossEntropy()(logits, shares).item() == pytest.approx(by_hand.item())


def test_smoothing_by_hand_and_not_in_validation():
    logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    smooth = CrossEntropy(label_smoothing=0.2)
    chances = logits.log_softmax(-1)[0]
    assert smooth(logits, target).item() == pytest.approx(-(0.9 * chances[0] + 0.1 * chances[1]).item())
    assert smooth.for_validation(logits, target).item() == pytest.approx(-chances[0].item())
