"""Builds everything a job needs and takes one step, for `dry_run=true`: without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra import results
from ddp_hydra.config import objective
from ddp_hydra.console.plural import counted
from ddp_hydra.data.loader import Loader
from ddp_hydra.training import builders, precision, setup
from ddp_hydra.training.classification import Classification
from ddp_hydra.training.metrics import Meter
from ddp_hydra.training.optimizer_step import OptimizerStep
from ddp_hydra.training.parallel import Parallel


def dry_run(config: Mapping[str, Any]) -> None:
    """Build data, model, optimizer and schedule; take one step, and evaluate one batch of the validation set.

    Args:
        config: the resolved config as plain dicts.
    """
    cfg = OmegaConf.create(dict(config))
    with builders.datasets(cfg) as (train_set, val_set):
        results.emit("start", {"lines": first_step(cfg, train_set, val_set)})


def first_step(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    """Build the model and take its first step as a rank does; return lines that describe it."""
    device = builders.device(cfg)
    world_size = cfg.dispatch.ranks or cfg.cluster.get("n_workers") or 1
    sampler = builders.sampler(cfg, train_set, 0, world_size)
    precision.set_float32(cfg.trainer.precision)
    model, channels_last, _ = setup.build_model(cfg, train_set, device)
    optimizer = builders.optimizer(cfg, model, sampler.global_batch)
    scheduler = builders.schedule(cfg, optimizer, max(1, len(sampler)), max(1, len(sampler)))
    scaler = precision.scaler(cfg.trainer.precision, device)
    optimizer_step = OptimizerStep(Parallel(model, model), optimizer, scaler, cfg.trainer.clip_norm)

    task, meter = Classification.from_config(cfg, train_set), Meter(device)
    optimizer_step.begin()
    model.train()
    loader = Loader(train_set, device, channels_last, prefetch=0)
    for batch in next(loader.steps(sampler.batches(0), cfg.trainer.gradient_accumulation_steps)):
        with precision.autocast(cfg.trainer.precision, device):
            output = task.forward(model, batch)
        optimizer_step.backward(output.loss * batch.share)
        meter.add(task.count(output))
    optimizer_step.apply()
    scheduler.step()
    metrics = meter.result("train")
    loss = metrics["train/loss"]
    if val_set is not None:
        metrics |= builders.evaluation(cfg, val_set, device, channels_last).run(model, stop=lambda: True)
    if objective.is_unknown(cfg.objective.metric, metrics):
        raise objective.unknown(cfg.objective.metric, metrics, saved=False)
    return [
        f"data      {counted(len(train_set), 'sample')}" + (f", {len(val_set):,} for validation" if val_set else ""),
        f"batch     x {tuple(batch.x.shape)} {batch.x.dtype}, y {tuple(output.target.shape)} {output.target.dtype}",
        f"model     {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        f"steps     {len(sampler):,} in an epoch with {counted(world_size, 'rank')} of {cfg.data.batch_size}",
        f"loss      {loss:.4f} before training",
        f"metrics   {', '.join(metrics)}; best.pt goes by {cfg.objective.metric}",
        "dry run: all of it works",
    ]
