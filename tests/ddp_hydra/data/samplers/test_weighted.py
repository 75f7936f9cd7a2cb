"""How often classes come."""

from __future__ import annotations

from collections import Counter

import pytest

from ddp_hydra.data.samplers import Weighted
from ddp_hydra.errors import ConfigError

TARGETS = [0] * 900 + [1] * 90 + [2] * 10


def classes(balance: float) -> list[float]:
    """Share of each class in ten epochs."""
    sampler = Weighted(1000, 10, targets=TARGETS, balance=balance)
    drawn = Counter(TARGETS[index] for epoch in range(10) for index in sampler.order(epoch))
    return [drawn[number] / 10_000 for number in range(3)]


def test_balanced_all_classes_come_equally_often():
    assert classes(1) == pytest.approx([1 / 3] * 3, abs=0.02)


def test_unbalanced_they_come_as_often_as_they_are_there():
    assert classes(0) == pytest.approx([0.9, 0.09, 0.01], abs=0.01)


def test_between_they_come_between():
    roots = [900**0.5, 90**0.5, 10**0.5]
    assert classes(0.5) == pytest.approx([root / sum(roots) for root in roots], abs=0.02)


def test_within_a_class_all_samples_come():
    sampler = Weighted(1000, 10, targets=TARGETS)
    assert {index for epoch in range(10) for index in sampler.order(epoch)} >= set(range(900, 1000))


@pytest.mark.parametrize(("targets", "balance"), [(None, 1), ([0, 1], 1), (TARGETS, 1.5), (TARGETS, -0.1)])
def test_what_cannot_be_is_refused(targets, balance):
    words = r"sampler\.balance" if targets is TARGETS else "sampler=distributed"
    with pytest.raises(ConfigError, match=words):
        Weighted(1000, 10, targets=targets, balance=balance)
