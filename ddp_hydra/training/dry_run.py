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
from ddp_hydra.data.draws import numbered
from ddp_hydra.data.loader import MicroBatch
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.record import Start
from ddp_hydra.training import build_data, builders, run, setup
from ddp_hydra.training.build_data import opened
from ddp_hydra.training.build_updates import UpdateBuilder
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.lr_schedules import ScheduleProgress, steps_in_epoch
from ddp_hydra.training.metrics import Meter, count, named
from ddp_hydra.training.state import Position


def dry_run(config: Mapping[str, Any]) -> None:
    cfg = OmegaConf.create(dict(config))
    with opened(cfg, "train") as train_set, opened(cfg, "val", like=train_set) as val_set:
        results.emit(Start(first_step(cfg, train_set, val_set)))


def first_step(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    description = DataDescription.of(train_set)
    description.check_validation(DataDescription.of(val_set))
    cfg = OmegaConf.merge(cfg, {"trainer": {"compile": None}})  # type: ignore[assignment]
    device, world_size = builders.device(cfg), expected_ranks(cfg)
    sampler = build_data.sampler(cfg, train_set, 0, world_size)
    epoch_steps = steps_in_epoch(sampler)
    builders.set_float32(cfg)
    run.seed_step(cfg.seed, 0, 0)  # as the training does
    model, channels_last, _ = setup.build_model(cfg, train_set, device)
    task, meter = builders.task(cfg, train_set, device), Meter(device)
    setup.check_data(cfg, task, train_set, val_set, {})
    progress = ScheduleProgress(cfg.trainer.epochs, cfg.trainer.max_steps, sampler, Position())
    updates = UpdateBuilder(cfg, model, task, StepConsensus(), sampler.global_batch, device).first(progress, [])
    build_again = lambda: builders.model(cfg, train_set).to(device)  # noqa: E731
    callbacks = builders.callbacks(cfg)
    state, _ = setup.build_state(cfg, model, task, updates, progress, callbacks, {}, {}, description, build_again)
    batches, autocast = first_batches(cfg, train_set, sampler, device, channels_last), builders.autocast(cfg, device)
    model.train()
    for update in updates.values():
        update.begin()
        for batch in batches:
            with update.parallel.sync_gradients(batch.last):
                with autocast:
                    result = update.parallel(batch.batch)
                update.optimizer_step.backward(update.weighing.weigh(result, batch.size))
            meter.add(count(result, batch.size, update.name))
        update.optimizer_step.rescale(update.weighing.factor([float(update.weighing.n)]))
        if not update.weighing.is_empty:
            update.optimizer_step.apply()
        update.scheduler.step()
    if (average := state.extras["ema"]) is not None:
        average.update(model)
    state.check()
    metrics = named("train", task.metrics(meter.result()))
    losses = ", ".join(f"{value:.4f}" for name, value in metrics.items() if name.endswith("loss"))
    with torch.no_grad(), autocast:
        predicted = described(task.predict(model.eval(), batches[0].batch))
    if val_set is not None:
        metrics |= builders.evaluation(cfg, val_set, task, device, channels_last).run(model, lambda: True, are_few=True)
    if objective.is_unknown(cfg.objective.metric, metrics):
        raise objective.unknown(cfg.objective.metric, metrics, saved=False)
    in_epoch = f"{epoch_steps:,}" if epoch_steps else "an unknown number"
    return [
        f"data      {setup.samples_in(train_set, val_set)}",
        f"batch     {described(batches[0].batch)}",
        f"model     {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        f"steps     {in_epoch} in an epoch with {counted(world_size, 'rank')} of {cfg.data.batch_size}",
        f"loss      {losses} before training",
        f"predicts  {predicted}",
        f"metrics   {', '.join(metrics)}; best.pt goes by {cfg.objective.metric}",
        "dry run: all of it works",
    ]


def first_batches(
    cfg: DictConfig, train_set: Any, sampler: Any, device: torch.device, channels_last: bool
) -> list[MicroBatch]:
    loader = build_data.loader(cfg, train_set, device, channels_last)
    loader.prefetch = 0
    order = sampler.batches(0)
    if not isinstance(sampler, StreamSampler):
        order = numbered(order, 0, 0, sampler.global_batch, 0)
    return list(next(loader.steps(order, cfg.trainer.gradient_accumulation_steps)))
