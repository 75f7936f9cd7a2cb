"""Builds what updates the weights: for each update of the task, its step among the ranks, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from ddp_hydra.training.parallel import broadcast
from ddp_hydra.training.train_step import TrainStep, trained_loss
from ddp_hydra.training.update import OptimizerStep, Update, Weighing, check_updates

UPDATES_REPEAT = 1000
"""Number of first steps in whose updates the names that a task updates are looked for."""

Stage = dict[str, Any]
"""Patterns and learning rate of parameters that are unfrozen together."""


class UpdateBuilder:
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
        steps = {name: self._step(name, one, builders.scaler(cfg, self.device)) for name, one in optimizers.items()}
        self._send_others(steps.values())
        schedules = {
            name: builders.schedule(cfg, optimizer, progress.total, progress.epoch_steps or 1, name)
            for name, optimizer in optimizers.items()
        }
        samples = self.global_batch // self.consensus.world_size
        return self._updates(steps, schedules, {name: Weighing(samples, self.consensus) for name in steps})

    def _send_others(self, steps: Iterable[OptimizerStep]) -> None:
        # A collective. DDP sends what a step trains; other parts of the model, and the task's own models, begin alike.
        if self.consensus.world_size > 1:
            modules = [self.model, *(part for part in vars(self.task).values() if isinstance(part, nn.Module))]
            sent = {id(one) for step in steps for one in tensors_of(step.parallel.step)}
            broadcast(one for module in modules for one in tensors_of(module) if id(one) not in sent)

    def _step(self, name: str, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> OptimizerStep:
        parallel = builders.parallel(self.cfg, TrainStep(self.task, self.model, name))
        trainer = self.cfg.trainer
        in_place = trainer.gradient_accumulation_steps > 1 and builders.makes_cuda_graphs(self.cfg, self.device)
        return OptimizerStep(parallel, optimizer, scaler, trainer.clip_norm, name, in_place)

    def _updates(
        self, steps: Mapping[str, OptimizerStep], schedules: Mapping[str, Any], weighings: Mapping[str, Weighing]
    ) -> dict[str, Update]:
        trained = {name: {parameter: None for _, parameter in step.trained} for name, step in steps.items()}
        may_be_late = self.device.type == "cuda" and self.cfg.trainer.on_nonfinite != "skip" and len(steps) == 1
        return {
            name: Update(
                name,
                step,
                schedules[name],
                self.consensus,
                weighings[name],
                others=[one for several in trained.values() for one in several if one not in trained[name]],
                late=may_be_late and step.parallel.same_gradients,
            )
            for name, step in steps.items()
        }

    def unfrozen(self, updates: Mapping[str, Update], stage: Stage) -> dict[str, Update]:
        # A collective. The updates that train more have the optimizers, schedules and weighings of those before.
        for update in updates.values():  # several updates freeze each other's parameters
            for parameter in update.others:
                parameter.requires_grad_()
        owners = [(update.parallel.part, update.optimizer_step.optimizer) for update in updates.values()]
        unfreeze(self.cfg, self.model, owners, stage)
        steps = {}
        for name, update in updates.items():
            old = update.optimizer_step
            extend(update.scheduler, old.optimizer)
            steps[name] = self._step(name, old.optimizer, old.scaler)
        schedules = {name: update.scheduler for name, update in updates.items()}
        return self._updates(steps, schedules, {name: update.weighing for name, update in updates.items()})


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


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
