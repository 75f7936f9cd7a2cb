"""Makes a task's training step the forward pass of a module, whose errors show the shapes of input, output, target."""

from __future__ import annotations

import math
import numbers
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_hydra.console.text import user_path
from ddp_hydra.data.batch import described
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Step, Task

_OUTPUTS = ("prediction", "logits", "output")
"""Variables of the tasks that hold a model's output."""
_SHOWN = 8
OF_MODULES = vars(nn.Module()).keys()
"""Attributes of each module."""


class TrainStep(nn.Module):
    """A task's training step, for one of its updates.

    DDP wraps this module, not the model. So a task may call the model twice, parts of it, or its methods: for DDP, all
    of that is one forward pass.

    Attributes:
        part: what the update trains: the model, or a part of it.
        criterion: the task's loss, if it is a module: its parameters are trained with the model; else None.
        constant: makes a loss of 0 of a step in which nothing counts, with gradients of 0.
    """

    def __init__(self, task: Task, model: nn.Module, update: str = "") -> None:
        super().__init__()
        self.part = task.part(model, update) if update else model
        self.update, self.criterion = update, loss_module(task)
        if trained_loss(task) is not None and update:
            raise ConfigError(f"the loss {type(self.criterion).__name__} has parameters: make it a part of the model")
        self.constant: Callable[[Step], Tensor] = self._constant
        # No children of this module: DDP has to see the parameters of the part only.
        self._others: tuple[Task, Any] = (task, model)

    def wrap(self, wrapper: Callable[[nn.Module], Any]) -> None:
        # A method, since a module makes a child of any module that it is set.
        task, model = self._others
        self._others = (task, wrapper(model))

    def names(self) -> dict[nn.Parameter, str]:
        found = {parameter: name for name, parameter in self.part.named_parameters(prefix=self.update)}
        for name, parameter in self.criterion.named_parameters(prefix="loss") if self.criterion is not None else ():
            found.setdefault(parameter, name)
        return found

    def forward(self, batch: Any) -> Step:
        task, model = self._others
        with explained(batch):
            result = task.step(model, batch, **({"update": self.update} if self.update else {}))
        step = as_step(result, task)
        is_empty = not step.summed and not isinstance(step.n, Tensor | None) and not step.n
        if torch.is_grad_enabled() and (is_empty or not step.loss.requires_grad):
            return step._replace(loss=self.constant(step))
        return step

    def _constant(self, step: Step) -> Tensor:
        # Each trained parameter gets a gradient of zero, as DDP demands.
        if step.n is None or step.summed or float(step.n) > 0:
            raise ConfigError(
                "the task's loss depends on none of the weights that are trained (has it gone through .detach(), "
                ".item(), argmax or torch.no_grad()?): if nothing counts in this micro-batch, return Step(loss, n=0)"
            )
        sparse = sparse_weights(self)
        trained = [one for one in self.parameters() if one.requires_grad]
        nothing = [nothing_of(one, one in sparse).to(step.loss.dtype) for one in trained]
        return torch.stack(nothing).sum() if nothing else step.loss * 0


def sparse_weights(module: nn.Module) -> set[Tensor]:
    """Return the trained parameters whose gradients are sparse."""
    tables = [one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse]
    return {one.weight for one in tables if one.weight.requires_grad}


def nothing_of(parameter: Tensor, is_sparse: bool) -> Tensor:
    if is_sparse:  # DDP expects a sparse gradient
        return F.embedding(torch.zeros(0, dtype=torch.long, device=parameter.device), parameter, sparse=True).sum()
    return parameter.flatten()[:0].sum().real


def loss_module(task: Task) -> nn.Module | None:
    # It may have no tensors yet: a forward pass may make its buffers.
    criterion = getattr(task, "criterion", None)
    return criterion if isinstance(criterion, nn.Module) else None


def trained_loss(task: Task) -> nn.Module | None:
    loss = loss_module(task)
    return loss if loss is not None and any(one.requires_grad for one in loss.parameters()) else None


def attributes_of(task: Task) -> dict[str, Any]:
    # A task may be a module itself, which keeps its parameters, buffers and modules apart.
    if not isinstance(task, nn.Module):
        return vars(task)
    registered = (*task.named_parameters(recurse=False), *task.named_buffers(recurse=False), *task.named_children())
    return {name: value for name, value in vars(task).items() if name not in OF_MODULES} | dict(registered)


def modules_of(task: Task) -> list[nn.Module]:
    own = [task] if isinstance(task, nn.Module) else vars(task).values()
    parts = (*own, getattr(task, "criterion", None))
    return list(dict.fromkeys(part for part in parts if isinstance(part, nn.Module)))


def as_step(result: Any, task: Task | None = None) -> Step:
    # Where nothing counts, the loss is 0.
    step = result if isinstance(result, Step) else Step(result)
    loss, n = step.loss, step.n
    if not isinstance(loss, Tensor):
        given = "Step.loss is" if isinstance(result, Step) else "the task's step returned"
        raise ConfigError(f"{given} a {type(loss).__name__}: return the loss, a scalar tensor, or Step(loss, n, sums)")
    if task is not None:
        check_sums(step.sums, task)
    if loss.numel() != 1:
        what = f"the loss is {described(loss)}, and must be a scalar"
        raise ConfigError(f"{what}: return its mean, as by .mean(); a criterion must not have reduction=none")
    loss = loss.reshape(()) if loss.ndim else loss  # a view of a scalar would be one more node of the graph
    if isinstance(n, Tensor) and n.device.type == "cpu":
        n = n.item()
    if not isinstance(n, Tensor | None) and not 0 <= n < math.inf:
        raise ConfigError(f"the task's n is {n}: the loss is a mean over n things, so give 0 or more")
    if n is not None and not step.summed and (isinstance(n, Tensor) or not n):
        loss = loss.where(torch.as_tensor(n, device=loss.device) > 0, 0.0)
    return step if loss is step.loss and n is step.n else step._replace(loss=loss, n=n)


def check_sums(sums: Mapping[str, Any], task: Task) -> None:
    makes_own = type(task).metrics is not Task.metrics
    for name, value in sums.items():
        if name in ("loss", "n") or name.rpartition("/")[2] in ("n", "sum"):
            raise ConfigError(f"the task's sums have {name!r}, a name of the loop's own sums: give it another name")
        parts = [part for part in (value if isinstance(value, tuple) else (value,)) if part is not None]
        if not all(isinstance(part, (Tensor, numbers.Number)) for part in parts) or not 0 < len(parts) < 3:
            raise ConfigError(
                f"the task's sum {name!r} is {described(value)}: give a number, a tensor, or a pair (sum, count)"
            )
        if not makes_own and any(isinstance(part, Tensor) and part.ndim for part in parts):
            raise ConfigError(
                f"the task's sum {name!r} is {described(value)}: add it up over the micro-batch, as by .sum(), or "
                f"define {type(task).__name__}.metrics(sums), which makes numbers of it"
            )


@contextmanager
def explained(batch: Any) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        for line in _lines(error, batch):
            error.add_note(line)
        raise


def _lines(error: BaseException, batch: Any) -> Iterator[str]:
    yield f"the batch: {described(batch)}"
    if re.search(r"same dtype|should be the same|expected scalar type", str(error)):
        yield "the data set has to return the type of the weights: x.float() makes float32 of float64 and integers"
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, number in reversed(frames):
        path = user_path(frame.f_code.co_filename)
        tensors = [(name, one) for name, one in frame.f_locals.items() if isinstance(one, Tensor)]
        if path is not None and tensors:
            shown = ", ".join(f"{name} {described(one)}" for name, one in tensors[:_SHOWN])
            yield f"{path}, line {number}, in {frame.f_code.co_name}: {shown}"
            return
    for frame, _ in reversed(frames):
        for name in _OUTPUTS:
            if isinstance(output := frame.f_locals.get(name), Tensor):
                yield f"the model's output: {described(output)}"
                return
