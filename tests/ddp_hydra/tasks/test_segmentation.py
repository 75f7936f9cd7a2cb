from __future__ import annotations

import torch

from ddp_hydra.tasks import Segmentation


def test_a_batch_without_a_pixel_that_counts_counts_nothing_and_breaks_nothing():
    model = torch.nn.Conv2d(1, 3, 1)
    step = Segmentation(ignore=255).step(model, (torch.rand(2, 1, 4, 4), torch.full((2, 4, 4), 255)))
    step.loss.backward()
    assert (int(step.n), step.loss.item()) == (0, 0.0)
    assert all(not parameter.grad.any() for parameter in model.parameters())
