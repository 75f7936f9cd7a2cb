"""Trains a model that computes its own loss, as those of Hugging Face's transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddp_hydra.tasks.base import Step, Task


class ModelLoss(Task):
    """Takes the loss from the model's output: an object with `loss`, a dict with "loss", a tuple that begins with it.

    A dict batch is given by keywords, a tuple by position. Predictions are the output's `logits`.

    Args:
        without: keys of the batch that the model is not given when it predicts, such as its labels.
    """

    def __init__(self, without: tuple[str, ...] = ("labels", "label")) -> None:
        self.without = tuple(without)

    def step(self, model: Any, batch: Any) -> Step:
        """Take the loss from the output."""
        output = called(model, batch)
        loss = found(output, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"{type(model).__name__} returned a {type(output).__name__} without a loss: it must have `loss`, a "
                "scalar. Does the batch hold the labels?"
            )
        return Step(loss.reshape(()))

    def predict(self, model: Any, batch: Any) -> Tensor:
        """Return the output's logits."""
        if isinstance(batch, Mapping):
            batch = {name: part for name, part in batch.items() if name not in self.without}
        output = called(model, batch)
        logits = found(output, "logits")
        return logits if logits is not None else output


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
