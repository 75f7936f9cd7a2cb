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
    assert task.predict(lambda x: output, {"x": X, "labels": Y}) is LOGITS


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
    ModelLoss(without=("weight",)).predict(model, batch)
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
