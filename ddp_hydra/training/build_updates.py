"""Builds what updates the weights: for each update of the task, its step among the ranks, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training import builders, parameter_groups
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.lr_schedules import FactorLR, ScheduleProgress
from ddp_hydra.training.run import check_updates
from ddp_hydra.training.train_step import TrainStep, trained_loss
from ddp_hydra.training.update import OptimizerStep, Update
from ddp_hydra.training.weighing import Weighing

UPDATES_REPEAT = 1000
"""Number of first steps in whose updates the names that a task updates are looked for."""

Stage = dict[str, Any]
"""Patterns and learning rate of parameters that are unfrozen together."""


class BuildUpdates:
    """Builds the updates of a run.

    Args:
        cfg: the resolved config.
        model: the model.
        task: the task.
        consensus: votes of the ranks.
        global_batch: samples of all ranks in a step.
        device: of the model.
    """

    def __init__(
        self,
        cfg: DictConfig,
        model: nn.Module,
        task: Task,
        consensus: StepConsensus,
        global_batch: int,
        device: torch.device,
    ) -> None:
        self.cfg, self.model, self.task, self.consensus = cfg, model, task, consensus
        self.global_batch, self.device = global_batch, device
        self.names = updates_of(task)

    def first(self, progress: ScheduleProgress, unfrozen: Sequence[Stage]) -> dict[str, Update]:
        # A collective.
        cfg = self.cfg
        parts = {name: self.task.part(self.model, name) if name else self.model for name in self.names}
        loss = trained_loss(self.task)
        optimizers = {
            name: builders.optimizer(cfg, part, self.global_batch, name, loss) for name, part in parts.items()
        }
        for stage in unfrozen:
            unfreeze(cfg, self.model, [(part, optimizers[name]) for name, part in parts.items()], stage)
        updates = {}
        for name, optimizer in optimizers.items():
            step = self._step(name, optimizer, builders.scaler(cfg, self.device))
            scheduler = builders.schedule(cfg, optimizer, progress.total, progress.epoch_steps or 1, name)
            weighing = Weighing(self.global_batch // self.consensus.world_size, self.consensus)
            updates[name] = Update(name, step, scheduler, self.consensus, weighing)
        self._relate(updates)
        return updates

    def _step(self, name: str, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> OptimizerStep:
        parallel = builders.parallel(self.cfg, TrainStep(self.task, self.model, name))
        trainer = self.cfg.trainer
        in_place = trainer.gradient_accumulation_steps > 1 and builders.makes_cuda_graphs(self.cfg, self.device)
        return OptimizerStep(parallel, optimizer, scaler, trainer.clip_norm, name, in_place)

    def _relate(self, updates: Mapping[str, Update]) -> None:
        all_trained = [parameter for update in updates.values() for _, parameter in update.optimizer_step.trained]
        may_be_late = self.device.type == "cuda" and self.cfg.trainer.on_nonfinite != "skip" and len(updates) == 1
        for update in updates.values():
            own = {parameter for _, parameter in update.optimizer_step.trained}
            update.others = [parameter for parameter in all_trained if parameter not in own]
            update.late = may_be_late and update.parallel.same_gradients

    def unfreeze(self, run: Any, patterns: Sequence[str], lr: float | None) -> None:
        # A collective.
        stage: Stage = {"patterns": list(patterns), "lr": lr}
        for update in run.updates.values():  # several updates freeze each other's parameters
            for parameter in update.others:
                parameter.requires_grad_()
        owners = [(update.parallel.part, update.optimizer_step.optimizer) for update in run.updates.values()]
        unfreeze(self.cfg, self.model, owners, stage)
        updates = {}
        for name, update in run.updates.items():
            old = update.optimizer_step
            extend(update.scheduler, old.optimizer)
            step = self._step(name, old.optimizer, old.scaler)
            updates[name] = Update(name, step, update.scheduler, self.consensus, update.weighing)
        self._relate(updates)
        run.updates = updates
        run.monitor.watch(updates.values())
        run.frozen_norms = parameter_groups.frozen_norms(self.model)
        run.state.unfrozen.append(stage)


def updates_of(task: Task) -> list[str]:
    of_steps = {step: task.updates(step) for step in range(1, UPDATES_REPEAT + 1)}
    names = list(dict.fromkeys(name for of_step in of_steps.values() for name in of_step))
    for step, of_step in of_steps.items():
        check_updates(task, step, of_step)
    if not names or ("" in names and len(names) > 1):
        raise ConfigError(
            f"{type(task).__name__}.updates(step) returned {names}: it must return the names of parts of the model, or "
            "('',) for the whole model"
        )
    return names


def unfreeze(cfg: DictConfig, model: nn.Module, parts: Sequence[tuple[nn.Module, Optimizer]], stage: Stage) -> None:
    named = {
        parameter: names
        for parameter, names in parameter_groups.with_names(model).items()
        if not parameter.requires_grad and parameter_groups.is_chosen(names, cfg.trainer.freeze)
    }
    fresh = {parameter for parameter, names in named.items() if parameter_groups.is_chosen(names, stage["patterns"])}
    if not fresh:
        names = [names[0] for names in named.values()]
        frozen = f"frozen are {', '.join(names[:6])}{', …' if names[6:] else ''}" if names else "nothing is frozen"
        raise ConfigError(f"unfreeze({stage['patterns']}) fits no frozen parameter; {frozen}")
    for parameter in fresh:
        parameter.requires_grad_()
    for part, optimizer in parts:
        own = [parameter for parameter in part.parameters() if parameter in fresh]
        first = optimizer.param_groups[0]
        rate = stage["lr"] if stage["lr"] is not None else first.get("initial_lr", first["lr"])
        for group in parameter_groups.grouped(own, decay_all=cfg.trainer.decay_all):
            optimizer.add_param_group({"lr": rate, **group})


def extend(scheduler: Any, optimizer: Optimizer) -> None:
    if not isinstance(scheduler, FactorLR):
        raise ConfigError(
            f"parameters can't be unfrozen with {type(scheduler).__name__}, whose parameter groups are fixed: take "
            "one of ddp_hydra's schedules, scheduler=cosine, linear, step or none"
        )
    for group in optimizer.param_groups[len(scheduler.base_lrs) :]:
        group.setdefault("initial_lr", group["lr"])
        scheduler.base_lrs.append(group["initial_lr"])
    scheduler.go_to(scheduler.last_epoch)
