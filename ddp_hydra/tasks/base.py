"""Defines the base class of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ddp_hydra.errors import ConfigError


class Step(NamedTuple):
    """The result of a micro-batch.

    Args:
        loss: a mean over the micro-batch, a scalar.
        n: the number of things that it is a mean of: samples, pixels or tokens that count, the sum of their weights; a
            scalar on the device where that depends on the data. None: the samples that the data set was asked for, also
            where its `collate` leaves some out. The step's gradient is the gradient of the mean over the things of all
            micro-batches and ranks.
        sums: name -> a sum over the micro-batch: a number, a scalar, or a tensor of any shape. The sums of all
            micro-batches and ranks are added up in 64 bits, so each sample counts once, whatever the batches. A pair
            (sum, count) is divided by its own count instead of by `n`; with None as the count, by nothing.
        prediction: for the metrics that the config names (`metrics=`); None if they can't be used.
        target: what the prediction should be.
        summed: the loss is a sum over the micro-batch; the step's loss is the sum over all micro-batches and ranks.
    """

    loss: Tensor
    n: float | Tensor | None = None
    sums: Mapping[str, Tensor | float | tuple[Tensor | float, Tensor | float | None]] = {}
    prediction: Any = None
    target: Any = None
    summed: bool = False


class Task:
    """Says what a training step means.

    A subclass defines `step`. It knows nothing of ranks, micro-batches or precision: the loop handles these.

    Attributes:
        note: a line of the header on what the loss weighs; "" for none.
    """

    note: str = ""

    def step(self, model: Any, batch: Any) -> Step | Tensor:
        """Compute the loss of a micro-batch in training.

        Args:
            model: the model of the config. Call it, parts of it, or its methods, as often as needed.
            batch: as the data set makes it: a tensor, a tuple, a dict …, on the device of the model.

        Returns:
            The loss with the sums for the metrics, or the loss alone.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no step(model, batch)")

    def validation_step(self, model: Any, batch: Any) -> Step | Tensor:
        """Compute the loss of a batch in validation; by default, as in training. It is called without gradients."""
        return self.step(model, batch)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute metrics from sums over many batches and all ranks.

        By default, each is divided by its own count, or else by `n`.

        Args:
            sums: name -> sum, float64 on the CPU: `Step.sums`, `n`, and `loss` times `n`. The count of a pair is under
                "name/n"; a sum that nothing divides is under "name/sum", as a loss which is `summed`. With updates that
                have a name, each name begins with the update's: "generator/loss".
        """
        found = {}
        for name, total in sums.items():
            prefix, _, last = name.rpartition("/")
            n = _count_of(name, sums)
            if last == "sum":
                found[prefix] = float(total)
            elif last != "n" and n and total.ndim == 0:
                found[name] = float(total / n)
        return found

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric of the config, as of torchmetrics, prediction and target of a batch.

        Raises:
            ConfigError: the step has none.
        """
        if step.prediction is None or step.target is None:
            own = type(self).__name__
            raise ConfigError(
                f"{type(metric).__name__}: a metric of the config needs Step(…, prediction=, target=), which {own} "
                f"leaves out: give metrics=none, or define {own}.update_metric(metric, step)"
            )
        metric.update(step.prediction, step.target)

    def predict(self, model: Any, batch: Any) -> Tensor | Mapping[str, Any]:
        """Compute predictions; by default, the output of the model. It is called without gradients.

        Args:
            model: in evaluation mode.
            batch: as in training, or without targets.

        Returns:
            A row for each sample: a tensor (batch, ...), or name -> tensor or list of that length.
        """
        return model(inputs(batch))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain values; by default, nothing.

        Modules among the task's attributes need not be in it: checkpoints have each one that training changes.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, whose tensors are on the CPU.

        With `trainer.on_nonfinite`, it may be an empty one, `{}`, if that is what `state_dict` has returned.
        """

    def updates(self, step: int) -> Sequence[str]:
        """Return the updates of a step, in order: "" alone updates the whole model.

        A name is the name of a part of the model, which has an optimizer of its own. `step` is called as
        `step(model, batch, update=name)` for each, after the one before has changed the weights.

        Args:
            step: its number, from 1.
        """
        return ("",)

    def part(self, model: nn.Module, update: str) -> nn.Module:
        """Return the part of the model that an update trains; by default, the attribute of that name."""
        try:
            return model.get_submodule(update)
        except AttributeError:
            there = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"{type(self).__name__}.updates(step) names {update!r}, and {type(model).__name__} has {there or 'no'} "
                f"modules: name one of them, or define {type(self).__name__}.part(model, update)"
            ) from None


def _count_of(name: str, sums: Mapping[str, Tensor]) -> Tensor | None:
    """Return what a sum is divided by: its own count, or the `n` of its update, never the count of another sum."""
    n = sums.get(f"{name}/n")
    while n is None and name:
        name = name.rpartition("/")[0]
        n = None if name in sums else sums.get(f"{name}/n".removeprefix("/"))
    return n


def inputs(batch: Any) -> Any:
    """Return the input of a batch: the first part of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def target_of(batch: Any) -> Tensor | None:
    """Return the targets of a batch (x, y), the only tuple or list of which the second part is known to be these."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
    return batch[1] if is_pair else None


def pair(batch: Any) -> Any:
    """Return a batch of inputs and targets.

    Raises:
        ConfigError: it is something else.
    """
    if target_of(batch) is not None:
        return batch
    raise ConfigError(
        f"this task takes batches (x, y) with a tensor y, and the data set makes a {_kind_of(batch)}: let __getitem__ "
        "or collate return x and y, or type task=model_loss for a model that takes the batch and returns its loss"
    )


def output_of(model: Any, x: Any) -> Tensor:
    """Return the output of a model.

    Raises:
        ConfigError: it is no tensor.
    """
    output = model(x)
    if isinstance(output, Tensor):
        return output
    raise ConfigError(
        f"this task takes a model that returns a tensor, and the model returned a {_kind_of(output)}: let its forward "
        "return the tensor of scores, or type task=model_loss for a model that takes the batch and returns its loss"
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)} parts ({', '.join(type(part).__name__ for part in value)})"
    return f"dict of {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
