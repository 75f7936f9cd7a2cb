"""Builds a run from its config on one rank: sampler, model, updates, the state to resume, and the header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from ddp_hydra import results
from ddp_hydra.console.text import counted
from ddp_hydra.data.samplers import Repeated
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.data.workers import InWorkers
from ddp_hydra.record import Start
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, memory, parameter_groups
from ddp_hydra.training.callbacks import check_names
from ddp_hydra.training.checkpoint import load_fitting
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.data_description import DataDescription, length
from ddp_hydra.training.lr_schedules import planned_steps, steps_in_epoch
from ddp_hydra.training.monitor import skipped_by
from ddp_hydra.training.state import Position
from ddp_hydra.training.train_step import trained_loss


def check_data(cfg: DictConfig, task: Task, train_set: Any, val_set: Any, saved: Mapping[str, Any]) -> None:
    description = DataDescription.of(train_set)
    for data in (train_set, val_set):
        build_data.check_classes(cfg, task, data, description.num_classes)
    changed = DataDescription.from_dict(saved.get("data")).check_resume(description)
    for warning in (build_data.only_class(task, description), changed):
        if warning and dist.get_rank() == 0:
            results.warn(warning)


def build_sampler(cfg: DictConfig, train_set: Any) -> tuple[Any, StepConsensus]:
    # The ranks of a stream tell each other when it has ended for one of them, with their votes.
    sampler = build_data.sampler(cfg, train_set, dist.get_rank(), dist.get_world_size(), lambda: consensus.decide())
    is_stream = isinstance(sampler, StreamSampler)
    consensus = StepConsensus(sampler.counts, sampler.heard) if is_stream else StepConsensus()
    if cfg.trainer.overfit_batches and not is_stream:
        sampler = Repeated(sampler, cfg.trainer.overfit_batches)
    return sampler, consensus


def build_model(
    cfg: DictConfig, train_set: Any, device: torch.device, weights: Path | None = None
) -> tuple[nn.Module, bool, list[str]]:
    results.reserve(check_names)
    model = builders.model(cfg, train_set).to(device)
    memory.watch(model)
    untouched = load_fitting(model, weights) if weights is not None else []
    channels_last = builders.channels_last(cfg, model)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    parameter_groups.freeze(model, cfg.trainer.freeze)
    parameter_groups.activation_checkpointing(model, cfg.trainer.activation_checkpointing)
    return model, channels_last, untouched


def steps_left(trainer: DictConfig, sampler: Any, position: Position) -> int:
    left = (trainer.max_steps - position.step) if trainer.max_steps else float("inf")
    if trainer.epochs:
        more = trainer.epochs - position.epoch - 1
        of_epochs = planned_steps(sampler, position.offset) + (more and more * planned_steps(sampler))
        left = min(left, of_epochs if more >= 0 else 0)
    return max(0, int(left))


def describe(run: Any, train_set: Any, val_set: Any, changed: str, untouched: list[str] | None) -> Start:
    cfg, model, sampler, position = run.cfg, run.model, run.sampler, run.position
    world_size, epoch_steps, total_steps = dist.get_world_size(), steps_in_epoch(sampler), run.cadence.total_steps
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = f", {parameters - trained:,} of them frozen" if trained < parameters else ""
    ranks, threads = counted(world_size, "rank"), counted(torch.get_num_threads(), "thread")
    accumulation = cfg.trainer.gradient_accumulation_steps
    micro_batches = f"{accumulation} micro-batches x " if accumulation > 1 else ""
    loss, patience = trained_loss(run.task), cfg.trainer.early_stopping_patience
    loss_size = sum(one.numel() for one in loss.parameters() if one.requires_grad) if loss is not None else 0
    what = counted(patience or 0, "epoch" if val_set is None else "validation")
    is_stream = isinstance(sampler, StreamSampler)
    note = sampler.resumed(position.offset) if is_stream and position.step else ""
    skipped = [skipped_by(data) for data in (train_set, val_set)]
    lines = [
        ("model", f"{type(model).__name__}, {parameters:,} parameters{frozen}"),
        ("data", samples_in(train_set, val_set)),
        ("columns", train_set.described() if hasattr(train_set, "described") else ""),
        ("ranks", f"{world_size} on {run.loader.device.type}, {threads} each, {cfg.trainer.precision}"),
        ("batch", f"{cfg.data.batch_size} x {micro_batches}{ranks} = {sampler.global_batch} effective"),
        ("steps", f"{total_steps:,}" + (f", {epoch_steps:,} in an epoch" if epoch_steps else " at most")),
        ("stream", sampler.part.how if is_stream else ""),
        (
            "reading",
            f"{counted(train_set.number, 'worker')} beside each rank"
            if isinstance(train_set, InWorkers) and train_set.asked
            else "",
        ),
        (
            "stops",
            f"early after {what} without progress in {cfg.objective.metric}" if patience is not None else "",
        ),
        *(("skipped", text) for text in dict.fromkeys(skipped)),
        (
            "resumed",
            f"at step {position.step:,}, epoch {position.epoch + 1}, sample {position.samples:,}{note}"
            if position.step
            else "",
        ),
        ("changed", changed),
        ("weighs", run.task.note),
        (
            "loss",
            f"{type(loss).__name__}, {counted(loss_size, 'parameter')}, trained with the model"
            if loss is not None
            else "",
        ),
        ("weights", f"from a file, all but {', '.join(untouched) or 'none'}" if untouched is not None else ""),
    ]
    epochs = epochs_of(sampler, total_steps, position) if epoch_steps else None
    shown = [f"{name:10}{text}" for name, text in lines if text]
    return Start(shown, total_steps, epochs, world_size, epoch_means=True)


def epochs_of(sampler: Any, total_steps: int, position: Position) -> int:
    # Those before `position` may have had other steps.
    later = total_steps - position.step - planned_steps(sampler, position.offset)
    epochs = position.epoch + (position.offset > 0 or total_steps > position.step)
    return epochs + max(0, math.ceil(later / planned_steps(sampler)))


def samples_in(train_set: Any, val_set: Any) -> str:
    train, val = map(length, (train_set, val_set))
    text = "iterable" if train is None else counted(train, "sample")
    if val_set is None:
        return text
    return f"{text}, {'an iterable' if val is None else f'{val:,}'} for validation"
