"""Refuses settings of the training that don't go together: before anything is started where words tell it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra.errors import ConfigError

CLOSURES = ("LBFGS",)
"""Classes of optimizers whose step calls a function that computes the loss again."""


def check(cfg: DictConfig) -> None:
    """Refuse what the composed config tells.

    Raises:
        ConfigError: with what goes instead.
    """
    if expected_ranks(cfg) > 1:
        check_static_graph(cfg)
    backend, device = (getattr(one, "name", one) for one in (cfg.dispatch.backend, cfg.trainer.device))
    if (backend, device) == ("nccl", "cpu"):
        raise ConfigError(
            "dispatch.backend=nccl does not go with trainer.device=cpu, whose tensors NCCL does not take: give "
            "dispatch.backend=auto"
        )
    classes = cfg.trainer.activation_checkpointing
    if classes and str(OmegaConf.select(cfg, "parallel._target_")).endswith(".parallel.dp"):
        raise ConfigError(
            f"trainer.activation_checkpointing={list(classes)} does not go with parallel=dp, whose copies of the model "
            "would compute with the first GPU's modules: give parallel=ddp, or trainer.activation_checkpointing=[]"
        )
    loss = str(OmegaConf.select(cfg, "loss._target_") or "")
    if loss.startswith("torch.nn.") and OmegaConf.select(cfg, "loss.reduction") == "none":
        raise ConfigError(
            f"loss.reduction=none of {loss.rpartition('.')[2]} gives a loss for each sample: give loss.reduction=mean "
            "or sum"
        )
    ignored = OmegaConf.select(cfg, "loss.ignore_index")
    if isinstance(ignored, int) and ignored >= 0 and OmegaConf.select(cfg, "mix._target_"):
        raise ConfigError(
            f"loss.ignore_index={ignored} does not go with {OmegaConf.select(cfg, 'mix._target_')}, which makes shares "
            "of classes of the targets: type mix=none, or '~loss.ignore_index'"
        )
    for target in _targets(OmegaConf.select(cfg, "optimizer")):
        if target.rpartition(".")[2] in CLOSURES:
            raise needs_closure(target, "closure")


def expected_ranks(cfg: DictConfig) -> int:
    """Return the number of ranks, as far as the config tells it before there is a cluster."""
    each = cfg.dispatch.get("ranks_per_worker")
    return cfg.dispatch.ranks or (cfg.cluster.get("n_workers") or 1) * (each if isinstance(each, int) else 1)


def check_static_graph(cfg: DictConfig) -> None:
    """Refuse DDP's static graph where several ranks add up gradients of micro-batches, which torch computes wrongly.

    Raises:
        ConfigError: with what goes instead.
    """
    micro_batches = cfg.trainer.gradient_accumulation_steps
    if micro_batches > 1 and OmegaConf.select(cfg, "parallel.static_graph"):
        raise ConfigError(
            f"parallel.static_graph=true does not go with trainer.gradient_accumulation_steps={micro_batches} on "
            "several ranks: give parallel.static_graph=false, and parallel.find_unused_parameters=true if steps leave "
            "parameters out; or trainer.gradient_accumulation_steps=1"
        )


def needs_closure(target: str, needed: str) -> ConfigError:
    """Return the error of an optimizer whose step() needs arguments.

    Args:
        target: the optimizer's `_target_`.
        needed: names of the arguments.
    """
    return ConfigError(
        f"optimizer._target_={target}: its step() needs {needed}, but each step computes the loss of its batch once "
        "and calls step() without an argument: give another optimizer, such as optimizer=sgd or optimizer=adamw"
    )


def _targets(node: Any) -> list[str]:
    """Return the `_target_` of an optimizer, or of each update's optimizer."""
    if not OmegaConf.is_dict(node):
        return []
    nodes = [node] if "_target_" in node else [one for one in node.values() if OmegaConf.is_dict(one)]
    return [str(one.get("_target_")) for one in nodes]
