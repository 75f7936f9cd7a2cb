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
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.record import Start
from ddp_hydra.training import build_data, builders, run, setup
from ddp_hydra.training.build_data import opened
from ddp_hydra.training.build_updates import updates_of
from ddp_hydra.training.callbacks import Callbacks
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.ema import Ema
from ddp_hydra.training.instantiate import make
from ddp_hydra.training.lr_schedules import steps_in_epoch
from ddp_hydra.training.metrics import Meter, count, named
from ddp_hydra.training.state import Position, TrainingState, together
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import OptimizerStep
from ddp_hydra.training.weighing import Weighing


def dry_run(config: Mapping[str, Any]) -> None:
    cfg = OmegaConf.create(dict(config))
    with opened(cfg, "train") as train_set, opened(cfg, "val", like=train_set) as val_set:
        results.emit(Start(first_step(cfg, train_set, val_set)))


def first_step(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    DataDescription.of(train_set).check_validation(DataDescription.of(val_set))
    device = builders.device(cfg)
    world_size = expected_ranks(cfg)
    sampler = build_data.sampler(cfg, train_set, 0, world_size)
    epoch_steps = steps_in_epoch(sampler)
    builders.set_float32(cfg)
    run.seed_step(cfg.seed, 0, 0)  # as the training does
    model, channels_last, _ = setup.build_model(cfg, train_set, device)
    task, meter = builders.task(cfg, train_set, device), Meter(device)
    for data in (train_set, val_set):
        build_data.check_classes(cfg, task, data, DataDescription.of(train_set).num_classes)
    callbacks = builders.callbacks(cfg)
    if warning := build_data.only_class(task, DataDescription.of(train_set)):
        results.warn(warning)
    model.train()
    loader = build_data.loader(cfg, train_set, device, channels_last)
    loader.prefetch = 0
    order = sampler.batches(0)
    if not isinstance(sampler, StreamSampler):
        order = numbered(order, 0, 0, sampler.global_batch, 0)
    batches = list(next(loader.steps(order, cfg.trainer.gradient_accumulation_steps)))
    autocast = builders.autocast(cfg, device)
    average = None
    if cfg.trainer.ema_decay:
        average = Ema(model, cfg.trainer.ema_decay, lambda: builders.model(cfg, train_set).to(device))
    optimizers: dict[str, Any] = {}
    schedulers: dict[str, Any] = {}
    for update in updates_of(task):
        step = TrainStep(task, model, update)
        parallel = make(cfg.parallel, step)
        optimizer = builders.optimizer(cfg, step.part, sampler.global_batch, update, step.criterion)
        scheduler = builders.schedule(cfg, optimizer, epoch_steps or 1, epoch_steps or 1, update)
        scaler = builders.scaler(cfg, device)
        optimizer_step = OptimizerStep(parallel, optimizer, scaler, cfg.trainer.clip_norm, update)
        optimizer_step.begin()
        weighing = Weighing(sampler.global_batch // world_size, StepConsensus())
        for batch in batches:
            with parallel.sync_gradients(batch.last):
                with autocast:
                    result = parallel(batch.batch)
                optimizer_step.backward(weighing.weigh(result, batch.size))
            meter.add(count(result, batch.size, update))
        optimizer_step.rescale(weighing.factor([float(weighing.n)]))
        if not weighing.is_empty:
            optimizer_step.apply()
        scheduler.step()
        optimizers[update], schedulers[update] = optimizer, scheduler
    if average is not None:
        average.update(model)
    extras: dict[str, Any] = {"ema": average, "loss": builders.loss_state(task)}
    state = TrainingState(model, together(optimizers), together(schedulers), Position(), {}, extras)
    if callbacks:
        extras["callbacks"] = Callbacks(callbacks, state)
    state.check()
    metrics = named("train", task.metrics(meter.result()))
    losses = ", ".join(f"{value:.4f}" for name, value in metrics.items() if name.endswith("loss"))
    with torch.no_grad(), autocast:
        predicted = described(task.predict(model.eval(), batches[0].batch))
    if val_set is not None:
        metrics |= builders.evaluation(cfg, val_set, task, device, channels_last).run(model, stop=lambda: True)
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
