"""A run that goes on with another config than its checkpoint's: what the config says now wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ddp_hydra.config import checkpoint_config, objective
from ddp_hydra.errors import ConfigError
from ddp_hydra.training.checkpoint import State

SHOWN = 8


def restore(state: State, content: dict[str, Any]) -> str:
    """Put a captured state back, but for the settings that are others now; the optimizer's own state stays.

    Args:
        state: as the config makes it.
        content: of the checkpoint.

    Returns:
        What is other, for a person; "" for nothing.

    Raises:
        CheckpointError: it is of another model or optimizer.
    """
    before, now = content["config"], state.config
    optimizer, scheduler = state.optimizer, state.scheduler
    new_groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    schedule = {key: vars(scheduler)[key] for key in _others(before, now, "scheduler") if key in vars(scheduler)}
    is_other_schedule = "_target_" in _others(before, now, "scheduler")
    if is_other_schedule:  # it begins anew, and goes to where the run is
        progress = {**(content.get("progress") or {}), "taken": 0}
        content = {**content, "scheduler": scheduler.state_dict(), "progress": progress}
    state.restore(content)

    others = _others(before, now, "optimizer")
    for group, new in zip(optimizer.param_groups, new_groups, strict=True):
        group.update({key: new[key] for key in others if key in new and key != "lr"})
        if schedule:  # torch's schedulers keep some of theirs there
            group.update({key: value for key, value in new.items() if key not in optimizer.defaults})
    if is_other_schedule:
        for group, new in zip(optimizer.param_groups, new_groups, strict=True):
            group.update({key: new[key] for key in ("lr", "initial_lr") if key in new})
    elif "lr" in others or any(_base_batch_size(config) for config in (before, now)):
        _set_rates(state, new_groups)
    vars(scheduler).update(schedule)
    if (ema := state.extras.get("ema")) is not None and not content.get("ema"):  # wanted only now
        ema.model.load_state_dict(state.model.state_dict())
    if _objective(before) != _objective(now):
        state.best = None
        if (early_stop := state.extras.get("early_stop")) is not None:
            early_stop.load_state_dict({"best": None, "waited": 0})
    found = checkpoint_config.changes(before, now)
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _others(before: Mapping[str, Any], now: Mapping[str, Any], part: str) -> set[str]:
    """Return the keys of a part that are not what they were; one that interpolates another may be."""
    old, new = before.get(part) or {}, now.get(part) or {}
    absent = object()
    return {
        key
        for key in {**old, **new}
        if old.get(key, absent) != new.get(key, absent) or (isinstance(new.get(key), str) and "${" in new[key])
    }


def _base_batch_size(config: Mapping[str, Any]) -> Any:
    """Whether the learning rate goes by the global batch, which may be another."""
    return (config.get("trainer") or {}).get("base_batch_size")


def _set_rates(state: State, new_groups: list[dict[str, Any]]) -> None:
    """Let the learning rates be what they would be, had they begun as the config says now."""
    for number, (group, new) in enumerate(zip(state.optimizer.param_groups, new_groups, strict=True)):
        begun, begins = group.get("initial_lr", group["lr"]), new.get("initial_lr", new["lr"])
        if begins == begun:
            continue
        group["lr"] = group["lr"] * begins / begun if begun else begins
        group["initial_lr"] = begins
        if hasattr(state.scheduler, "base_lrs"):
            state.scheduler.base_lrs[number] = begins


def _objective(config: Mapping[str, Any]) -> tuple[str, str] | None:
    try:
        return objective.of(OmegaConf.create(dict(config)))
    except ConfigError:
        return None
