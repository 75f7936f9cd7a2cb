"""Trains a model that computes its own loss, as those of Hugging Face's transformers do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.base import Step, Task
from ddp_hydra.tasks.counting import IGNORED

_SHIFTS = re.compile(r"ForCausalLM$|LMHeadModel$|DoubleHeadsModel$")
_DOES_NOT = re.compile(r"^(XLM|Flaubert)WithLMHeadModel$|^XLNetLMHeadModel$")
"""Classes of transformers whose labels are not shifted, although their names look so."""
TRIES = 4
"""Number of first batches whose loss may tell what it is a mean over: on a GPU, it is waited for."""


class ModelLoss(Task):
    """Takes the loss from the model's output: an object with `loss`, a dict with "loss", a tuple that begins with it.

    A dict batch is given by keywords, a tuple by position. Predictions are the output's `logits`. Where a dict batch
    has `labels`, the loss is a mean over those that are not -100, else over the samples.

    Args:
        without: keys of the batch that the model is not given when it predicts, such as its labels.
        shift: the model predicts labels[:, 1:], as causal language models do whose labels are their inputs; False: it
            predicts all labels; None: found from its class or, where that doesn't tell, from its loss and logits.
    """

    def __init__(self, without: tuple[str, ...] = ("labels", "label"), shift: bool | None = None) -> None:
        self.without, self.shift = tuple(without), shift
        self.guess: bool | None = None
        self.tries = TRIES

    def step(self, model: Any, batch: Any) -> Step:
        """Take the loss from the output, and count the labels that it is a mean of."""
        output = called(model, batch)
        loss = found(output, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"{type(model).__name__} returned a {type(output).__name__} without a loss: it must have `loss`, a "
                "scalar. Does the batch hold the labels?"
            )
        loss, logits = loss.reshape(()), found(output, "logits")
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor):
            return Step(loss)
        with torch.no_grad():
            return self._counted(bare(model), loss, logits if isinstance(logits, Tensor) else None, labels)

    def _counted(self, model: Any, loss: Tensor, logits: Tensor | None, labels: Tensor) -> Step:
        config, name = getattr(model, "config", None), type(model).__name__
        if name.endswith("ForCTC"):
            return Step(loss, summed=getattr(config, "ctc_loss_reduction", "mean") == "sum")
        if labels.is_floating_point():
            return Step(loss, labels.numel(), {}, logits, labels)
        ignore = IGNORED
        if name.endswith("ForSemanticSegmentation"):
            ignore = getattr(config, "semantic_loss_ignore_index", IGNORED)
        shift = labels.ndim == 2 and self._shifts(model, loss, logits, labels)
        counted = labels[:, 1:] if shift else labels
        if logits is not None and shift and logits.shape[:2] == labels.shape:
            logits = logits[:, :-1]
        return Step(loss, (counted != ignore).sum(), {}, logits, counted)

    def _shifts(self, model: Any, loss: Tensor, logits: Tensor | None, labels: Tensor) -> bool:
        """Return whether the model predicts the labels after the first one of each row."""
        if self.shift is not None:
            return self.shift
        names = [one.__name__ for one in type(model).__mro__]
        if any(map(_DOES_NOT.search, names)) or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return False
        if any(map(_SHIFTS.search, names)):
            return True
        if self.guess is None and logits is not None and self.tries:
            self.tries -= 1
            self.guess = shifts(float(loss), logits, labels)
        return bool(self.guess)

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric the logits and the labels that count: (answers, classes) and (answers,) for class numbers."""
        scores, labels = step.prediction, step.target
        if scores is None or labels is None:
            raise ConfigError(
                f"{type(metric).__name__}: metrics of task=model_loss need `labels` in the batch, a dict, and `logits` "
                "in the model's output: give metrics=none, or a task of your own"
            )
        scores = scores.float()
        if labels.is_floating_point() or scores.shape[:-1] != labels.shape:
            metric.update(scores.reshape(labels.shape) if scores.numel() == labels.numel() else scores, labels)
        elif type(metric).__name__ == "Perplexity":
            metric.update(scores, labels)
        else:
            counted = labels != IGNORED
            metric.update(scores[counted], labels[counted])

    def predict(self, model: Any, batch: Any) -> Tensor:
        """Return the output's logits."""
        if isinstance(batch, Mapping):
            batch = {name: part for name, part in batch.items() if name not in self.without}
        output = called(model, batch)
        logits = found(output, "logits")
        return logits if logits is not None else output


def shifts(loss: float, logits: Tensor, labels: Tensor) -> bool | None:
    """Return whether a loss is the cross-entropy of labels[:, 1:] rather than of all labels; None if it is neither."""
    if logits.shape[:-1] != labels.shape or logits.shape[-1] < 2:
        return None
    logits, labels = logits.float(), labels.long()
    pairs = ((logits, labels), (logits[:, :-1], labels[:, 1:]))
    if int(labels.max()) >= logits.shape[-1] or bool((labels[labels < 0] != IGNORED).any()):
        return None
    same, shifted = (
        abs(float(F.cross_entropy(scores.reshape(-1, logits.shape[-1]), right.reshape(-1))) - loss)
        for scores, right in pairs
    )
    near, far = min(same, shifted), max(same, shifted)
    return shifted < same if near < 0.01 * max(loss, 0.01) and near < 0.5 * far else None


def bare(model: Any) -> Any:
    """Return a model without what torch wraps around it."""
    for name in ("_orig_mod", "module"):
        model = getattr(model, name, model) if type(model).__module__.startswith("torch.") else model
    return model


def called(model: Any, batch: Any) -> Any:
    """Call a model with a batch: by keywords, by position, or with the batch itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def found(output: Any, name: str) -> Any:
    """Return a part of a model's output; None if it has none."""
    if isinstance(output, Mapping):
        return output.get(name)
    if hasattr(output, name):
        return getattr(output, name)
    if isinstance(output, (tuple, list)):
        return output[0 if name == "loss" else -1]
    return output if name == "loss" else None
