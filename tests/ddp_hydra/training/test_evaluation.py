from __future__ import annotations

import pytest
import torch

from ddp_hydra.tasks import LanguageModel, Step
from ddp_hydra.training.evaluation import EvalMetrics


@pytest.mark.medium
def test_perplexity_is_that_of_all_places_whatever_the_batches():
    text = pytest.importorskip("torchmetrics.text")
    torch.manual_seed(0)
    logits, target = torch.randn(7, 5, 4), torch.randint(4, (7, 5))
    scores = EvalMetrics({"perplexity": text.Perplexity()})
    for part, goal in zip(logits.split(3), target.split(3), strict=True):
        scores.add(LanguageModel(), Step(torch.zeros(()), prediction=part, target=goal))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert scores.result() == {"val/perplexity": pytest.approx(loss.exp().item())}
    scores.add(LanguageModel(), Step(torch.zeros(()), prediction=torch.zeros(1, 2, 4), target=target[:1, :2]))  # anew
    assert scores.result() == {"val/perplexity": pytest.approx(4)}
