from __future__ import annotations

import math

import pytest
import torch

from ddp_hydra.tasks import Classification, Step
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training.metrics import Meter, count

LOGITS = [[0.0, 0.0], [math.log(3), 0.0], [0.0, math.log(7)]]  # probabilities 1/2 1/2, 3/4 1/4, 1/8 7/8
TARGET = [0, 1, 1]
LOSSES = [math.log(2), math.log(4), math.log(8 / 7)]
CORRECT = [1, 0, 1]  # of two equal logits the first counts


def measured(task, *batches):
    """The metrics of batches of (output, target), as a model that returns its input would have them."""
    meter = Meter(torch.device("cpu"))
    for batch in batches:
        meter.add(count(task.step(lambda x: x, batch), len(batch[0])))
    return task.metrics(meter.result())


def task(class_axis=-1, criterion=None):
    return Classification(criterion or CrossEntropy(), class_axis=class_axis)


@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_batches_count_by_their_samples(sizes):
    batches = zip(torch.tensor(LOGITS).split(sizes), torch.tensor(TARGET).split(sizes), strict=True)
    assert measured(task(), *batches) == {"loss": pytest.approx(sum(LOSSES) / 3), "accuracy": pytest.approx(2 / 3)}


def test_with_time_each_place_counts():
    logits, target = torch.tensor([LOGITS]), torch.tensor([TARGET])
    assert measured(task(), (logits, target))["accuracy"] == pytest.approx(2 / 3)
    assert [int(row.argmax() == goal) for row, goal in zip(logits[0], target[0], strict=True)] == CORRECT


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
    found = measured(task(class_axis, lambda output, target: torch.tensor(0.5)), (output, target))
    assert found == {"loss": 0.5}


def test_shares_of_classes_count_by_the_largest():
    shares = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]])
    assert measured(task(), (torch.tensor(LOGITS), shares))["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("axis", "class_axis"), [(-1, -1), (1, 1), (1, None)])
def test_classes_may_be_on_the_axis_of_the_loss(axis, class_axis):
    """(batch, classes, height, width) is what torch's own losses take."""
    output = torch.rand(2, 5, 6, 3).movedim(-1, axis)
    target = output.argmax(axis)
    target[0, 0, 0] = (target[0, 0, 0] + 1) % 3
    found = measured(task(class_axis, lambda output, target: torch.tensor(1.0)), (output, target))
    assert found["accuracy"] == pytest.approx(1 - 1 / 60)


def test_samples_are_mixed_in_training_only_and_smoothing_too():
    mixed = Classification(CrossEntropy(label_smoothing=0.5), lambda x, y: (x.flip(0), y))
    batch = torch.tensor(LOGITS), torch.tensor(TARGET)
    assert mixed.step(lambda x: x, batch).prediction.tolist() == torch.tensor(LOGITS).flip(0).tolist()
    validated = mixed.validation_step(lambda x: x, batch)
    assert validated.prediction.tolist() == torch.tensor(LOGITS).tolist()
    assert validated.loss.item() == pytest.approx(sum(LOSSES) / 3)


def test_a_prediction_is_the_likeliest_class_with_its_probability_and_name():
    named = Classification(CrossEntropy(), names=("cat", "dog"))
    found = named.predict(lambda x: x, (torch.tensor(LOGITS), torch.tensor(TARGET)))
    assert (found["class"].tolist(), found["name"]) == ([0, 0, 1], ["cat", "cat", "dog"])
    assert found["probability"].tolist() == pytest.approx([1 / 2, 3 / 4, 7 / 8])
    assert "name" not in task().predict(lambda x: x, torch.tensor(LOGITS))  # a batch without targets


class Noted:
    """Stands for a metric of torchmetrics."""

    def update(self, *given):
        self.given = [part.tolist() for part in given]


@pytest.mark.parametrize(
    ("axis", "prediction", "target", "given"),
    [
        (-1, [[[1, 2], [3, 4]]], [[0, 1]], ([[1, 2], [3, 4]], [0, 1])),
        (1, [[[1, 2], [3, 4]]], [[0, 1]], ([[1, 3], [2, 4]], [0, 1])),
        (None, [[1, 2], [3, 4]], [[0.0, 1.0], [1.0, 1.0]], ([[1, 2], [3, 4]], [[0, 1], [1, 1]])),
        (1, [[[1, 2], [3, 4]]], [[[0.0, 1.0], [1.0, 1.0]]], ([[1, 3], [2, 4]], [[0, 1], [1, 1]])),
    ],
    ids=["last", "of the loss", "labels", "labels over time"],
)
def test_metrics_are_given_the_scores_of_an_answer_in_a_row(axis, prediction, target, given):
    metric = Noted()
    step = Step(torch.zeros(()), prediction=torch.tensor(prediction), target=torch.tensor(target))
    task(axis).update_metric(metric, step)
    assert metric.given == list(given)
