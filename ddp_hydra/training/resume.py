"""Restores a checkpoint into a run whose config may have changed since: the new config wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from torch.optim import Optimizer

from ddp_hydra.config import checkpoint_config, objective
from ddp_hydra.errors import ConfigError
from ddp_hydra.training.state import State, each

SHOWN = 8


def restore(state: State, content: dict[str, Any]) -> str:
    """Restore a captured state, except the settings that the new config changes.

    Args:
        state: as the new config builds it.
        content: the checkpoint.

    Returns:
        The settings that changed, for a person to read; "" for none.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer.
    """
    before, now = content["config"], state.config
    schedulers = dict(each(state.scheduler))
    settings = [_Settings(name, optimizer, schedulers[name], before, now) for name, optimizer in each(state.optimizer)]
    if any(before.get(part) != now.get(part) for part in ("task", "loss")):
        content = {**content, "epoch_means": None}  # sums of what another task has counted
    if any(one.is_other_schedule for one in settings):
        for one in settings:
            one.is_other_schedule = True
        # The new schedule starts at 0, and is moved to the run's position later.
        progress = {**(content.get("progress") or {}), "taken": 0}
        content = {**content, "scheduler": state.scheduler.state_dict(), "progress": progress}
    state.restore(content)
    for one in settings:
        one.put_back()
    if (ema := state.extras.get("ema")) is not None and not content.get("ema"):
        # The checkpoint has no average: start from its weights.
        ema.model.load_state_dict(state.model.state_dict())
    if before != now and _objective(before) != _objective(now):
        state.best = None
        if (early_stopping := state.extras.get("early_stopping")) is not None:
            early_stopping.load_state_dict({"best": None, "validations_without_progress": 0})
    changes = checkpoint_config.changes(before, now)
    more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return ", ".join(changes[:SHOWN]) + more


class _Settings:
    """The settings that the new config gives an optimizer and its schedule.

    Args:
        name: of the update; "" for the only one.
        optimizer: as the new config builds it.
        scheduler: as the new config builds it.
        before: the checkpoint's config.
        now: the new config.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, scheduler: Any, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        changed = _changed_keys(before, now, "scheduler", name)
        self.schedule = {key: vars(scheduler)[key] for key in changed if key in vars(scheduler)}
        self.is_other_schedule = "_target_" in changed
        self.changed = _changed_keys(before, now, "optimizer", name)
        # If trainer.base_batch_size is set, the learning rate depends on the global batch.
        by_batch = any((config.get("trainer") or {}).get("base_batch_size") for config in (before, now))
        self.has_other_rates = "lr" in self.changed or by_batch

    def put_back(self) -> None:
        """Replace the checkpoint's settings by those that changed."""
        for group, new in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update({key: new[key] for key in self.changed if key in new and key != "lr"})
            if self.schedule:  # torch's schedulers keep some of their settings there
                group.update({key: value for key, value in new.items() if key not in self.optimizer.defaults})
            if self.is_other_schedule:
                group.update({key: new[key] for key in ("lr", "initial_lr") if key in new})
        if self.has_other_rates and not self.is_other_schedule:
            self._set_rates()
        vars(self.scheduler).update(self.schedule)

    def _set_rates(self) -> None:
        """Scale the learning rates to what they would be if the run had begun with the new config."""
        for number, (group, new) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True)):
            old_lr, new_lr = group.get("initial_lr", group["lr"]), new.get("initial_lr", new["lr"])
            if new_lr == old_lr:
                continue
            group["lr"] = group["lr"] * new_lr / old_lr if old_lr else new_lr
            group["initial_lr"] = new_lr
            if hasattr(self.scheduler, "base_lrs"):
                self.scheduler.base_lrs[number] = new_lr


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], section: str, name: str) -> set[str]:
    """Return the keys of a section whose values changed. A value that interpolates another key may have changed.

    The update called `name` may have a node of its own in the section.
    """
    old, new = (config.get(section) or {} for config in (before, now))
    old, new = (node.get(name) or {} if name and "_target_" not in node else node for node in (old, new))
    absent = object()
    return {
        key
        for key in {**old, **new}
        if old.get(key, absent) != new.get(key, absent) or (isinstance(new.get(key), str) and "${" in new[key])
    }


def _objective(config: Mapping[str, Any]) -> tuple[str, str] | None:
    try:
        return objective.of(OmegaConf.create(dict(config)))
    except ConfigError:
        return None
