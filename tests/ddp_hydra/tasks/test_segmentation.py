from __future__ import annotations

import pytest
import torch

from ddp_hydra.tasks import Segmentation
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.train_step import as_step
from ddp_hydra.training.weighing import Weighing


def test_a_batch_without_a_pixel_that_counts_counts_nothing_and_breaks_nothing():
    model = torch.nn.Conv2d(1, 3, 1)
    step = as_step(Segmentation(ignore=255).step(model, (torch.rand(2, 1, 4, 4), torch.full((2, 4, 4), 255))))
    assert (int(step.n), step.loss.item()) == (0, 0.0)
    Weighing(2, StepConsensus()).weigh(step, 2).backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(("n_classes", "dtype"), [(256, torch.uint8), (257, torch.int32)])
def test_each_class_has_its_number(n_classes, dtype):
    logits = torch.zeros(1, n_classes, 2, 2)
    logits[:, -1] = 1
    found = Segmentation().predict(lambda x: logits, None)
    assert (found.dtype, found.unique().tolist()) == (dtype, [n_classes - 1])
