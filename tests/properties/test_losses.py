"""The gradient of a step, and the loss, for torch's losses: that of all samples at once, however they are split.

Ranks are played by one process: each weighs its micro-batches, gradients are averaged over the ranks, and the factor
follows, as a step does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Classification, Regression, Segmentation
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training.metrics import Meter, count
from ddp_hydra.training.train_step import as_step
from ddp_hydra.training.weighing import Weighing

SAMPLES, CLASSES, FEATURES = 24, 4, 5
WEIGHT = torch.tensor([1.0, 7.0, 0.25, 3.0], dtype=torch.float64)
SPLITS = [
    [[24]],
    [[5, 7, 12]],
    [[12], [12]],
    [[1, 11], [6, 6]],
    [[4, 4], [8], [2, 2, 4]],
    [[1] * 8, [1] * 8, [1] * 8],
]
"""Sizes of the micro-batches of each rank."""


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=chance(1), dtype=torch.float64)


def picks(*shape: int, ignored: int | None = None, share: float = 0.5) -> Tensor:
    """Class numbers, of which some don't count; the first samples not at all."""
    found = torch.randint(CLASSES, (SAMPLES, *shape), generator=chance(2))
    if ignored is not None:
        found[torch.rand(found.shape, generator=chance(3)) < share] = ignored
        found[:3] = ignored
    return found


def shares(*shape: int) -> Tensor:
    return numbers(*shape, CLASSES).softmax(-1)


def zeros_and_ones(*shape: int) -> Tensor:
    return (numbers(*shape) > 0).double()


@dataclass
class Row:
    """A criterion with targets."""

    criterion: Callable[..., Any]
    target: Tensor
    outputs: tuple[int, ...] = (CLASSES,)
    task: Callable[..., Any] = Classification
    squash: Callable[[Tensor], Tensor] = lambda output: output


def positive(output: Tensor) -> Tensor:
    return output.sigmoid() * 0.9 + 0.05


CE, NLL, BCE = nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss
log_softmax = partial(torch.log_softmax, dim=1)
ROWS = {
    "ours": Row(CrossEntropy(), picks()),
    "ours, weights": Row(CrossEntropy(weight=WEIGHT), picks()),
    "ours, weights as a list, -100": Row(CrossEntropy(weight=WEIGHT.tolist()), picks(ignored=-100)),
    "ours, -100": Row(CrossEntropy(), picks(ignored=-100)),
    "ours, another number": Row(CrossEntropy(ignore_index=2), picks()),
    "ours, over time": Row(CrossEntropy(), picks(3, ignored=-100), (3, CLASSES)),
    "ours, shares": Row(CrossEntropy(), shares()),
    "ours, smoothing": Row(CrossEntropy(label_smoothing=0.1), picks(ignored=-100)),
    "ours, smoothing and weights": Row(CrossEntropy(0.1, WEIGHT), picks(ignored=-100)),
    "cross-entropy": Row(CE(), picks()),
    "cross-entropy, sum": Row(CE(reduction="sum"), picks(ignored=-100)),
    "cross-entropy, weights": Row(CE(weight=WEIGHT), picks(ignored=-100)),
    "cross-entropy, weights, sum": Row(CE(weight=WEIGHT, reduction="sum"), picks()),
    "cross-entropy, ignored": Row(CE(ignore_index=1), picks()),
    "cross-entropy, smoothing": Row(CE(label_smoothing=0.2), picks(ignored=-100)),
    "cross-entropy, smoothing and weights": Row(CE(weight=WEIGHT, label_smoothing=0.2), picks(ignored=-100)),
    "cross-entropy, shares": Row(CE(), shares()),
    "cross-entropy, shares and weights": Row(CE(weight=WEIGHT), shares()),
    "cross-entropy, places": Row(CE(), picks(3, ignored=-100), (CLASSES, 3)),
    "cross-entropy, shares of places": Row(CE(), shares(3).movedim(-1, 1), (CLASSES, 3)),
    "a function": Row(F.cross_entropy, picks(ignored=-100)),
    "a partial": Row(partial(F.cross_entropy, weight=WEIGHT, ignore_index=0), picks()),
    "nll": Row(NLL(), picks(ignored=-100), squash=log_softmax),
    "nll, weights": Row(NLL(weight=WEIGHT), picks(ignored=-100), squash=log_softmax),
    "bce": Row(nn.BCELoss(), zeros_and_ones(CLASSES), squash=positive),
    "bce, one": Row(BCE(), zeros_and_ones(), ()),
    "bce, several": Row(BCE(pos_weight=WEIGHT), zeros_and_ones(CLASSES)),
    "bce, weights": Row(BCE(weight=WEIGHT), zeros_and_ones(CLASSES)),
    "bce, sum": Row(BCE(reduction="sum"), zeros_and_ones(CLASSES)),
    "soft margin": Row(nn.SoftMarginLoss(), zeros_and_ones(CLASSES) * 2 - 1),
    "margin": Row(nn.MultiMarginLoss(), picks()),
    "margin, weights": Row(nn.MultiMarginLoss(weight=WEIGHT), picks()),
    "margin of labels": Row(nn.MultiLabelMarginLoss(), torch.cat([picks(1), torch.full((SAMPLES, 3), -1)], 1)),
    "soft margin of labels": Row(nn.MultiLabelSoftMarginLoss(weight=WEIGHT), zeros_and_ones(CLASSES)),
    "kl, batchmean": Row(nn.KLDivLoss(reduction="batchmean"), shares(), squash=log_softmax),
    "kl, mean": Row(nn.KLDivLoss(), shares(), squash=log_softmax),
    "mse": Row(nn.MSELoss(), numbers(2), (2,), Regression),
    "mse, sum": Row(nn.MSELoss(reduction="sum"), numbers(), (), Regression),
    "l1": Row(nn.L1Loss(), numbers(2), (2,), Regression),
    "smooth l1": Row(nn.SmoothL1Loss(beta=0.3), numbers(), (1,), Regression),
    "huber": Row(nn.HuberLoss(), numbers(2), (2,), Regression),
    "poisson": Row(nn.PoissonNLLLoss(), picks().double(), (), Regression),
    "hinge": Row(nn.HingeEmbeddingLoss(), zeros_and_ones() * 2 - 1, (), Regression),
    "pixels": Row(None, picks(2, 2, ignored=255), (CLASSES, 2, 2), partial(Segmentation, ignore=255)),
    "pixels, weights": Row(CE(weight=WEIGHT), picks(2, 2, ignored=-100), (CLASSES, 2, 2), Segmentation),
    "own": Row(lambda output, target: (output - target).abs().sum(-1).mean(), zeros_and_ones(CLASSES)),
}


class Rank:
    """A stand-in for the other ranks: they tell each other their numbers."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows, self.world_size = rows, len(rows)

    def gather(self, *parts: list[float]) -> list[list[list[float]]]:
        return [self.rows]


def model_of(row: Row) -> nn.Module:
    model = nn.Linear(FEATURES, math.prod(row.outputs)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance(5), dtype=torch.float64))
    return model


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both:UserWarning")  # of KLDivLoss
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_any_split_gives_the_gradient_and_the_loss_of_all_samples_at_once(row):
    x, layer = numbers(FEATURES), model_of(row)

    def model(x: Tensor) -> Tensor:
        return row.squash(layer(x).reshape(len(x), *row.outputs))

    output, target = model(x), row.target
    if row.task is Regression and output.shape != target.shape:
        output = output.squeeze(-1)
    criterion = row.criterion or CE(ignore_index=255)
    loss = criterion(output, target)
    wanted = torch.autograd.grad(loss, layer.parameters())

    for split in SPLITS:
        task = row.task(row.criterion)
        found, meter = split_gradient(task, model, layer, x, target, split)
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-11), split
        assert task.metrics(meter.take())["loss"] == pytest.approx(loss.item(), rel=1e-9), split


def split_gradient(
    task: Any, model: Any, layer: nn.Module, x: Tensor, y: Tensor, split: list[list[int]]
) -> tuple[list[Tensor], Meter]:
    """The gradient as a step of several ranks computes it, and the sums of all ranks."""
    per_rank = max(map(sum, split))
    edges = torch.tensor([0, *(size for sizes in split for size in sizes)]).cumsum(0).tolist()
    places = iter([slice(*pair) for pair in pairwise(edges)])
    batches = [[next(places) for _ in sizes] for sizes in split]
    firsts = []
    for slices in batches:
        step = as_step(task.step(model, (x[slices[0]], y[slices[0]])))
        size = slices[0].stop - slices[0].start
        firsts.append([float(size if step.n is None else step.n), float(size)])
    ranks = Rank(firsts)
    weighings = [Weighing(per_rank, ranks) for _ in split]  # type: ignore[arg-type]
    gradients, meter, counts = [], Meter(torch.device("cpu")), []
    for weighing, slices in zip(weighings, batches, strict=True):
        layer.zero_grad()
        for place in slices:
            step, size = as_step(task.step(model, (x[place], y[place]))), place.stop - place.start
            weighing.weigh(step, size).backward()
            meter.add(count(step, size))
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
        counts.append(float(weighing.n))
    factor = weighings[0].factor(counts)
    means = [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]
    return [mean * factor for mean in means], meter


@pytest.mark.parametrize("task", [Classification, Regression, Segmentation])
def test_a_loss_for_each_sample_is_refused(task):
    with pytest.raises(ConfigError, match=r"loss\.reduction=none of CrossEntropyLoss .*give mean or sum"):
        task(CE(reduction="none"))


def test_a_criterion_whose_mean_is_unknown_is_named_in_the_header():
    assert Classification(ROWS["own"].criterion).note.endswith(
        "by samples; a method n(prediction, target) of it may say otherwise"
    )
    assert Classification(CE()).note == ""
    assert Regression(nn.MSELoss()).note == ""


def test_micro_batches_and_ranks_without_anything_that_counts_add_nothing():
    layer = nn.Linear(FEATURES, CLASSES).double()
    x, y = numbers(FEATURES), picks(ignored=-100)
    y[:12] = -100
    task = Classification(CE())
    wanted = torch.autograd.grad(F.cross_entropy(layer(x), y), layer.parameters())
    for split in ([[12], [12]], [[3, 9], [6, 6]], [[6], [6], [12]]):
        found, _ = split_gradient(task, layer, layer, x, y, split)
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, wanted, strict=True)), split


def test_a_step_without_anything_that_counts_has_no_gradient():
    layer = nn.Linear(FEATURES, CLASSES).double()
    found, meter = split_gradient(
        Classification(CE()), layer, layer, numbers(FEATURES), torch.full((SAMPLES,), -100), [[12], [6, 6]]
    )
    assert not any(part.any() for part in found)
    assert "loss" not in Classification(CE()).metrics(meter.take())
