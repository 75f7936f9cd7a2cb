"""`dry_run=true`: everything a job needs is built once and makes one step, before any worker is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from ddp_hydra import results
from ddp_hydra.config import objective
from ddp_hydra.console.plural import counted
from ddp_hydra.data.loader import Loader
from ddp_hydra.training import builders, parameter_groups, precision
from ddp_hydra.training.metrics import Meter, count
from ddp_hydra.training.optimizer_step import OptimizerStep
from ddp_hydra.training.parallel import Parallel


def dry_run(config: Mapping[str, Any]) -> None:
    """Build data, model, optimizer and schedule, and make one step and one batch of the validation.

    Args:
        config: the resolved config, plain.
    """
    cfg = OmegaConf.create(dict(config))
    with builders.datasets(cfg) as (train_set, val_set):
        results.emit("start", {"lines": first_step(cfg, train_set, val_set)})


def first_step(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    """Build the rest, do with the model what a rank does in its first step, and describe it all."""
    device = builders.device(cfg)
    world_size = cfg.dispatch.ranks or cfg.cluster.get("n_workers") or 1
    sampler = builders.sampler(cfg, train_set, 0, world_size)
    precision.set_float32(cfg.trainer.precision)
    model = builders.model(cfg, train_set).to(device)
    channels_last = builders.choose(cfg.trainer.channels_last, builders.has_convolutions(model))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    parameter_groups.freeze(model, cfg.trainer.freeze)
    parameter_groups.activation_checkpointing(model, cfg.trainer.activation_checkpointing)
    optimizer = builders.optimizer(cfg, model, sampler.global_batch)
    scheduler = builders.schedule(cfg, optimizer, max(1, len(sampler)), max(1, len(sampler)))
    scaler = precision.scaler(cfg.trainer.precision, device)
    update = OptimizerStep(Parallel(model, model), optimizer, scaler, cfg.trainer.clip_norm)

    criterion, mix, class_axis = builders.loss(cfg), builders.mix(cfg, train_set), objective.class_axis(cfg)
    meter = Meter(device)
    update.begin()
    model.train()
    loader = Loader(train_set, device, channels_last, prefetch=0)
    for part in next(loader.steps(sampler.batches(0), cfg.trainer.gradient_accumulation_steps)):
        x, y = mix(part.x, part.y)
        with precision.autocast(cfg.trainer.precision, device):
            output = model(x)
            loss = criterion(output, y)
        update.backward(loss * part.share)
        meter.add(count(loss, output, y, class_axis))
    update.apply()
    scheduler.step()
    metrics = meter.result("train")
    before = metrics["train/loss"]
    if val_set is not None:
        metrics |= builders.evaluation(cfg, val_set, device, channels_last).run(model, stop=lambda: True)
    if objective.is_unknown(cfg.objective.metric, metrics):
        raise objective.unknown(cfg.objective.metric, metrics, saved=False)
    return [
        f"data      {counted(len(train_set), 'sample')}" + (f", {len(val_set):,} for validation" if val_set else ""),
        f"batch     x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}",
        f"model     {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        f"steps     {len(sampler):,} in an epoch with {counted(world_size, 'rank')} of {cfg.data.batch_size}",
        f"loss      {before:.4f} before training",
        f"metrics   {', '.join(metrics)}; best.pt goes by {cfg.objective.metric}",
        "dry run: all of it works",
    ]
