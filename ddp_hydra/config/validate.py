"""Refuses a config that cannot be a job, before anything is started."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config import objective, redact
from ddp_hydra.config.limits import AtLeast0, AtLeast1, RanksPerWorker, check_gang, check_limits, limits_of
from ddp_hydra.config.schema import SCHEMAS, Handler
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.urls import FORMATS, root_of

RateRule = Annotated[Literal["none", "linear", "sqrt"], Meta(description="none, linear or sqrt")]


def check(cfg: DictConfig) -> None:
    check_numbers(cfg)
    trainer = cfg.trainer
    if trainer.log_every_steps == 0 and trainer.log_every_s is None:
        raise ConfigError("trainer.log_every_steps=0 logs by the clock: give trainer.log_every_s=<seconds>, too")
    if trainer.epochs is None and trainer.max_steps is None:
        raise ConfigError("trainer.epochs and trainer.max_steps are both null, so the job would never end: give one")
    sizes = (OmegaConf.select(cfg, f"data.{key}") for key in ("batch_size", "global_batch"))
    if not any(sizes) or OmegaConf.select(cfg, "data.train") is None:
        raise ConfigError(
            "data needs batch_size (per rank) or global_batch (of all ranks), and train (a data set with a _target_); "
            "see conf/data"
        )
    _check_sources(cfg)
    for key in ("validate_every_steps", "validate_first"):
        if trainer[key] and OmegaConf.select(cfg, "data.val") is None:
            raise ConfigError(f"trainer.{key}={str(trainer[key]).lower()}: there is no validation set: give data.val")
    check_training(cfg)
    _check_results(cfg)
    objective.check_name(cfg)
    check_gang("dispatch.", cfg.dispatch.ranks, cfg.dispatch.min_ranks, cfg.dispatch.port_range)


def check_numbers(cfg: DictConfig) -> None:
    for group, types in _limits().items():
        check_limits(f"{group}.", {key: OmegaConf.select(cfg, f"{group}.{key}") for key in types}, types)


def check_number(key: str, value: object) -> None:
    group, _, name = key.rpartition(".")
    check_limits(f"{group}.", {name: value}, _limits().get(group, {}))


@cache
def _limits() -> dict[str, dict[str, Any]]:
    limits = {name: limits_of(schema) for name, schema in SCHEMAS.items()}
    limits["dispatch"]["ranks_per_worker"] = RanksPerWorker
    data = {"batch_size": AtLeast1 | None, "global_batch": AtLeast1 | None, "workers": AtLeast0 | None}
    optimizer = {"lr_rule": RateRule | None, "lr_reference_batch": AtLeast1 | None}
    return limits | {"cluster": {"n_workers": AtLeast1 | None}, "data": data, "optimizer": optimizer}


def _check_sources(cfg: DictConfig) -> None:
    """Refuse names of buckets that can be none, and formats without files, of our own data sets."""
    for key, node in _own_data(cfg):
        with suppress(OmegaConfBaseException):  # a missing value is told later, with all others
            if (bucket := node.get("bucket")) is not None:
                try:
                    root_of(str(bucket))
                except ValueError as error:
                    raise ConfigError(str(error)) from None
            if "files" in node and not node.files and (path := node.get("path")) in FORMATS:
                group, _, part = key.rpartition(".")
                name = f"{group}.{'files' if part == 'train' else 'val_files'}"
                instead = "" if part == "train" else f", or {key}=null"
                raise ConfigError(f"{group}.path={path} reads files: give {name}=<paths or URLs>{instead}")


def _own_data(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield the nodes of data sets of this package, also in a mixture, with the keys by which they are typed."""
    for part in ("train", "val"):
        node = OmegaConf.select(cfg, f"data.{part}")
        found = [(f"data.{part}", node)]
        if OmegaConf.is_dict(node) and OmegaConf.is_dict(sets := node.get("sets")):
            found += [(f"data.sets.{name}.{part}", OmegaConf.select(sets, f"{name}.{part}")) for name in sets]
        for key, one in found:
            if OmegaConf.is_dict(one) and str(one.get("_target_", "")).startswith("ddp_hydra."):
                yield key, one


def _check_results(cfg: DictConfig) -> None:
    results = cfg.results
    if results.handler is not Handler.cluster:
        for typed in (f"results.root={results.root}" if results.root else "", "detach=true" if cfg.detach else ""):
            if typed:
                raise ConfigError(f"{typed} is only for results.handler=cluster: give that with results.root, too")
    elif not results.root:
        raise ConfigError(
            "results.handler=cluster needs a place that workers can write: give results.root=s3://bucket/runs"
        )
    elif results.mirror:
        raise ConfigError(f"results.mirror={results.mirror}: leave it out, as results.handler=cluster has a store")


def check_training(cfg: DictConfig) -> None:
    if expected_ranks(cfg) > 1:
        check_static_graph(cfg)
    backend, device = (getattr(one, "name", one) for one in (cfg.dispatch.backend, cfg.trainer.device))
    if (backend, device) == ("nccl", "cpu"):
        raise ConfigError("dispatch.backend=nccl does not go with trainer.device=cpu: give dispatch.backend=auto")
    classes = cfg.trainer.activation_checkpointing
    if classes and str(OmegaConf.select(cfg, "parallel._target_")).endswith(".parallel.dp.DP"):
        raise ConfigError(
            f"trainer.activation_checkpointing={list(classes)} does not go with parallel=dp: give parallel=ddp"
        )
    loss = str(OmegaConf.select(cfg, "loss._target_") or "")
    if loss.startswith("torch.nn.") and OmegaConf.select(cfg, "loss.reduction") == "none":
        raise ConfigError(f"loss.reduction=none of {loss.rpartition('.')[2]}: give loss.reduction=mean or sum")
    ignored = OmegaConf.select(cfg, "loss.ignore_index")
    if isinstance(ignored, int) and ignored >= 0 and OmegaConf.select(cfg, "mix._target_"):
        raise ConfigError(
            f"loss.ignore_index={ignored} does not go with mixed targets: type mix=none, or '~loss.ignore_index'"
        )
    optimizer: Any = OmegaConf.select(cfg, "optimizer") or OmegaConf.create()
    rule, reference = optimizer.get("lr_rule") or "none", optimizer.get("lr_reference_batch")
    if (rule == "none") != (reference is None):
        given, lacking = (f"lr_rule={rule}", "lr_reference_batch=<n>, the global batch of optimizer.lr")
        if rule == "none":
            given, lacking = f"lr_reference_batch={reference}", "lr_rule=linear or optimizer.lr_rule=sqrt"
        raise ConfigError(f"optimizer.{given} needs a second key: give optimizer.{lacking}")
    for key, target in redact.leaves(OmegaConf.to_container(optimizer)):
        name = key.rpartition(".")[2]
        if "." in key and name in ("lr_rule", "lr_reference_batch") and target not in (None, "none"):
            raise ConfigError(f"optimizer.{key}={target} has no effect: give optimizer.{name}, for all updates")
        if name == "_target_" and str(target).endswith(".LBFGS"):
            raise ConfigError(f"optimizer.{key}={target}: its step() needs a closure: give optimizer=adamw or sgd")


def expected_ranks(cfg: DictConfig) -> int:
    """Return the number of ranks, as far as the config tells it before there is a cluster."""
    each = cfg.dispatch.get("ranks_per_worker")
    return cfg.dispatch.ranks or (cfg.cluster.get("n_workers") or 1) * (each if isinstance(each, int) else 1)


def check_static_graph(cfg: DictConfig) -> None:
    """Refuse DDP's static graph where several ranks add up gradients of micro-batches, which torch computes wrongly."""
    micro_batches = cfg.trainer.gradient_accumulation_steps
    if micro_batches > 1 and OmegaConf.select(cfg, "parallel.static_graph"):
        raise ConfigError(
            f"parallel.static_graph=true does not go with trainer.gradient_accumulation_steps={micro_batches} on "
            "several ranks: give parallel.static_graph=false, or trainer.gradient_accumulation_steps=1"
        )


LOGGERS = ("mlflow", "wandb", "aim", "clearml")
"""Loggers that ship; their settings are the keys of this name in `results`, each name is also its package and extra."""

_NOT_LOGGED = ("cluster", "results", "resume", "detach", "faults", "dry_run", "tags")
_NAMED = re.compile(r"\$\{([\w.]+)\}")


def logger_nodes(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    node: Any
    for entry in OmegaConf.to_container(cfg.results.loggers, resolve=True, throw_on_missing=True):  # type: ignore[union-attr]
        if isinstance(entry, str) and entry in LOGGERS:
            name, node = entry, OmegaConf.to_container(cfg.results[entry], resolve=True, throw_on_missing=True)
        elif isinstance(entry, dict) and isinstance(entry.get("_target_"), str):
            name, node = str(entry["_target_"]).rpartition(".")[2], entry
        else:
            hint = text.meant(entry, LOGGERS) if isinstance(entry, str) else ""
            allowed = text.after(hint, f"give {', '.join(LOGGERS)} or a _target_")
            raise ConfigError(f"results.loggers has {redact.without([entry])[0]!r}{allowed}")
        if name in found:
            raise ConfigError(f"results.loggers names {name} more than once: leave one out")
        if name in LOGGERS and node.get("checkpoints") not in (None, "best", "all"):
            raise ConfigError(f"results.{name}.checkpoints={node['checkpoints']}: give best, all or null")
        found[name] = node
    return found


def check_loggers_installed(cfg: DictConfig) -> None:
    for name in logger_nodes(cfg):
        if name in LOGGERS and importlib.util.find_spec(name) is None:
            raise ConfigError(f"results.loggers=[{name}] needs a package: pip install 'ddp-hydra[{name}]'")


def logged_parameters(cfg: DictConfig) -> dict[str, Any]:
    """Return the config that a logger shows, flattened: {"optimizer.lr": 0.1}.

    The cluster and secrets are left out. An interpolation becomes the value of the key that it names; with a resolver
    (${oc.env:NAME}) it stays as it is, because its value may be a secret.
    """
    raw: Any = OmegaConf.to_container(cfg, enum_to_str=True)
    kept = redact.without({key: value for key, value in raw.items() if key not in _NOT_LOGGED})
    values = dict(redact.leaves(kept))
    return {key: _followed(value, values) for key, value in values.items()}


def _followed(value: Any, values: dict[str, Any]) -> Any:
    for _ in range(10):  # chains are short; a circle has been refused long before
        match = _NAMED.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[1] not in values:
            break
        value = values[match[1]]
    return value
