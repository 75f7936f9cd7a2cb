from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.errors import ConfigError
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


class OfAUser(nn.CrossEntropyLoss):
    """The name does not say what it is."""


@pytest.mark.parametrize(
    "criterion",
    [OfAUser(), nn.CrossEntropyLoss(), functools.partial(F.cross_entropy)],
    ids=["subclass", "class", "partial"],
)
@pytest.mark.parametrize("class_axis", [-1, None])
def test_torchs_cross_entropy_has_the_classes_on_axis_1_also_in_a_subclass(criterion, class_axis):
    output = torch.rand(2, 4, 4)  # as many places as classes
    target = output.argmax(1)
    assert measured(task(class_axis, criterion), (output, target))["accuracy"] == 1
    assert task(class_axis, criterion).predict(lambda x: x, output)["class"].tolist() == target.tolist()


def test_classes_on_axis_1_are_named_where_the_last_one_is_meant():
    with pytest.raises(ConfigError, match=r"for axis 1, type loss\._target_=torch\.nn\.CrossEntropyLoss"):
        task().step(lambda x: x, (torch.rand(2, 4, 12), torch.ones(2, 12, dtype=torch.long)))


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
    task(axis, nn.CrossEntropyLoss() if axis == 1 else None).update_metric(metric, step)
    assert metric.given == list(given)


ONE = torch.tensor([[3.0], [-2.0], [0.5]])
SEVERAL = torch.tensor([[3.0, 3.0, -3.0], [-1.0, 0.2, 0.7]])


class Wrapped(nn.Module):
    """A loss of a user, around one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.bce = nn.BCEWithLogitsLoss()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.bce(output, target)


@pytest.mark.parametrize(
    ("criterion", "output", "wanted"),
    [
        (nn.BCEWithLogitsLoss(), ONE, {"probability": ONE.sigmoid()}),
        (nn.BCEWithLogitsLoss(), ONE[:, 0], {"probability": ONE[:, 0].sigmoid()}),
        (nn.BCEWithLogitsLoss(), SEVERAL, {"probability": SEVERAL.sigmoid()}),
        (nn.MultiLabelSoftMarginLoss(), SEVERAL, {"probability": SEVERAL.sigmoid()}),
        (functools.partial(F.binary_cross_entropy_with_logits, reduction="mean"), ONE, {"probability": ONE.sigmoid()}),
        (Wrapped(), ONE, {"probability": ONE.sigmoid()}),
        (nn.BCELoss(), ONE.sigmoid(), {"probability": ONE.sigmoid()}),
        (nn.MSELoss(), SEVERAL, {"prediction": SEVERAL}),
        (nn.HuberLoss(), ONE, {"prediction": ONE}),
    ],
    ids=["one", "flat", "several", "soft margin", "function", "wrapped", "sigmoid", "squares", "huber"],
)
def test_answers_that_do_not_exclude_each_other_are_predicted_each_by_itself(criterion, output, wanted):
    for batch in (output, (output, torch.zeros_like(output))):
        found = Classification(criterion, class_axis=None, names=("a", "b", "c")).predict(lambda x: x, batch)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            torch.testing.assert_close(found[name], values)


def test_a_loss_of_class_numbers_that_is_not_known_predicts_what_the_accuracy_counts():
    task = Classification(nn.MultiMarginLoss(), class_axis=None, names=("a", "b", "c"))
    found = task.predict(lambda x: x, (SEVERAL, torch.tensor([1, 2])))
    assert (found["class"].tolist(), found["name"]) == ([0, 2], ["a", "c"])
    torch.testing.assert_close(found["prediction"], SEVERAL)


def test_log_probabilities_are_predicted_as_probabilities():
    logs = SEVERAL.log_softmax(1)
    found = Classification(nn.NLLLoss(), class_axis=1).predict(lambda x: x, (logs, torch.tensor([0, 2])))
    torch.testing.assert_close(found["probability"], SEVERAL.softmax(1).max(1).values)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3)], ids=str)
def test_a_metric_of_binary_answers_gets_probabilities_and_whole_targets(shape):
    classification = pytest.importorskip("torchmetrics.classification")
    torch.manual_seed(0)
    logits, target = 0.5 + 0.3 * torch.rand(shape), torch.randint(2, shape).float()  # all in 0..1, as probabilities are
    metrics = [classification.BinaryAccuracy(), classification.BinaryAUROC()]
    if len(shape) > 1 and shape[1] > 1:
        metrics = [classification.MultilabelAccuracy(num_labels=3, average="micro")]
    of_the_loss = Classification(nn.BCEWithLogitsLoss(), class_axis=None)
    for part in (slice(0, 7), slice(7, 40)):
        step = of_the_loss.validation_step(lambda x: x, (logits[part], target[part]))
        for metric in metrics:
            of_the_loss.update_metric(metric, step)
    assert metrics[0].compute() == pytest.approx(float(((logits > 0) == target.bool()).float().mean()))


@pytest.mark.parametrize(("criterion", "key"), [(nn.BCEWithLogitsLoss(), "probability"), (nn.MSELoss(), "prediction")])
def test_one_output_is_never_taken_for_the_likeliest_of_one_class(criterion, key):
    output = torch.tensor([[2.0], [-2.0]])
    for class_axis in (None, -1):
        found = task(class_axis, criterion).predict(lambda x: x, output)
        assert list(found) == [key]
        assert found[key].tolist() == (output.sigmoid() if key == "probability" else output).tolist()


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"image": torch.ones(2, 3), "label": torch.ones(2)}, "dict of image, label"),
        (torch.ones(2, 3), "Tensor"),
        ([torch.ones(2, 3), torch.ones(2), ("a", "b")], r"list of 3 parts \(Tensor, Tensor, tuple\)"),
        ([torch.ones(2, 3), ("cat", "dog")], r"list of 2 parts \(Tensor, tuple\)"),
    ],
)
def test_batches_of_another_structure_are_named(batch, said):
    for step in (task().step, task().validation_step):
        with pytest.raises(ConfigError, match=rf"takes batches \(x, y\) .* makes a {said}: let __getitem__"):
            step(lambda x: x, batch)


class Arc(nn.Module):
    """Compares embeddings of 4 numbers with a direction for each of 3 classes."""

    def __init__(self, classes=3):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(classes, 4))

    def forward(self, embedding, target):
        return F.cross_entropy(F.linear(F.normalize(embedding), F.normalize(self.directions)), target)


def test_a_loss_with_a_classifier_of_its_own_has_no_accuracy_of_the_embedding():
    own, batch = task(criterion=Arc()), (torch.randn(6, 4), torch.arange(6) % 3)
    assert measured(own, batch).keys() == {"loss"}
    assert own.predict(lambda x: x, batch).keys() == {"prediction"}
    metric = pytest.importorskip("torchmetrics.classification").MulticlassAccuracy(num_classes=4)
    with pytest.raises(ConfigError, match="needs scores of classes, which Arc keeps"):
        own.update_metric(metric, own.step(lambda x: x, batch))


def test_a_loss_that_draws_scores_to_centres_keeps_its_accuracy():
    assert "accuracy" in measured(task(criterion=Arc(classes=4)), (torch.randn(6, 4), torch.arange(6) % 3))


def unsaid(output, target):
    """A loss of one's own, which does not say where its classes are."""
    return output.mean()


def guessing(class_axis):
    return Classification(unsaid, class_axis=class_axis)


@pytest.mark.parametrize("class_axis", [-1, None])
@pytest.mark.parametrize("axis", [1, 2])
def test_where_the_loss_does_not_say_it_a_batch_that_fits_one_axis_does(axis, class_axis):
    own = guessing(class_axis)
    for time in (3, 4, 6):
        scores, y = torch.randn(8, time, 4), torch.randint(4, (8, time))
        right = float((scores.argmax(-1) == y).float().mean())
        assert measured(own, (scores.movedim(-1, axis), y))["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("class_axis", [-1, None])
@pytest.mark.parametrize("shape", [(8, 4, 4), (8, 4, 4, 4)], ids=str)
def test_an_axis_that_nothing_says_is_asked_for(shape, class_axis):
    scores, y = torch.randn(shape), torch.randint(4, shape[:-1])
    with pytest.raises(ConfigError, match=r"unsaid is given outputs of .*8, 4, 4.* Give .task.class_axis=1, or -1 for"):
        measured(guessing(class_axis), (scores, y))


@pytest.mark.parametrize("axis", [1, -1])
def test_an_axis_that_the_loss_says_is_taken_for_accuracy_metrics_and_predictions(axis):
    import torchmetrics.classification as zoo

    def told(output, target):
        return output.mean()

    told.class_axis = axis
    own, metric = task(None, told), zoo.MulticlassAccuracy(4, average="micro")
    scores, y = torch.randn(8, 4, 4), torch.randint(4, (8, 4))
    right = float((scores.argmax(axis) == y).float().mean())
    assert measured(own, (scores, y))["accuracy"] == pytest.approx(right)
    own.update_metric(metric, own.step(lambda x: x, (scores, y)))
    assert float(metric.compute()) == pytest.approx(right)
    assert own.predict(lambda x: x, (scores, y))["class"].equal(scores.argmax(axis))


def test_a_found_axis_is_that_of_metrics_and_predictions_too():
    import torchmetrics.classification as zoo

    own, metric = guessing(-1), zoo.MulticlassAccuracy(4, average="micro")
    scores, y = torch.randn(8, 4, 5), torch.randint(4, (8, 5))
    own.update_metric(metric, own.step(lambda x: x, (scores, y)))
    assert float(metric.compute()) == pytest.approx(float((scores.argmax(1) == y).float().mean()))
    assert own.predict(lambda x: x, (scores, y))["class"].equal(scores.argmax(1))


@pytest.mark.parametrize(("class_axis", "has_shares"), [(-1, True), (None, False)])
@pytest.mark.parametrize("size", [1, 4])
def test_numbers_in_the_shape_of_the_output_do_not_say_where_classes_are(class_axis, has_shares, size):
    scores, y = torch.randn(8, 5, size), torch.rand(8, 5, size)
    own = guessing(class_axis)
    found = measured(own, (scores, y))
    assert ("accuracy" in found) == (has_shares and size > 1)
    kinds = {"class", "probability"} if has_shares and size > 1 else {"prediction"}
    assert set(own.predict(lambda x: x, scores)) == kinds, "without targets, too"


def test_an_axis_that_the_config_gives_is_not_guessed():
    scores, y = torch.randn(8, 4, 4), torch.randint(4, (8, 4))
    for axis in (1, -1):
        right = float((scores.argmax(axis) == y).float().mean())
        own = Classification(unsaid, class_axis=axis, guesses_axis=False)
        assert measured(own, (scores, y))["accuracy"] == pytest.approx(right)


def test_a_subclass_may_have_classes_of_its_own():
    class Named(Classification):
        def __init__(self):
            super().__init__(unsaid)
            self.classes = ["cat", "dog"]

    assert "accuracy" in measured(Named(), (torch.randn(6, 4), torch.arange(6) % 3))
