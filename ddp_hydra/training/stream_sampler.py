"""Builds the sampler of an iterable data set."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from ddp_hydra import heartbeat
from ddp_hydra.data.streams import RepeatedPart, StreamSampler, split
from ddp_hydra.errors import ConfigError

ORDER_OF_DATA = ("ddp_hydra.data.samplers.Distributed",)
"""Samplers that the config of an iterable data set may name: the default one, which is not used."""


def build(cfg: DictConfig, data: Any, batch_size: int, rank: int, world_size: int) -> StreamSampler:
    """Build the sampler of an iterable data set.

    Args:
        cfg: the resolved config.
        data: the data set.
        batch_size: samples per rank and step.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        ConfigError: the config wants an order that only a map-style data set can have, or the run has no end.
    """
    target = cfg.sampler["_target_"]
    if target not in ORDER_OF_DATA or not cfg.sampler.get("drop_last", True):
        what = target.rpartition(".")[2] if target not in ORDER_OF_DATA else "sampler.drop_last=false"
        raise ConfigError(
            f"{what} needs a data set with a length and __getitem__, and {type(data).__name__} is iterable: it has an "
            "order of its own, and ends with its last full global batch. Leave sampler=… and sampler.drop_last=… out"
        )
    n_samples = cfg.data.get("n_samples")
    if n_samples is None and hasattr(data, "__len__"):
        n_samples = len(data)
    if n_samples is None:
        refuse_without_length(cfg, data)
    part = split(data, rank, world_size, cfg.data.get("shard_by"), heartbeat.progress)
    if steps := cfg.trainer.overfit_batches:
        part = RepeatedPart(part.dataset, rank, world_size, how=part.how, part=part, steps=steps)
    return StreamSampler(part, batch_size, n_samples)


def refuse_without_length(cfg: DictConfig, data: Any) -> None:
    """Refuse what needs the length of an epoch, where nobody knows it.

    Raises:
        ConfigError: it says what to give.
    """
    needs = []
    if cfg.trainer.max_steps is None:
        needs.append(f"trainer.epochs={cfg.trainer.epochs} without trainer.max_steps")
    if cfg.scheduler.get("warmup_epochs"):
        needs.append(f"scheduler.warmup_epochs={cfg.scheduler.warmup_epochs}")
    if cfg.scheduler.get("by") == "epoch":
        needs.append("scheduler.by=epoch")
    if needs:
        raise ConfigError(
            f"{type(data).__name__} does not know how many samples it has, and the learning-rate schedule needs that "
            f"for {', '.join(needs)}: give trainer.max_steps=<optimizer steps> (and scheduler.warmup_steps=…), or "
            "data.n_samples=<samples in an epoch>"
        )
