from __future__ import annotations

import pytest
import torch

from ddp_hydra.tasks import Classification, LanguageModel, Step
from ddp_hydra.tasks.losses import CrossEntropy
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


@pytest.mark.parametrize("task", [LanguageModel(), Classification(CrossEntropy())], ids=["tokens", "classes"])
def test_perplexity_leaves_out_the_targets_that_the_loss_leaves_out(task):
    text = pytest.importorskip("torchmetrics.text")
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 120), torch.randint(120, (3, 5))  # of so many that -100 would be one of them
    target[0, :2], target[1] = -100, -100
    scores = EvalMetrics({"perplexity": text.Perplexity()})
    for row, goal in zip(logits.split(1), target.split(1), strict=True):
        scores.add(task, task.validation_step(lambda _, row=row: row, (row, goal)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert scores.result() == {"val/perplexity": pytest.approx(loss.exp().item())}


class Computes:
    """Stands for a metric of torchmetrics."""

    def __init__(self, value):
        self.value = value

    def compute(self):
        return self.value

    def reset(self):
        pass


def test_a_metric_may_be_several():
    metric = Computes({"map": torch.tensor(0.5), "of": torch.tensor([1, 2]), "n": 3, "all": torch.eye(2)})
    scores = EvalMetrics({"m": metric}, classes=["cat", "dog"])
    assert scores.result() == {"val/m/map": 0.5, "val/m/of/cat": 1, "val/m/of/dog": 2, "val/m/n": 3}
    assert list(scores.matrices) == ["val/m/all"]
