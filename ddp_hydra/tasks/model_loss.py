"""Trains a model that computes its own loss, as those of Hugging Face's transformers do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.base import Step, Task
from ddp_hydra.tasks.counting import IGNORED
from ddp_hydra.tasks.model_counting import ModelCounting

_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")


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
        self.without, self.counting = tuple(without), ModelCounting(shift)

    def step(self, model: Any, batch: Any) -> Step:
        """Take the loss from the output, and count the labels that it is a mean of."""
        output = called(model, batch)
        loss = found(output, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"{type(model).__name__} returned a {type(output).__name__} without a loss: it must have `loss`, a "
                "scalar. Does the batch hold the labels?"
            )
        logits = found(output, "logits")
        with torch.no_grad():
            parts = {"logits": logits, "start_logits": found(output, "start_logits")}
            n, labels, summed = self.counting.count(bare(model), batch, loss.detach().reshape(()), parts)
        prediction = logits if isinstance(logits, Tensor) and labels is not None else None
        return Step(loss.reshape(()) if loss.ndim else loss, n, {}, prediction, labels, summed)

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


def bare(model: Any) -> Any:
    """Return a model without what torch wraps around it."""
    for name in ("_orig_mod", "module"):
        model = getattr(model, name, model) if type(model).__module__.startswith("torch.") else model
    return model


def called(model: Any, batch: Any) -> Any:
    """Call a model with a batch: by keywords, by position, or with the batch itself.

    Raises:
        ConfigError: the model can't take a column of the batch, as its error tells.
    """
    if isinstance(batch, Mapping):
        try:
            return model(**batch)
        except (TypeError, AttributeError, ValueError, IndexError) as error:
            if reason := refused_column(str(error), type(bare(model)).__name__, batch):
                raise ConfigError(f"{reason} ({type(error).__name__}: {error})") from error
            raise
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def refused_column(error: str, model: str, batch: Mapping[str, Any]) -> str:
    """Return which column of a batch a model can't take, and what to type; "" if its error doesn't tell.

    Args:
        error: text of the model's error.
        model: name of its class.
        batch: that it was given.
    """
    name = unknown[1] if (unknown := _UNKNOWN.search(error)) else ""
    if name in batch:
        return (
            f"{model} takes no {name}, and the batch has {', '.join(batch)}: choose columns with data.columns=[...], "
            f"or rename this one with data.rename='{{{name}: ...}}'"
        )
    text = [name for name, part in batch.items() if isinstance(part, (list, tuple)) and part and type(part[0]) is str]
    if text and not _TARGET.search(error):
        return (
            f"the column {text[0]} holds text, and {model} takes tensors: make numbers of it with data.transform (a "
            "tokenizer, the number of a class), or leave it out with data.columns=[...]"
        )
    if target := _TARGET.search(error):
        for name in sorted(batch, key=lambda name: name not in ("labels", "label")):
            if (
                isinstance(part := batch[name], Tensor)
                and not part.is_floating_point()
                and (part == int(target[1])).any()
            ):
                sample = int((part == int(target[1])).nonzero()[0, 0])
                return (
                    f"the column {name} holds {target[1]} in sample {sample} of a batch, which is no class of {model}: "
                    f"leave samples without a label out, or write {IGNORED} with data.transform; else give the model "
                    "more classes"
                )
    return ""


def found(output: Any, name: str) -> Any:
    """Return a part of a model's output; None if it has none."""
    if isinstance(output, Mapping):
        return output.get(name)
    if hasattr(output, name):
        return getattr(output, name)
    if isinstance(output, (tuple, list)) and output and name in ("loss", "logits"):
        has_loss = len(output) > 1 and isinstance(output[0], Tensor) and output[0].numel() == 1
        return output[1 if name == "logits" and has_loss else 0]
    return output if name == "loss" else None
