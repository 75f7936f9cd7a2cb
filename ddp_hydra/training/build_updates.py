"""Builds what updates the weights: for each update of the task, its step among the ranks, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training import builders, parameter_groups, precision, unfreeze
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.optimizer_step import OptimizerStep
from ddp_hydra.training.schedule_progress import ScheduleProgress
from ddp_hydra.training.step_check import StepCheck
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import Update

UPDATES_REPEAT = 1000
"""The updates of so many first steps hold every name that a task updates."""


@dataclass
class Part:
    """Hold what one update trains.

    Args:
        step: its optimizer, on the training step among the ranks.
        scheduler: of the learning rate.
    """

    step: OptimizerStep
    scheduler: Any


class BuildUpdates:
    """Builds the updates of a run.

    Args:
        cfg: the resolved config.
        model: the model.
        task: the task.
        global_batch: samples of all ranks in a step.
        device: of the model.
    """

    def __init__(self, cfg: DictConfig, model: nn.Module, task: Task, global_batch: int, device: torch.device) -> None:
        self.cfg, self.model, self.task = cfg, model, task
        self.global_batch, self.device = global_batch, device
        self.names = updates_of(task)

    def first(self, progress: ScheduleProgress, unfrozen: Sequence[unfreeze.Stage]) -> dict[str, Part]:
        """Build the parts of a run that begins, or goes on. A collective.

        Args:
            progress: how long the schedules are.
            unfrozen: what was unfrozen before the checkpoint, in this order.
        """
        cfg = self.cfg
        parts = {name: self.task.part(self.model, name) if name else self.model for name in self.names}
        optimizers = {name: builders.optimizer(cfg, part, self.global_batch, name) for name, part in parts.items()}
        for stage in unfrozen:
            unfreeze.unfreeze(cfg, self.model, [(part, optimizers[name]) for name, part in parts.items()], stage)
        return {
            name: Part(
                self._step(name, optimizer, precision.scaler(cfg.trainer.precision, self.device)),
                builders.schedule(cfg, optimizer, progress.total, progress.epoch_steps or 1, name),
            )
            for name, optimizer in optimizers.items()
        }

    def _step(self, name: str, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> OptimizerStep:
        parallel = builders.parallel(self.cfg, TrainStep(self.task, self.model, name))
        return OptimizerStep(parallel, optimizer, scaler, self.cfg.trainer.clip_norm, name)

    def updates(self, parts: Mapping[str, Part], consensus: StepConsensus) -> dict[str, Update]:
        """Put together what the loop needs of each update, by its name."""
        updates = {}
        all_trained = [parameter for part in parts.values() for _, parameter in part.step.trained]
        may_be_late = self.device.type == "cuda" and self.cfg.trainer.on_nonfinite != "skip" and len(parts) == 1
        for name, part in parts.items():
            own = {parameter for _, parameter in part.step.trained}
            others = [parameter for parameter in all_trained if parameter not in own]
            late = may_be_late and part.step.parallel.same_gradients
            check = StepCheck(part.step, consensus, late)
            updates[name] = Update(name, part.step.parallel, part.step, check, others)
        return updates

    def unfreeze(self, run: Any, patterns: Sequence[str], lr: float | None) -> None:
        """Train frozen parameters from now on; see `View.unfreeze`. A collective.

        Args:
            run: the `training.run.Run` that these updates were built for; it gets new ones.
            patterns: of parameter names.
            lr: the optimizer's own rate for them; None: that of the others.
        """
        stage: unfreeze.Stage = {"patterns": list(patterns), "lr": lr}
        for update in run.updates.values():  # several updates freeze each other's parameters
            for parameter in update.others:
                parameter.requires_grad_()
        owners = [(update.parallel.part, update.optimizer_step.optimizer) for update in run.updates.values()]
        unfreeze.unfreeze(self.cfg, self.model, owners, stage)
        parts = {}
        for (name, update), (_, scheduler) in zip(run.updates.items(), run.state.schedulers, strict=True):
            old = update.optimizer_step
            unfreeze.extend(scheduler, old.optimizer)
            parts[name] = Part(self._step(name, old.optimizer, old.scaler), scheduler)
        run.updates = self.updates(parts, run.consensus)
        for update in run.updates.values():
            run.monitor.stragglers.watch(update.parallel.step)
        run.frozen_norms = parameter_groups.frozen_norms(self.model)
        run.state.unfrozen.append(stage)


def updates_of(task: Task) -> list[str]:
    """Return the names of all updates that a task makes, in the order of the first steps.

    Raises:
        ConfigError: it names none, or parts beside the whole model.
    """
    names = list(dict.fromkeys(name for step in range(1, UPDATES_REPEAT + 1) for name in task.updates(step)))
    if not names or ("" in names and len(names) > 1):
        raise ConfigError(
            f"{type(task).__name__}.updates(step) returned {names}: it must return the names of parts of the model, or "
            "('',) for the whole model"
        )
    return names
