"""Chooses parts of a model: frozen parameters, parameters that decay, and modules that are computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ddp_hydra.console.text import is_chosen
from ddp_hydra.errors import ConfigError
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.parallel.weights import restored_buffers, unsaved


def with_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    # What the model has frozen itself stays so.
    named = with_names(model)
    names = [name for several in named.values() for name in several]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            raise ConfigError(
                f"trainer.freeze has {pattern!r}, but no parameter has such a name; some names: "
                f"{', '.join(names if len(names) <= 6 else [*names[:3], '…', *names[-3:]])}"
            )
    for parameter, several in named.items():
        if is_chosen(several, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"trainer.freeze={list(patterns)} leaves nothing to train: exclude something, as with '!fc.*'"
        )


def unfreeze(model: nn.Module, frozen: Sequence[str], patterns: Sequence[str]) -> set[nn.Parameter]:
    named = {
        parameter: names
        for parameter, names in with_names(model).items()
        if not parameter.requires_grad and is_chosen(names, frozen) and unsaved(model).isdisjoint(names)
    }
    fresh = {parameter for parameter, names in named.items() if is_chosen(names, patterns)}
    if not fresh:
        still = f"frozen are {shown([names[0] for names in named.values()], 6)}" if named else "nothing is frozen"
        raise ConfigError(f"unfreeze({patterns}) fits no frozen parameter; {still}")
    for parameter in fresh:
        parameter.requires_grad_()
    return fresh


def frozen_norms(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    # One that the model has frozen itself goes on with its statistics, as in torch.
    named = with_names(model)
    frozen = {one for one, names in named.items() if not one.requires_grad and is_chosen(names, patterns)}
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if norm.affine and frozen.issuperset(norm.parameters())]


def train_mode(model: nn.Module, frozen_norms: Iterable[nn.Module]) -> None:
    model.train()
    for layer in frozen_norms:
        layer.eval()


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    before = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:  # a `train` of its own may do more
            module.train(before[module])
        for part, is_training in before.items():
            part.training = is_training


def parameters(given: Iterable[nn.Parameter], decay_all: bool) -> list[dict[str, Any]] | list[nn.Parameter]:
    trained = [parameter for parameter in given if parameter.requires_grad]
    return trained if decay_all else grouped(trained, decay_all)


def grouped(trained: Sequence[nn.Parameter], decay_all: bool) -> list[dict[str, Any]]:
    if decay_all:
        return [{"params": list(trained)}] if trained else []
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def activation_checkpointing(model: nn.Module, classes: Iterable[str]) -> None:
    for name in classes:
        parts = [module for module in model.modules() if type(module).__name__ == name]
        if not parts:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(f"trainer.activation_checkpointing has {name!r}, but the model has {', '.join(known)}")
        for part in parts:
            part.forward = partial(_checkpointed, part.forward)


def _checkpointed(forward: Callable[..., Any], /, *inputs: Any, **options: Any) -> Any:
    if torch.compiler.is_compiling():  # then statistics are not computed again
        return checkpoint(forward, *inputs, use_reentrant=False, **options)
    part = forward.__self__  # type: ignore[attr-defined]
    return checkpoint(
        forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), restored_buffers(part)), **options
    )
