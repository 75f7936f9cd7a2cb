"""A model that computes its own loss: how it is called, and where the loss and the predictions are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import ModelLoss

X, Y = torch.tensor([[1.0, 2.0]]), torch.tensor([1])
LOGITS = torch.tensor([[0.1, 0.9]])
LOSS = torch.nn.functional.cross_entropy(LOGITS, Y).reshape(1)


@pytest.mark.parametrize(
    "output",
    [{"loss": LOSS, "logits": LOGITS}, SimpleNamespace(loss=LOSS, logits=LOGITS), (LOSS, LOGITS), [LOSS, LOGITS]],
    ids=["dict", "object", "tuple", "list"],
)
def test_loss_and_logits_are_found_in_what_models_return(output):
    task = ModelLoss()
    step = task.step(lambda x, labels: output, {"x": X, "labels": Y})
    assert (step.loss.shape, step.loss) == ((), LOSS)
    assert ModelLoss(without=()).predict(lambda x, labels: output, {"x": X, "labels": Y}) is LOGITS
    assert task.predict(lambda x, y: output, (X, Y)) is LOGITS


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("of_one", [(1,), ()])
def test_a_tuple_begins_with_a_loss_only_where_the_model_was_given_labels(rows, of_one):
    """A prediction of one number for one sample is no loss."""
    predicted, hidden, y = torch.zeros(rows, *of_one), torch.zeros(rows, 6), torch.zeros(rows)

    def model(x, labels=None):
        return (predicted, hidden) if labels is None else (y.mean(), predicted, hidden)

    batch, task = {"x": torch.zeros(rows, 2), "labels": y}, ModelLoss()
    assert task.step(model, batch).prediction is predicted
    assert task.predict(model, batch) is predicted
    assert task.predict(model, {"x": batch["x"]}) is predicted
    assert ModelLoss(without=()).predict(model, batch) is predicted
    assert task.predict(model, (batch["x"], y)) is predicted


def test_a_loss_that_needs_no_labels_is_no_prediction():
    loss, logits = torch.tensor(0.5), torch.zeros(2, 3)
    for batch in ({"x": X}, {"x": X, "label": torch.zeros(2)}, X, (X,)):
        assert ModelLoss().predict(lambda x: (loss, logits), batch) is logits
        assert ModelLoss().predict(lambda x: (logits,), batch) is logits
        assert ModelLoss().predict(lambda x: (loss,), batch) is loss  # no row: it is refused


def test_a_prediction_that_is_squeezed_for_one_sample_is_no_loss():
    batch = {"x": torch.zeros(1, 2), "labels": torch.zeros(1)}
    predicted, hidden = torch.tensor(0.5), torch.zeros(1, 6)
    assert ModelLoss().predict(lambda x: (predicted, hidden), batch) is predicted  # no row: it is refused


def test_a_lone_loss_is_not_taken_for_logits():
    assert ModelLoss().step(lambda x, labels: (LOSS,), {"x": X, "labels": torch.tensor([0.5])}).prediction is None


def test_a_scalar_is_the_loss_itself():
    assert ModelLoss().step(lambda x: x.sum(), X).loss.item() == 3
    assert ModelLoss().predict(lambda x: x, X) is X


def test_a_batch_is_given_by_keywords_by_position_or_as_it_is():
    seen = []

    def model(*parts, **named):
        seen.append((len(parts), sorted(named)))
        return {"loss": LOSS, "logits": LOGITS}

    for batch in ({"x": X, "labels": Y}, (X, Y), [X, Y], X):
        ModelLoss().step(model, batch)
    assert seen == [(0, ["labels", "x"]), (2, []), (2, []), (1, [])]


def test_labels_are_not_given_when_it_predicts():
    seen = []

    def model(**named):
        seen.append(sorted(named))
        return {"logits": LOGITS}

    batch = {"x": X, "labels": Y, "weight": Y}
    ModelLoss().predict(model, batch)
    ModelLoss(without="weight").predict(model, batch)
    assert seen == [["weight", "x"], ["labels", "x"]]


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(9, 3)

    def forward(self, words, labels=None):
        logits = self.embedding(words)
        return {"logits": logits, "loss": None if labels is None else torch.nn.functional.cross_entropy(logits, labels)}


WORDS = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"words": WORDS, "labels": torch.tensor([0, -1])}, r"the column labels holds -1 in sample 1"),
        ({"words": WORDS, "labels": torch.tensor([3, 0])}, r"the column labels holds 3 in sample 0 of a batch"),
        (
            {"words": ["a b", "c"], "labels": Y},
            r"the column words holds text, and Bag takes tensors: make.*__getitem__ or c",
        ),
        ({"words": WORDS, "labels": ["good", "bad"]}, r"the column labels holds text, and Bag takes tensors"),
        (
            {"words": WORDS, "labels": WORDS[0], "note": ["a", "b"]},
            r"Bag takes no note, and the batch has words, .*__getitem__ or coll",
        ),
    ],
)
def test_a_column_that_the_model_can_not_take_is_named(batch, said):
    with pytest.raises(ConfigError, match=said):
        ModelLoss().step(Bag(), batch)


def test_an_error_of_the_model_itself_stays():
    def model(**columns):
        raise IndexError("index 4 is out of bounds")

    with pytest.raises(IndexError, match="index 4"):
        ModelLoss().step(model, {"x": X, "labels": Y})


@pytest.mark.parametrize("output", [{"logits": LOGITS}, LOGITS, {"loss": 0.5}, (LOGITS, LOSS)])
def test_an_output_without_a_loss_is_refused(output):
    class Net:
        def __call__(self, x):
            return output

    with pytest.raises(ConfigError, match=r"Net returned a \w+ without a loss: it must have `loss`, a scalar"):
        ModelLoss().step(Net(), {"x": X})
