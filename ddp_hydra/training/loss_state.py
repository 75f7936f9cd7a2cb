"""What a loss takes from a checkpoint, where the config has changed since: its own numbers, not those of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from ddp_hydra import results
from ddp_hydra.config.hydra_compat import config_of
from ddp_hydra.config.redact import HIDDEN
from ddp_hydra.config.targets import init_parameters
from ddp_hydra.data import draws
from ddp_hydra.training import builders, plain_state
from ddp_hydra.training.task_state import fingerprint
from ddp_hydra.training.train_step import loss_module

_NODES = ("task", "loss")


def fitting(
    loss: nn.Module,
    saved: Any,
    before: Mapping[str, Any],
    cfg: DictConfig,
    data: Any,
    rank: int = 0,
    check: Callable[[DictConfig], None] = lambda former: None,
) -> Any:
    """Return the state for a loss: parameters that train, and what both configs begin alike, are the checkpoint's.

    Args:
        saved: the state in the checkpoint.
        before: the checkpoint's config.
        cfg: the config that the loss was built by.
        data: what its task was built for.
        rank: rank 0 warns.
        check: raises, if the former task and loss must not be built. It gets the ones that have changed.

    Returns:
        None, if nothing of the checkpoint fits: the loss begins anew.
    """
    if not saved:
        return None
    whole: Any = OmegaConf.to_container(cfg, resolve=True)
    now = {key: whole.get(key) for key in _NODES}
    former = _former(before, now)
    if former == now:
        return saved
    source = _source(cfg, loss)
    if (former[source] or {}).get("_target_") != now[source].get("_target_"):
        return None
    if former[source] == now[source] and (source == "loss" or former["loss"] == now["loss"]):
        return saved
    own = plain_state.encode(loss.state_dict(), "loss")
    trained = {name for name, one in loss.named_parameters(remove_duplicate=False) if one.requires_grad}
    is_checked = False
    try:
        check(config_of({key: former[key] for key in _NODES if former[key] != now[key]}))
        is_checked = True
        then, fresh = (_built(one, source, data) for one in (config_of({**whole, **former}), cfg))
    except Exception as error:  # of a class that takes other arguments now
        if rank == 0:
            # A class has got the secrets of this run, and its error may name them.
            found = type(error.__cause__ or error).__name__ if is_checked else f"{type(error).__name__}: {error}"
            reason = " ".join(found.split())
            results.warn(
                f"{type(loss).__name__} can't be built by the former {source} config ({reason:.200}), which would tell "
                "which of its buffers the config gives: all of them begin anew"
            )
        return {name: saved[name] if name in trained and name in saved else value for name, value in own.items()}
    if type(then) is not type(loss):
        return None
    begun, begin = then.state_dict(), fresh.state_dict()
    kept = {name for name in saved if name in trained or _are_alike(name, begun, begin)}
    return {name: value for name, value in own.items() if name not in kept} | {name: saved[name] for name in kept}


def _former(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    # Values only: a text that was escaped would be an interpolation in a config.
    stored = OmegaConf.create(dict(before))
    return {key: _resolved(stored, key, now[key]) if key in before else None for key in _NODES}


def _resolved(node: Any, key: Any, own: Any) -> Any:
    # A value that no checkpoint keeps, or that reads the environment of another host, is as it is now.
    try:
        value = node[key]
    except OmegaConfBaseException:
        return own
    if OmegaConf.is_dict(value):
        return {name: _resolved(value, name, own.get(name) if isinstance(own, dict) else None) for name in value}
    if OmegaConf.is_list(value):
        owns = own if isinstance(own, list) else []
        return [_resolved(value, n, owns[n] if n < len(owns) else None) for n in range(len(value))]
    return own if isinstance(value, str) and HIDDEN in value else value


def _source(cfg: DictConfig, loss: nn.Module) -> str:
    # The node that says what the loss is: a task may make its own, or wrap the one that it is given.
    is_given = "criterion" in init_parameters(str(cfg.task["_target_"])) and "criterion" not in cfg.task
    return "loss" if is_given and type(_built(cfg, "loss", None)) is type(loss) else "task"


def _built(cfg: DictConfig, source: str, data: Any) -> Any:
    with draws.StateGuard():
        draws.seed_by(0)
        if source == "loss":
            return builders.criterion(cfg)
        return loss_module(builders.task(cfg, data, torch.device("cpu")))


def _are_alike(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Neither has what a forward pass makes.
    return (name in one) == (name in other) and fingerprint(one.get(name)) == fingerprint(other.get(name))
