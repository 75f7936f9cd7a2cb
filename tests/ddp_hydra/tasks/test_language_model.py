"""The task of a language model: the loss of the next token, what counts, and what it predicts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import LanguageModel
from ddp_hydra.training.metrics import Meter, count
from ddp_hydra.training.train_step import as_step

PAD = 0
LOGITS = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
Y = torch.tensor([[1, 2, PAD]])


def model(x):
    return LOGITS[:, : x.shape[1]]


def test_each_token_counts_unless_one_is_ignored():
    every = LanguageModel().step(model, (Y, Y))
    assert (every.n, int(every.sums["accuracy"][0])) == (3, 1)
    assert every.loss.item() == pytest.approx(F.cross_entropy(LOGITS[0], Y[0]).item())
    some = LanguageModel(ignore=PAD).step(model, (Y, Y))
    assert (int(some.n), int(some.sums["accuracy"][0])) == (2, 1)
    assert (LanguageModel().ignore, LanguageModel(ignore=PAD).ignore) == (-100, PAD), "for steps of one's own"
    assert some.loss.item() == pytest.approx(F.cross_entropy(LOGITS[0, :2], Y[0, :2]).item())


def test_a_right_answer_for_an_ignored_token_does_not_count():
    y = torch.tensor([[1, PAD, PAD]])
    step = as_step(LanguageModel(ignore=PAD).step(model, (y, y)))
    assert (int(step.n), int(step.sums["accuracy"][0])) == (1, 1)


def test_tokens_alone_are_inputs_and_what_follows():
    tokens = torch.tensor([[7, 1, 2, 0]])
    step = LanguageModel().step(lambda x: F.one_hot(x % 3, 3).float(), tokens)
    assert step.target.tolist() == [[1, 2, 0]]
    assert step.prediction.argmax(-1).tolist() == [[1, 1, 2]]


def test_perplexity_comes_with_the_loss_and_stays_finite():
    task = LanguageModel()
    assert "perplexity" not in task.metrics({})
    for scale in (1.0, 1e6):
        step, meter = task.step(lambda x, scale=scale: scale * LOGITS, (Y, Y)), Meter(torch.device("cpu"))
        meter.add(count(step, 1))
        found = task.metrics(meter.result())
        assert found["loss"] == pytest.approx(step.loss.item())
        assert found["accuracy"] == pytest.approx(1 / 3)
        assert found["perplexity"] == pytest.approx(math.exp(min(step.loss.item(), 700.0)))


def test_it_predicts_the_token_after_the_last_one():
    found = LanguageModel().predict(model, (Y, Y))
    assert found["next"].tolist() == [2]
    assert found["probability"].item() == pytest.approx(LOGITS[0, 2].softmax(-1)[2].item())


TEXTS = torch.tensor([[5, 6, 7], [8, 9, PAD], [4, PAD, PAD], [PAD, PAD, PAD]])


@pytest.mark.parametrize(
    ("ignore", "batch"),
    [(PAD, TEXTS), (PAD, (TEXTS, TEXTS)), (None, (TEXTS, TEXTS.where(TEXTS != PAD, -100)))],
    ids=["tokens", "targets", "targets of -100"],
)
def test_it_predicts_after_the_last_token_that_counts(ignore, batch):
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    found = LanguageModel(ignore=ignore).predict(table.__getitem__, batch)
    probability, best = table[torch.tensor([7, 9, 4, PAD])].softmax(-1).max(-1)
    assert torch.equal(found["next"], best)
    assert torch.equal(found["probability"], probability)


@pytest.mark.parametrize("ignored", [PAD, -100])
def test_the_last_input_counts_where_its_target_is_not_known(ignored):
    texts = torch.tensor([[5, 6, 7], [8, 9, PAD], [4, PAD, PAD]])
    known = torch.tensor([[6, 7, ignored], [9, ignored, ignored], [ignored] * 3])
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    found = LanguageModel(ignore=ignored).predict(table.__getitem__, (texts, known))
    assert torch.equal(found["next"][:2], table[torch.tensor([7, 9])].argmax(-1))


@pytest.mark.parametrize("batch", [TEXTS, (TEXTS,), (TEXTS, TEXTS[:, 0]), (TEXTS, TEXTS), ({"x": TEXTS}, TEXTS[:, 0])])
def test_texts_without_padding_are_predicted_after_their_last_token(batch):
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    found = LanguageModel().predict(lambda x: table[x["x"] if isinstance(x, dict) else x], batch)
    assert torch.equal(found["probability"], table[TEXTS][:, -1].softmax(-1).max(-1).values)


def test_a_token_that_the_model_does_not_know_is_refused_with_the_key_of_this_task():
    with pytest.raises(ConfigError, match=r"hold class 5, .* or leave it out with task\.ignore=<class> "):
        LanguageModel().step(model, (Y, torch.tensor([[1, 5, PAD]])))
    with pytest.raises(ConfigError, match=r"its classes are the last axis \("):
        LanguageModel().step(lambda x: LOGITS[:, :2].transpose(1, 2), (Y, torch.tensor([[1, 2]])))


def test_a_metric_gets_scores_and_tokens_that_count():
    seen = []
    task, metric = LanguageModel(ignore=PAD), SimpleNamespace(update=lambda *parts: seen.append(parts))
    task.update_metric(metric, task.step(model, (Y, Y)))
    assert [tuple(part.shape) for part in seen[0]] == [(2, 3), (2,)]
