"""Finds the arguments that a model is exported with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_hydra.data import streams
from ddp_hydra.data.batch import described, mapped, tensors
from ddp_hydra.errors import ConfigError
from ddp_hydra.training import build_data, builders
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.load_run import Trained

SIZES = (2, 3)
"""Sizes of the batches that an export is checked with, where the batch may have any size."""


@dataclass
class Example:
    """The arguments with which a task calls the model.

    Args:
        args: by position.
        kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of_size(self, size: int) -> Example:
        """Return arguments with so many samples: the first ones, repeated."""

        def resize(tensor: Tensor) -> Tensor:
            return tensor[torch.arange(size) % len(tensor)] if self.is_batched(tensor) else tensor

        return Example(mapped(resize, self.args), mapped(resize, self.kwargs))

    def is_batched(self, tensor: Tensor) -> bool:
        """Tell whether the first axis of a tensor is that of the samples."""
        return bool(tensor.ndim) and len(tensor) == self.size

    @property
    def size(self) -> int:
        """The number of samples."""
        return next((len(tensor) for tensor in tensors([*self.args, *self.kwargs.values()]) if tensor.ndim), 0)

    def dynamic(self) -> dict[str, Any]:
        """Return the shapes for torch.export by argument: the first axis of each batched tensor may have any size."""
        batch = torch.export.Dim("batch")

        def shape(tensor: Any) -> Any:
            return {0: batch} if isinstance(tensor, Tensor) and self.is_batched(tensor) else None

        return {"args": pytree.tree_map(shape, self.args), "kwargs": pytree.tree_map(shape, self.kwargs)}

    def described(self) -> Mapping[str, str]:
        """Return the shape and type of each argument."""
        named = {**{f"input {number}": part for number, part in enumerate(self.args)}, **self.kwargs}
        return {name: described(part) for name, part in named.items() if isinstance(part, Tensor)}


def example_of(trained: Trained, split: str, input_shape: Sequence[int] | None) -> Example:
    """Return arguments for the model: those with which its task predicts samples of the run's data.

    Args:
        trained: the model.
        split: the data set, "val" or "train"; "train" where the run has no other.
        input_shape: of one sample of random numbers instead, without the batch axis.
    """
    if input_shape is not None:
        generator = torch.Generator().manual_seed(0)
        return Example((torch.randn(SIZES[0], *input_shape, generator=generator).to(trained.device),), {})
    cfg = trained.cfg
    split = split if cfg.data.get(split) else "train"
    build_data.fill_features(cfg.data[split], trained.data)
    with build_data.opened(cfg, split) as data:
        trained.data.check_model(DataDescription.of(data), f"data.{split}")
        loader = build_data.loader(cfg, data, trained.device, channels_last=False)
        if streams.is_stream(data):
            with closing(loader.each_once(SIZES[0], 0, 1)) as batches:  # type: ignore[type-var]
                batch, numbers = next(batches, (None, []))
        else:
            numbers = list(range(min(len(data), SIZES[0])))
            (batch,) = loader.load([numbers]) if numbers else (None,)
        if len(numbers) < SIZES[0]:
            raise ConfigError(
                f"the data set has {len(numbers)} samples, and an example needs {SIZES[0]}: give input_shape"
            )
        task = builders.task(cfg, trained.data, trained.device)
        return called_with(trained.model, lambda: task.predict(trained.model, batch))


def called_with(model: nn.Module, call: Callable[[], Any]) -> Example:
    """Return the arguments of the first call of a model."""
    calls: list[Example] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(Example(tuple(args), dict(kwargs))), with_kwargs=True
    )
    try:
        with torch.no_grad():
            call()
    finally:
        hook.remove()
    if not calls:
        raise ConfigError(
            "the task predicts without calling the whole model, so it is not known what the model takes: give "
            "input_shape=[…], the shape of one sample"
        )
    return calls[0]
