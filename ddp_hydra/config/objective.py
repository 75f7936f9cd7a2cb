"""Finds the metric that best.pt, early stopping and sweeps go by, and whether more or less of it is better."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError

OF_A_TASK = ("metric", "direction")
"""Keys of a task's config that say what best.pt goes by if `objective` does not; the task itself doesn't take them."""
OF_AN_UPDATE = ("lr", "grad_norm", "loss_scale")
"""Metrics of each update; where it has a name, theirs begin with it: generator/lr."""
OF_A_MACHINE = ("samples_per_s", "tokens_per_s", "mfu", "peak_memory", "data_wait", "slowest_rank")
"""Metrics of how fast a run is, which it doesn't repeat; besides those whose names begin with `data/`."""
OWN = (*OF_AN_UPDATE, *OF_A_MACHINE)
"""Metrics that a run logs itself after some steps, besides those whose names begin with `OWN_PREFIXES`."""
OWN_PREFIXES = ("train/", "train_epoch/", "data/")
_CLASS_LOSS = re.compile(r"^(?!.*(binary|gaussian|poisson)).*(cross_?entropy|nll_?loss)", re.IGNORECASE)
_LESS_IS_BETTER = re.compile(r"loss|perplexity|error|(^|[/_])(r?mse|mae)", re.IGNORECASE)
_MORE_IS_BETTER = re.compile(r"acc|top\d|f1|precision|recall|auc|auroc|iou|dice|r2", re.IGNORECASE)


def class_axis(cfg: Any) -> int | None:
    """Return the axis of the model's output that holds the classes; None for a loss without classes."""
    target = str(OmegaConf.select(cfg, "loss._target_"))
    if _CLASS_LOSS.match(target) or OmegaConf.select(cfg, "mix._target_"):
        return 1 if target.startswith("torch.nn.") else -1
    return None


def metric_and_direction(cfg: Any) -> tuple[str, str]:
    # A sweep asks before its jobs refuse a config without the group.
    metric, direction = (OmegaConf.select(cfg, f"objective.{key}") for key in ("metric", "direction"))
    direction = getattr(direction, "name", direction)
    validates = "data" not in cfg or OmegaConf.select(cfg, "data.val") is not None
    if metric is None:
        metric, of_task = _of_task(cfg, validates)
        direction = direction or of_task
    elif metric.startswith("val/") and not validates:
        advice = "give data.val, or objective.metric=train/loss"
        raise ConfigError(f"objective.metric={metric}: there is no validation set: {advice}")
    return metric, direction or direction_of(metric)


def _of_task(cfg: Any, validates: bool) -> tuple[str, str | None]:
    name, of = str(OmegaConf.select(cfg, "task.metric") or "loss"), "val" if validates else "train"
    is_of_training = validates or "/" in name  # where an update has a name, its loss has it, too
    if not is_of_training or (name == "accuracy" and class_axis(cfg) is None):
        name = "loss"
    return f"{of}/{name}", "minimize" if name == "loss" else OmegaConf.select(cfg, "task.direction")


def direction_of(metric: str) -> str:
    if _LESS_IS_BETTER.search(metric):
        return "minimize"
    if _MORE_IS_BETTER.search(metric):
        return "maximize"
    advice = "give objective.direction=maximize or minimize, too"
    raise ConfigError(f"objective.metric={metric}: its name does not say which way is better: {advice}")


def is_of_run(metric: str) -> bool:
    is_of_update = metric.rpartition("/")[2] in OF_AN_UPDATE
    return is_of_update or metric in OWN or metric.startswith((*OWN_PREFIXES, "val/"))


def is_of_machine(metric: str) -> bool:
    return metric in OF_A_MACHINE or metric.startswith("data/")


def is_of_validation(metric: str) -> bool:
    return metric.startswith("val/") or not is_of_run(metric)


def check_name(cfg: Any) -> None:
    """Refuse a metric that neither the run nor a callback logs."""
    metric, _ = metric_and_direction(cfg)
    has_callbacks = any(node is not None for node in (OmegaConf.select(cfg, "callbacks") or {}).values())
    if is_of_run(metric) or has_callbacks:
        return
    of = "train" if OmegaConf.select(cfg, "data.val") is None else "val"
    name = f"{of}/{'loss' if '/' in metric else metric}"
    raise ConfigError(
        f"objective.metric={metric}: the run itself logs no metric of that name, and there is no callback that could "
        f"log one: give objective.metric={name}, or +callbacks.<name>._target_=<class>"
    )


def is_unknown(metric: str, metrics: Mapping[str, float]) -> bool:
    has_steps = "samples_per_s" in metrics
    return metric not in metrics and (has_steps or is_of_validation(metric) or metric.startswith("train/"))


def unknown(metric: str, metrics: Mapping[str, float], saved: bool = True) -> ConfigError:
    known = sorted(name for name in metrics if name.startswith(("train/", "val/"))) or sorted(metrics)
    nearest = max(known, key=lambda name: difflib.SequenceMatcher(None, metric, name).ratio(), default="train/loss")
    give = (
        f"{'The run is saved: go on with resume=<its run directory>' if saved else 'Give'} objective.metric={nearest}"
    )
    none = "this run has none" if is_of_run(metric) else "no callback has logged it for this validation"
    return ConfigError(f"objective.metric={metric}: {none}; there are {', '.join(known) or 'none'}. {give}")
