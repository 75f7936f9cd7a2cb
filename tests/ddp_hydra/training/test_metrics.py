from __future__ import annotations

import math

import pytest
import torch

from ddp_hydra.training.losses import CrossEntropy
from ddp_hydra.training.metrics import Meter, count, means

cross_entropy = CrossEntropy()

LOGITS = [[0.0, 0.0], [math.log(3), 0.0], [0.0, math.log(7)]]  # probabilities 1/2 1/2, 3/4 1/4, 1/8 7/8
TARGET = [0, 1, 1]
LOSSES = [math.log(2), math.log(4), math.log(8 / 7)]
CORRECT = [1, 0, 1]  # of two equal logits the first counts


def test_cross_entropy_by_hand():
    loss = cross_entropy(torch.tensor(LOGITS), torch.tensor(TARGET))
    assert loss.item() == pytest.approx(sum(LOSSES) / 3)


def test_cross_entropy_over_time_is_the_mean_over_all_places():
    logits, target = torch.tensor([LOGITS, LOGITS[::-1]]), torch.tensor([TARGET, TARGET[::-1]])
    assert cross_entropy(logits, target).item() == pytest.approx(sum(LOSSES) / 3)
    assert cross_entropy(logits[:1, :1], target[:1, :1]).item() == pytest.approx(LOSSES[0])


def measured(sizes, device="cpu", dtype=torch.float32):
    meter = Meter(torch.device(device))
    logits, target = torch.tensor(LOGITS, dtype=dtype), torch.tensor(TARGET)
    for part_logits, part_target in zip(logits.split(sizes), target.split(sizes), strict=True):
        meter.add(count(cross_entropy(part_logits, part_target), part_logits, part_target))
    return meter


@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_batches_count_by_their_samples(sizes):
    assert measured(sizes).result("val") == {
        "val/loss": pytest.approx(sum(LOSSES) / 3),
        "val/accuracy": pytest.approx(2 / 3),
    }


def test_with_time_each_place_counts():
    meter = Meter(torch.device("cpu"))
    logits, target = torch.tensor([LOGITS]), torch.tensor([TARGET])
    meter.add(count(cross_entropy(logits, target), logits, target))
    assert meter.result("x")["x/accuracy"] == pytest.approx(2 / 3)
    assert [int(row.argmax() == goal) for row, goal in zip(logits[0], target[0], strict=True)] == CORRECT


def test_a_result_begins_anew_and_of_nothing_there_is_none():
    meter = measured([3])
    assert meter.result("train")
    assert meter.result("train") == {}
    logits, target = torch.tensor(LOGITS[:1]), torch.tensor(TARGET[:1])
    meter.add(count(cross_entropy(logits, target), logits, target))
    assert meter.result("train") == {"train/loss": pytest.approx(LOSSES[0]), "train/accuracy": 1.0}


def test_counting_keeps_no_graph():
    weight = torch.tensor(LOGITS, requires_grad=True)
    meter = Meter(torch.device("cpu"))
    meter.add(count(cross_entropy(weight, torch.tensor(TARGET)), weight, torch.tensor(TARGET)))
    assert not meter.sums.requires_grad


def test_many_small_losses_do_not_drown():
    """In single precision the sum would stop growing at 2**24."""
    meter = Meter(torch.device("cpu"))
    meter.sums += 2.0**24
    logits, target = torch.tensor(LOGITS[:1]), torch.tensor(TARGET[:1])
    meter.add(count(torch.tensor(1.0), logits, target))
    assert meter.sums.tolist() == [2.0**24 + 1] * 2


@pytest.mark.gpu
def test_on_a_gpu_the_sums_stay_there():
    meter = Meter(torch.device("cuda"))
    logits, target = torch.tensor(LOGITS, device="cuda"), torch.tensor(TARGET, device="cuda")
    meter.add(count(cross_entropy(logits, target), logits, target))
    assert meter.sums.is_cuda
    assert meter.result("x")["x/loss"] == pytest.approx(sum(LOSSES) / 3)


def test_means_are_those_of_all_samples_whichever_rank_counted_them():
    assert means("train", [[4.0, 1.0, 2.0, 2.0], [2.0, 4.0, 6.0, 6.0], [0.0] * 4]) == {
        "train/loss": 0.75,
        "train/accuracy": 0.625,
    }
    assert means("train", [[0.0] * 4]) == {}


@pytest.mark.parametrize(
    ("output", "target", "class_axis"),
    [
        (torch.rand(3, 1), torch.rand(3, 1), None),  # regression
        (torch.rand(3), torch.rand(3), None),
        (torch.rand(3, 4), torch.rand(3, 4), None),  # of several numbers, or labels that do not exclude each other
        (torch.rand(3, 1), torch.rand(3, 1), -1),  # one class is no choice
        (torch.rand(3, 1), torch.tensor([0, 1, 0]), None),
    ],
    ids=["one number", "no axis", "several numbers", "one class", "one output"],
)
def test_without_classes_there_is_a_loss_only(output, target, class_axis):
    meter = Meter(torch.device("cpu"))
    meter.add(count(torch.tensor(0.5), output, target, class_axis))
    assert meter.result("val") == {"val/loss": 0.5}


def test_shares_of_classes_count_by_the_largest():
    shares = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]])
    meter = Meter(torch.device("cpu"))
    meter.add(count(torch.tensor(1.0), torch.tensor(LOGITS), shares))
    assert meter.result("x") == {"x/loss": 1.0, "x/accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize(("axis", "class_axis"), [(-1, -1), (1, 1), (1, None)])
def test_classes_may_be_on_the_axis_of_the_loss(axis, class_axis):
    """(batch, classes, height, width) is what torch's own losses take."""
    output = torch.rand(2, 5, 6, 3).movedim(-1, axis)
    target = output.argmax(axis)
    target[0, 0, 0] = (target[0, 0, 0] + 1) % 3
    meter = Meter(torch.device("cpu"))
    meter.add(count(torch.tensor(1.0), output, target, class_axis))
    assert meter.result("x")["x/accuracy"] == pytest.approx(1 - 1 / 60)
