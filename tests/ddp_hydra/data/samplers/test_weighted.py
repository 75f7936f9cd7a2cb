"""How often classes come."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from ddp_hydra.data.samplers import Weighted
from ddp_hydra.errors import ConfigError

TARGETS = [0] * 900 + [1] * 90 + [2] * 10


@pytest.mark.parametrize("balance", [0, 0.5, 1])
def test_classes_come_equally_often_or_as_often_as_they_are_there_or_between(balance):
    sampler = Weighted(1000, 10, targets=TARGETS, balance=balance)
    drawn = Counter(TARGETS[index] for epoch in range(10) for index in sampler.order(epoch))
    weights = [count ** (1 - balance) for count in (900, 90, 10)]
    shares = [weight / sum(weights) for weight in weights]
    assert [drawn[number] / 10_000 for number in range(3)] == pytest.approx(shares, abs=0.02)


def test_within_a_class_all_samples_come():
    sampler = Weighted(1000, 10, targets=TARGETS)
    assert {index for epoch in range(10) for index in sampler.order(epoch)} >= set(range(900, 1000))


@pytest.mark.parametrize(
    "of",
    [
        lambda y: y[:, None],
        lambda y: np.eye(3)[y],
        lambda y: torch.eye(3).bool()[torch.tensor(y)],
        lambda y: list(map(torch.tensor, np.eye(3, dtype=int)[y])),
        lambda y: [("a", "b", "c")[number] for number in y],
        lambda y: y.astype(float),
        lambda y: y.astype(object),
    ],
    ids=["column", "one-hot", "tensor", "list of tensors", "names", "floats", "objects"],
)
def test_a_class_may_be_written_in_any_way(of):
    given = of(np.asarray(TARGETS))
    assert (Weighted(1000, 10, targets=given).order(3) == Weighted(1000, 10, targets=TARGETS).order(3)).all()


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (None, "it has none"),
        (5, r"they have the shape \(\)"),
        ([0, 1], r"they have the shape \(2,\)"),
        (np.zeros((4, 1, 1)), r"they have the shape \(4, 1, 1\)"),
        (np.zeros((4, 0)), r"they have the shape \(4, 0\) and are not one-hot"),
        ([[1, 1], [1, 0], [0, 1], [0, 0]], r"they have the shape \(4, 2\) and are not one-hot"),
        (np.full((4, 2), 0.5), r"they have the shape \(4, 2\) and are not one-hot"),
        ([["a", "b"]] * 4, r"they have the shape \(4, 2\) and are not one-hot"),
        ([[1], [1, 2], [1], [2]], "setting an array element with a sequence"),
        ([0, 1, 0.37, 1], r"sample 2 has 0\.37"),
        ([0, 1, float("nan"), 1], "sample 2 has nan"),
        ([0, float("inf"), 1, 1], "sample 1 has inf"),
        ([0, 1, None, 1], "sample 2 has None"),
        ([0, "a", object(), 1], "'<' not supported between"),
        ([{"boxes": 1}] * 4, "'<' not supported between"),
    ],
)
def test_what_is_not_one_class_for_each_sample_is_told(targets, found):
    said = (
        rf"`targets` of the data set, one class for each of its 4 samples, and {found}.*: give it such targets, .*=dist"
    )
    with pytest.raises(ConfigError, match=said):
        Weighted(4, 1, targets=targets)


def test_ratings_are_classes():
    ratings = [0.5, 1.5] + [1.0] * 6
    assert list(Weighted(8, 1, targets=ratings).order(0)) == list(Weighted(8, 1, targets=[0, 2] + [1] * 6).order(0))


@pytest.mark.parametrize("balance", [1.5, -0.1])
def test_what_cannot_be_is_refused(balance):
    with pytest.raises(ConfigError, match=r"sampler\.balance"):
        Weighted(1000, 10, targets=TARGETS, balance=balance)
