"""Restores a checkpoint into a run whose config may have changed since: the new config wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ddp_hydra.config import checkpoint_config, objective
from ddp_hydra.errors import ConfigError
from ddp_hydra.training.checkpoint import State

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
    optimizer, scheduler = state.optimizer, state.scheduler
    new_groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    schedule = {key: vars(scheduler)[key] for key in _changed_keys(before, now, "scheduler") if key in vars(scheduler)}
    is_other_schedule = "_target_" in _changed_keys(before, now, "scheduler")
    if is_other_schedule:  # the new schedule starts at 0, and is moved to the run's position later
        progress = {**(content.get("progress") or {}), "taken": 0}
        content = {**content, "scheduler": scheduler.state_dict(), "progress": progress}
    state.restore(content)

    changed = _changed_keys(before, now, "optimizer")
    for group, new in zip(optimizer.param_groups, new_groups, strict=True):
        group.update({key: new[key] for key in changed if key in new and key != "lr"})
        if schedule:  # torch's schedulers keep some of their settings there
            group.update({key: value for key, value in new.items() if key not in optimizer.defaults})
    if is_other_schedule:
        for group, new in zip(optimizer.param_groups, new_groups, strict=True):
            group.update({key: new[key] for key in ("lr", "initial_lr") if key in new})
    elif "lr" in changed or any(_base_batch_size(config) for config in (before, now)):
        _set_rates(state, new_groups)
    vars(scheduler).update(schedule)
    if (ema := state.extras.get("ema")) is not None and not content.get(
        "ema"
    ):  # the checkpoint has no average: start from its weights
        ema.model.load_state_dict(state.model.state_dict())
    if _objective(before) != _objective(now):
        state.best = None
        if (early_stopping := state.extras.get("early_stopping")) is not None:
            early_stopping.load_state_dict({"best": None, "validations_without_progress": 0})
    changes = checkpoint_config.changes(before, now)
    more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return ", ".join(changes[:SHOWN]) + more


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], section: str) -> set[str]:
    """Return the keys of a section whose values changed. A value that interpolates another key may have changed."""
    old, new = before.get(section) or {}, now.get(section) or {}
    absent = object()
    return {
        key
        for key in {**old, **new}
        if old.get(key, absent) != new.get(key, absent) or (isinstance(new.get(key), str) and "${" in new[key])
    }


def _base_batch_size(config: Mapping[str, Any]) -> Any:
    """Return trainer.base_batch_size: if it is set, the learning rate depends on the global batch."""
    return (config.get("trainer") or {}).get("base_batch_size")


def _set_rates(state: State, new_groups: list[dict[str, Any]]) -> None:
    """Scale the learning rates to what they would be if the run had begun with the new config."""
    for number, (group, new) in enumerate(zip(state.optimizer.param_groups, new_groups, strict=True)):
        old_lr, new_lr = group.get("initial_lr", group["lr"]), new.get("initial_lr", new["lr"])
        if new_lr == old_lr:
            continue
        group["lr"] = group["lr"] * new_lr / old_lr if old_lr else new_lr
        group["initial_lr"] = new_lr
        if hasattr(state.scheduler, "base_lrs"):
            state.scheduler.base_lrs[number] = new_lr


def _objective(config: Mapping[str, Any]) -> tuple[str, str] | None:
    try:
        return objective.of(OmegaConf.create(dict(config)))
    except ConfigError:
        return None
