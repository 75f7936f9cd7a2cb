"""Trains parameters that were frozen when the run began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from ddp_hydra.errors import ConfigError
from ddp_hydra.training import parameter_groups
from ddp_hydra.training.lr_schedules import FactorLR

Stage = dict[str, Any]
"""Patterns and learning rate of parameters that are unfrozen together."""


def unfreeze(cfg: DictConfig, model: nn.Module, parts: Sequence[tuple[nn.Module, Optimizer]], stage: Stage) -> None:
    """Let the optimizers train parameters that are frozen.

    Args:
        cfg: the config.
        model: the model.
        parts: each part of the model that has an optimizer, and that.
        stage: which parameters, and their learning rate.

    Raises:
        ConfigError: a pattern fits no frozen parameter.
    """
    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    chosen = {name for name in names if parameter_groups.is_chosen(name, stage["patterns"])}
    if not chosen:
        frozen = f"frozen are {', '.join(names[:6])}{', …' if names[6:] else ''}" if names else "nothing is frozen"
        raise ConfigError(f"unfreeze({stage['patterns']}) fits no frozen parameter; {frozen}")
    fresh = {parameter for name, parameter in model.named_parameters() if name in chosen}
    for parameter in fresh:
        parameter.requires_grad_()
    for part, optimizer in parts:
        own = [parameter for parameter in part.parameters() if parameter in fresh]
        first = optimizer.param_groups[0]
        rate = stage["lr"] if stage["lr"] is not None else first.get("initial_lr", first["lr"])
        for group in parameter_groups.grouped(own, decay_all=cfg.trainer.decay_all):
            optimizer.add_param_group({"lr": rate, **group})


def extend(scheduler: Any, optimizer: Optimizer) -> None:
    """Let a schedule set the rates of an optimizer's new groups, too.

    Raises:
        ConfigError: it is one of torch's, whose groups are fixed.
    """
    if not isinstance(scheduler, FactorLR):
        raise ConfigError(
            f"parameters can't be unfrozen with {type(scheduler).__name__}, whose parameter groups are fixed: take "
            "one of ddp_hydra's schedules, scheduler=cosine, linear, step or none"
        )
    for group in optimizer.param_groups[len(scheduler.base_lrs) :]:
        group.setdefault("initial_lr", group["lr"])
        scheduler.base_lrs.append(group["initial_lr"])
    scheduler.go_to(scheduler.last_epoch)
