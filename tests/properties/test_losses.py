"""Any split of the same samples into ranks and micro-batches has the gradient and the loss of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Classification, LanguageModel, ModelLoss, Regression, Segmentation, Step, Task
from ddp_hydra.tasks.counting import Counting
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training.metrics import Meter, count
from ddp_hydra.training.train_step import TrainStep, as_step
from ddp_hydra.training.update import Weighing

pytestmark = pytest.mark.medium

SAMPLES, CLASSES, TIME = 36, 3, 4
SPLITS = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.integers(1, 4))
WEIGHT = torch.tensor([1.0, 9.0, 0.0]).double()
POSITIVE = torch.tensor([1.0, 9.0, 0.5]).double()


class Ranks:
    """A world of several ranks whose first micro-batches are known."""

    def __init__(self, first: Sequence[tuple[float, float]]) -> None:
        self.first, self.size = [list(pair) for pair in first], len(first)

    def gather_objects(self, value: Any) -> list[list[float]]:
        return self.first


def cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {name: part[start:stop] for name, part in batch.items()}
    return batch[start:stop] if isinstance(batch, torch.Tensor) else tuple(part[start:stop] for part in batch)


def split_gradients(task: Task, model: nn.Module, batch: Any, split: tuple[int, int, int]) -> tuple[list, float]:
    """The gradients and the logged loss of steps over all samples, added up."""
    ranks, micro, steps = split
    steps = max(one for one in range(1, steps + 1) if SAMPLES % (ranks * micro * one) == 0)
    size = SAMPLES // (ranks * micro * steps)
    total = [torch.zeros_like(part) for part in model.parameters()]
    meter, weight = Meter(torch.device("cpu")), 0.0
    of_ranks: list[Weighing] = []
    for step in range(steps):
        gradients = [torch.zeros_like(part) for part in model.parameters()]
        pieces = [
            [cut(batch, begin, begin + size) for begin in range(start, start + micro * size, size)]
            for start in range(step * ranks * micro * size, (step + 1) * ranks * micro * size, micro * size)
        ]
        if not of_ranks:
            first = [as_step(task.step(model, one[0])).n for one in pieces]
            consensus: Any = SimpleNamespace(world=Ranks([(size if n is None else n, size) for n in first]))
            of_ranks = [Weighing(micro * size, consensus) for _ in range(ranks)]
        for weighing, own in zip(of_ranks, pieces, strict=True):
            weighing.begin()
            for piece in own:
                result = TrainStep(task, model)(piece)
                meter.add(count(result, size))
                loss = weighing.weigh(result, size)
                for sum_, one in zip(gradients, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                    sum_ += one / ranks
        n = [float(weighing.n) for weighing in of_ranks]
        share = 1.0 if of_ranks[0].summed else sum(n)  # plain torch: Σ n · mean, over all steps
        weight = 1.0 if of_ranks[0].summed else weight + share
        for sum_, one in zip(total, gradients, strict=True):
            sum_ += one * of_ranks[0].factor(n) * share
    return [one / weight for one in total], task.metrics(meter.take())["loss"]


def check(task: Task, model: nn.Module, batch: Any, right: torch.Tensor, split: tuple[int, int, int]) -> None:
    expected = torch.autograd.grad(right, list(model.parameters()))
    found, loss = split_gradients(task, model, batch, split)
    assert loss == pytest.approx(right.item(), rel=1e-9, abs=1e-12)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def labels(*shape: int, ignored: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (SAMPLES, *shape), generator=generator)
    leave_out = torch.rand(y.shape, generator=generator) < torch.linspace(0, 1, SAMPLES).view(-1, *[1] * len(shape))
    return y.where(~leave_out, ignored)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2)).double()


class Probabilities(nn.Linear):
    def forward(self, x):
        return super().forward(x).sigmoid()


class LogProbabilities(nn.Linear):
    def forward(self, x):
        return super().forward(x).log_softmax(-1)


SHARES = numbers(CLASSES).softmax(-1)
BITS = (numbers(CLASSES) > 0).double()
LABELS = labels()
EACH = LABELS.clamp(min=0)
CRITERIA: dict[str, tuple[Any, torch.Tensor, type[nn.Linear]]] = {}
for reduction in ("mean", "sum"):
    of = {"reduction": reduction}
    CRITERIA |= {
        f"cross-entropy, {reduction}": (nn.CrossEntropyLoss(**of), LABELS, nn.Linear),
        f"weighted, {reduction}": (nn.CrossEntropyLoss(WEIGHT, **of), LABELS, nn.Linear),
        f"weighted, smooth, {reduction}": (nn.CrossEntropyLoss(POSITIVE, label_smoothing=0.1, **of), LABELS, nn.Linear),
        f"a class of weight 0, {reduction}": (nn.CrossEntropyLoss(WEIGHT, **of), LABELS, nn.Linear),
        f"ignore 1, {reduction}": (nn.CrossEntropyLoss(ignore_index=1, **of), EACH, nn.Linear),
        f"shares, {reduction}": (nn.CrossEntropyLoss(POSITIVE, label_smoothing=0.1, **of), SHARES, nn.Linear),
        f"nll, {reduction}": (nn.NLLLoss(WEIGHT, **of), LABELS, LogProbabilities),
        f"partial, {reduction}": (partial(F.cross_entropy, weight=WEIGHT, **of), LABELS, nn.Linear),
        f"bce, {reduction}": (nn.BCELoss(WEIGHT, **of), BITS, Probabilities),
        f"bce logits, {reduction}": (nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT, **of), BITS, nn.Linear),
        f"mse, {reduction}": (nn.MSELoss(**of), numbers(CLASSES), nn.Linear),
        f"l1, {reduction}": (nn.L1Loss(**of), numbers(CLASSES), nn.Linear),
        f"smooth l1, {reduction}": (nn.SmoothL1Loss(**of), numbers(CLASSES), nn.Linear),
        f"huber, {reduction}": (nn.HuberLoss(**of), numbers(CLASSES), nn.Linear),
        f"poisson, {reduction}": (nn.PoissonNLLLoss(**of), SHARES, nn.Linear),
        f"kl, {reduction}": (nn.KLDivLoss(**of), SHARES, LogProbabilities),
        f"soft margin, {reduction}": (nn.SoftMarginLoss(**of), BITS * 2 - 1, nn.Linear),
        f"margin, {reduction}": (nn.MultiMarginLoss(weight=WEIGHT, **of), EACH, nn.Linear),
        f"labels' margin, {reduction}": (nn.MultiLabelSoftMarginLoss(weight=WEIGHT, **of), BITS, nn.Linear),
    }
CRITERIA |= {
    "ours": (CrossEntropy(), LABELS, nn.Linear),
    "ours, weighted": (CrossEntropy(0.1, POSITIVE.tolist()), LABELS, nn.Linear),
    "ours, ignore 1": (CrossEntropy(ignore_index=1), EACH, nn.Linear),
    "ours, shares": (CrossEntropy(0.1, POSITIVE.tolist()), SHARES, nn.Linear),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), SHARES, LogProbabilities),
    "function": (F.mse_loss, numbers(CLASSES), nn.Linear),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", CRITERIA)
@settings(max_examples=8)
@given(split=SPLITS)
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
def test_criteria(name, split):
    criterion, y, kind = CRITERIA[name]
    torch.manual_seed(0)
    model, x = kind(5, CLASSES).double(), numbers(5)
    task = Classification(criterion, class_axis=1 if "ours" not in name else -1)
    assert task.note == ""
    check(task, model, (x, y), criterion(model(x), y), split)


@given(split=SPLITS)
def test_regression(split):
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 2).double(), numbers(5), numbers(2)
    check(Regression(nn.MSELoss()), model, (x, y), F.mse_loss(model(x), y), split)
    check(Regression(nn.MSELoss(reduction="sum")), model, (x, y), F.mse_loss(model(x), y, reduction="sum"), split)


@given(split=SPLITS, ignore=st.sampled_from([None, 0]))
def test_language_model(split, ignore):
    torch.manual_seed(0)
    model = nn.Embedding(CLASSES, CLASSES).double()
    x, y = labels(TIME).clamp(min=0), labels(TIME, ignored=-100 if ignore is None else ignore)
    right = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100 if ignore is None else ignore)
    check(LanguageModel(ignore), model, (x, y), right, split)


@given(split=SPLITS, ignore=st.sampled_from([None, 255]))
def test_segmentation(split, ignore):
    torch.manual_seed(0)
    model, x, y = nn.Conv2d(1, CLASSES, 1).double(), numbers(1, 3, 3), labels(3, 3, ignored=ignore or -100)
    check(Segmentation(ignore=ignore), model, (x, y), F.cross_entropy(model(x), y, ignore_index=ignore or -100), split)


class OwnLoss(nn.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.scores, self.shift = nn.Embedding(CLASSES, CLASSES), shift

    def forward(self, input_ids, labels):
        logits = self.scores(input_ids)
        scores = logits[:, : logits.shape[1] - self.shift].flatten(0, 1)
        return {"loss": F.cross_entropy(scores, labels[:, self.shift :].flatten()), "logits": logits}


@given(split=SPLITS, shift=st.sampled_from([0, 1]), is_told=st.booleans())
def test_a_model_with_its_own_loss(split, shift, is_told):
    torch.manual_seed(0)
    model, y = OwnLoss(shift).double(), labels(TIME)
    y[0] = torch.tensor([0, 1, 2, 0])  # the first batches tell
    y[0, 1] = -100
    batch = {"input_ids": labels(TIME).clamp(min=0), "labels": y}
    check(ModelLoss(shift=bool(shift) if is_told else None), model, batch, model(**batch)["loss"], split)


class Weighted(Task):
    """Of a user: each sample has its weight; some have none."""

    def step(self, model, batch):
        x, weights = batch
        errors = model(x).squeeze(-1).square()
        n = weights.sum()
        return Step((errors * weights).sum() / n, n, {"large": ((errors > 1).sum(), len(x))})


class Summed(Task):
    def step(self, model, batch):
        return Step(model(batch[0]).square().sum(), summed=True)


@given(split=SPLITS)
def test_tasks_of_users(split):
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1).double(), numbers(5)
    weights = torch.arange(SAMPLES).double().sub(4).clamp(min=0)
    check(Weighted(), model, (x, weights), (model(x).squeeze(-1).square() * weights).sum() / weights.sum(), split)
    check(Summed(), model, (x,), model(x).square().sum(), split)


class Focal(nn.Module):
    def forward(self, prediction, target):
        return F.cross_entropy(prediction, target).square()


class Told(Focal):
    def n(self, prediction, target):
        return (target >= 0).sum()


def test_a_criterion_that_says_nothing_is_weighed_by_samples_and_noted():
    assert "Focal by samples" in Classification(Focal()).note
    assert Classification(Told()).note == ""
    assert Counting(Told()).n(None, torch.tensor([1, -100])) == 1

    class Changed(nn.CrossEntropyLoss):
        def forward(self, prediction, target):
            return super().forward(prediction, target).square()

    assert "Changed by samples" in Classification(Changed()).note


def test_smoothing_over_a_class_of_weight_0_is_refused():
    with pytest.raises(ConfigError, match="give label_smoothing=0"):
        Classification(nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1))
    Classification(nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, reduction="sum"))


def test_a_criterion_without_reduction_is_refused():
    with pytest.raises(ConfigError, match="give mean or sum"):
        Classification(nn.CrossEntropyLoss(reduction="none"))
