"""Builds everything a job needs, takes a step, validates and predicts, for `dry_run=true`: without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from ddp_hydra import results
from ddp_hydra.config import objective
from ddp_hydra.config.validate import expected_ranks
from ddp_hydra.console.text import counted
from ddp_hydra.data.batch import described
from ddp_hydra.rank.fault_injection import FaultInjector
from ddp_hydra.record import Start
from ddp_hydra.training import build_data, setup
from ddp_hydra.training.build_data import opened
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import forward_backward
from ddp_hydra.training.lr_schedules import steps_in_epoch
from ddp_hydra.training.metrics import Meter, named
from ddp_hydra.training.run import TrainingRun


def dry_run(config: Mapping[str, Any]) -> None:
    cfg = OmegaConf.create(dict(config))
    with opened(cfg, "train") as train_set, opened(cfg, "val", like=train_set) as val_set:
        results.emit(Start(first_step(cfg, train_set, val_set)))


def first_step(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    world_size = expected_ranks(cfg)
    epoch_steps = steps_in_epoch(build_data.sampler(cfg, train_set, 0, world_size))
    cfg = OmegaConf.merge(cfg, {"trainer": {"compile": None}, "data": {"prefetch": 0}})  # type: ignore[assignment]
    run = TrainingRun(cfg, train_set, val_set, {}, FaultInjector(), StopSignal())
    run.begin_epoch()
    micro_batches, meter = list(next(run.steps())), Meter(run.loader.device)
    for update in run.updates.values():
        update.begin()
        decision, _, counts = forward_backward(run, update, micro_batches)
        meter.add(*counts)
        update.optimizer_step.rescale(update.weighing.factor(decision.n))
        if not update.weighing.is_empty:
            update.optimizer_step.apply()
        update.scheduler.step()
    run.advance(updated=True)
    run.state.check()
    metrics, batch = named("train", run.task.metrics(meter.result())), micro_batches[0].batch
    losses = ", ".join(f"{value:.4f}" for name, value in metrics.items() if name.endswith("loss"))
    with torch.no_grad(), run.autocast:
        predicted = described(run.task.predict(run.model.eval(), batch))
    if run.validation is not None:
        metrics |= run.validation.run(run.model, lambda: True, are_few=True)
    if objective.is_unknown(cfg.objective.metric, metrics):
        raise objective.unknown(cfg.objective.metric, metrics, saved=False)
    in_epoch = f"{epoch_steps:,}" if epoch_steps else "an unknown number"
    return [
        f"data      {setup.samples_in(train_set, val_set)}",
        f"batch     {described(batch)}",
        f"model     {type(run.model).__name__}, {sum(p.numel() for p in run.model.parameters()):,} parameters",
        f"steps     {in_epoch} in an epoch with {counted(world_size, 'rank')} of {cfg.data.batch_size}",
        f"loss      {losses} before training",
        f"predicts  {predicted}",
        f"metrics   {', '.join(metrics)}; best.pt goes by {cfg.objective.metric}",
        "dry run: all of it works",
    ]
