"""Decides when to log, validate and save: by counts, equal on all ranks, and by rank 0's clock; and when to end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig

from ddp_hydra.config import objective
from ddp_hydra.console.text import counted


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions that follow an optimizer step, or the last one of an epoch; `leave`: take no further step."""

    log: bool = False
    save: bool = False
    leave: bool = False
    validate: bool = False


@dataclass(frozen=True, slots=True)
class Cadence:
    """Decides what is due after a step and after an epoch. An interval of 0 means never.

    It has no side effects: equal counts give equal answers on all ranks.
    """

    total_steps: int
    log_every_steps: int
    checkpoint_every_steps: int = 0
    checkpoint_every_epochs: int = 1
    validate_every_epochs: int = 1
    validate_every_steps: int = 0

    @classmethod
    def from_config(cls, trainer: DictConfig, total_steps: int) -> Cadence:
        names = [one.name for one in fields(cls) if one.name != "total_steps"]
        return cls(total_steps, **{name: trainer[name] for name in names})

    def after_step(self, step: int, epoch_ends: bool, stop: bool, log: bool = False) -> Actions:
        # At the end of an epoch the checkpoint waits for the validation, see `after_epoch`. Metrics are logged before
        # each checkpoint, so that a resumed run has nothing counted yet, and before each validation.
        run_ends = step >= self.total_steps
        epoch_ends = epoch_ends or run_ends
        save = stop or (is_due(step, self.checkpoint_every_steps) and not epoch_ends)
        validate = self.validates_amid_epoch(step) and not epoch_ends and not stop
        logs = save or validate or epoch_ends or log or is_due(step, self.log_every_steps)
        return Actions(log=logs, save=save, leave=stop or run_ends, validate=validate)

    def validates_amid_epoch(self, step: int) -> bool:
        return is_due(step, self.validate_every_steps)

    def after_epoch(self, step: int, epochs: int) -> Actions:
        # At its end, a run validates and saves even amid an epoch.
        run_ends = step >= self.total_steps
        return Actions(
            validate=run_ends or is_due(epochs, self.validate_every_epochs) or is_due(step, self.validate_every_steps),
            save=run_ends or is_due(step, self.checkpoint_every_steps) or is_due(epochs, self.checkpoint_every_epochs),
        )


def is_due(count: int, every: int) -> bool:
    return every > 0 and count % every == 0


class LogClock:
    """Tells when `every_s` seconds have passed since the last log; None: never. Each interval may be longer."""

    def __init__(self, every_s: float | None, growth: float = 1.0) -> None:
        self.interval_s, self.growth = math.inf if every_s is None else every_s, growth
        self.began = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self.began >= self.interval_s

    def restart(self) -> None:
        if self.is_due():
            self.interval_s *= self.growth
        self.began = time.monotonic()


class EarlyStopping:
    """Counts validations without progress. All ranks have the same metrics, so they agree without a vote."""

    def __init__(self, metric: str, maximize: bool, patience: int | None, min_delta: float = 0.0) -> None:
        self.metric, self.sign = metric, 1.0 if maximize else -1.0
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.validations_without_progress = 0

    def update(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self.metric)
        if self.patience is None or value is None:
            return False
        if value == value and (self.best is None or self.sign * (value - self.best) > self.min_delta):
            self.best, self.validations_without_progress = value, 0
        else:
            self.validations_without_progress += 1
        return self.should_stop

    @property
    def reason(self) -> str:
        what = "validation" if objective.is_of_validation(self.metric) else "epoch"
        return f"no progress in {self.metric} for {counted(self.validations_without_progress, what)}"

    @property
    def should_stop(self) -> bool:
        return self.patience is not None and self.validations_without_progress >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "validations_without_progress": self.validations_without_progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.validations_without_progress = state["best"], state["validations_without_progress"]
