"""Options of the shipped tasks and of the distillation: any split has the gradient and the loss of plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from ddp_hydra.tasks import Classification, Segmentation
from ddp_hydra.tasks.losses import CrossEntropy
from models.distillation import Distillation
from tests.properties.test_losses import CLASSES, LABELS, POSITIVE, SHARES, SPLITS, WEIGHT, check, labels, numbers

pytestmark = pytest.mark.medium

LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2},
    "weight": {"weight": WEIGHT},
    "smooth, weight": {"label_smoothing": 0.2, "weight": POSITIVE},
    "ignore": {"ignore_index": 1},
}
MIXED = [name for name in LOSSES if name != "ignore"]
"""Losses of shares: torch takes no ignore_index with them."""


def distilled(model: nn.Module, teacher: nn.Module, x: Any, y: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The loss of a distillation with temperature 3 and share 0.4, by hand: means over the labels that count."""
    own = F.cross_entropy(model(x), y, **{"ignore_index": -100, **options})
    pairs = (model(x) / 3).log_softmax(-1), (teacher(x) / 3).softmax(-1)
    distance = F.kl_div(*pairs, reduction="none").sum(-1)
    if y.is_floating_point():
        return 0.4 * 9 * distance.mean() + 0.6 * own
    counted = y != options.get("ignore_index", -100)
    weight = options.get("weight", torch.ones(CLASSES).double())[y.where(counted, 0)] * counted
    return 0.4 * 9 * (distance * weight).sum() / weight.sum() + 0.6 * own


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "are_shares"), [*((name, False) for name in LOSSES), *((name, True) for name in MIXED)]
)
@settings(max_examples=6)
@given(split=SPLITS)
def test_distillation(name, are_shares, split):
    torch.manual_seed(0)
    model, teacher, x = nn.Linear(5, CLASSES).double(), nn.Linear(5, CLASSES).double(), numbers(5)
    y = SHARES if are_shares else LABELS.clamp(min=0) if name == "ignore" else LABELS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_hydra.training.load_run.load", lambda _: type("Loaded", (), {"model": teacher}))
        task = Distillation("teacher", temperature=3.0, share=0.4, criterion=CrossEntropy(**LOSSES[name]))
    check(task, model, (x, y), distilled(model, teacher, x, y, LOSSES[name]), split)


def roll(x: torch.Tensor, y: torch.Tensor, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix each sample with itself, as the partner depends on the batch: 0.7 of its class, 0.3 of the next."""
    shares = F.one_hot(y, CLASSES).to(x.dtype)
    return x * 0.9 if whole else x, 0.7 * shares + 0.3 * shares.roll(1, -1)


@pytest.mark.parametrize("name", MIXED)
@settings(max_examples=6)
@given(split=SPLITS)
def test_mixed_samples(name, split):
    torch.manual_seed(0)
    options = LOSSES[name]
    model, x, y = nn.Linear(5, CLASSES).double(), numbers(5), LABELS.clamp(min=0)
    task = Classification(CrossEntropy(**LOSSES[name]), mix=partial(roll, whole=True))
    mixed, shares = roll(x, y, True)
    check(task, model, (x, y), F.cross_entropy(model(mixed), shares, **options), split)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6)
@given(split=SPLITS)
def test_segmentation_by_a_criterion(name, split):
    torch.manual_seed(0)
    options = LOSSES[name]
    model, x = nn.Conv2d(1, CLASSES, 1).double(), numbers(1, 2, 2)
    y = labels(2, 2, ignored=options.get("ignore_index", -100))
    check(Segmentation(nn.CrossEntropyLoss(**options)), model, (x, y), F.cross_entropy(model(x), y, **options), split)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@settings(max_examples=6)
@given(split=SPLITS)
def test_segmentation_with_one_channel(reduction, split):
    torch.manual_seed(0)
    model, x, y = nn.Conv2d(1, 1, 1).double(), numbers(1, 2, 2), labels(2, 2, ignored=255)
    y = y.where(y != 2, 1)
    criterion = nn.BCEWithLogitsLoss(pos_weight=POSITIVE[1], reduction=reduction)
    counted = y != 255
    right = criterion(model(x)[:, 0][counted], y[counted].double())
    check(Segmentation(criterion, ignore=255), model, (x, y), right, split)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6)
@given(split=SPLITS)
def test_classes_over_time(name, split):
    torch.manual_seed(0)
    options = LOSSES[name]
    model, x, y = nn.Linear(5, CLASSES).double(), numbers(4, 5), labels(4, ignored=options.get("ignore_index", -100))
    right = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), **options)
    check(Classification(CrossEntropy(**options)), model, (x, y), right, split)
