"""What the tasks take of models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Classification, LanguageModel, Regression, Segmentation
from ddp_hydra.tasks.losses import CrossEntropy


@pytest.mark.parametrize(
    ("task", "batch"),
    [
        (Classification(CrossEntropy()), (torch.ones(2, 4), torch.tensor([0, 1]))),
        (Regression(nn.MSELoss()), (torch.ones(2, 4), torch.ones(2))),
        (Segmentation(), (torch.ones(2, 3, 4, 4), torch.zeros(2, 4, 4))),
        (LanguageModel(), torch.ones(2, 5, dtype=torch.long)),
    ],
    ids=["classes", "numbers", "masks", "tokens"],
)
@pytest.mark.parametrize(
    ("output", "kind"), [({"out": torch.ones(2, 3)}, "dict of out"), ((torch.ones(2), 3), "tuple of 2 parts")]
)
def test_a_model_that_returns_no_tensor_is_told(task, batch, output, kind):
    for call in (task.step, task.validation_step, task.predict):
        with pytest.raises(ConfigError, match=rf"the model returned a {kind}.*: let its forward return the tensor"):
            call(lambda _: output, batch)
