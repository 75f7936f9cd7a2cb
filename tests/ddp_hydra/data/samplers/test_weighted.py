"""How often classes come."""

from __future__ import annotations

from collections import Counter

import pytest

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


@pytest.mark.parametrize(("targets", "balance"), [(None, 1), ([0, 1], 1), (TARGETS, 1.5), (TARGETS, -0.1)])
def test_what_cannot_be_is_refused(targets, balance):
    words = r"sampler\.balance" if targets is TARGETS else "sampler=distributed"
    with pytest.raises(ConfigError, match=words):
        Weighted(1000, 10, targets=targets, balance=balance)
