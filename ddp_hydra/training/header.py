"""Describes a run before its first step: lines for a person, and the numbers that its progress is measured by."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from ddp_hydra.console.text import counted
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.data.workers import InWorkers
from ddp_hydra.record import Start
from ddp_hydra.training.data_description import length
from ddp_hydra.training.data_stats import skipped_by
from ddp_hydra.training.schedule_progress import planned_steps, steps_in_epoch
from ddp_hydra.training.state import Position


def describe(
    cfg: DictConfig,
    model: nn.Module,
    train_set: Any,
    val_set: Any,
    sampler: Any,
    total_steps: int,
    position: Position,
    device: torch.device,
) -> Start:
    """Return the header of a run: lines for a person, and the numbers that progress is measured by."""
    world_size, epoch_steps = dist.get_world_size(), steps_in_epoch(sampler)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = f", {parameters - trained:,} of them frozen" if trained < parameters else ""
    ranks, threads = counted(world_size, "rank"), counted(torch.get_num_threads(), "thread")
    accumulation = cfg.trainer.gradient_accumulation_steps
    micro_batches = f"{accumulation} micro-batches x " if accumulation > 1 else ""
    lines = [
        f"model     {type(model).__name__}, {parameters:,} parameters{frozen}",
        f"data      {samples_in(train_set, val_set)}",
        f"ranks     {world_size} on {device.type}, {threads} each, {cfg.trainer.precision}",
        f"batch     {cfg.data.batch_size} x {micro_batches}{ranks} = {sampler.global_batch} effective",
        f"steps     {total_steps:,}" + (f", {epoch_steps:,} in an epoch" if epoch_steps else " at most"),
    ]
    if hasattr(train_set, "described"):
        lines.insert(2, f"columns   {train_set.described()}")
    if isinstance(sampler, StreamSampler):
        lines.append(f"stream    {sampler.part.how}")
    if isinstance(train_set, InWorkers) and train_set.asked:
        lines.append(f"reading   {counted(train_set.number, 'worker')} beside each rank")
    if (patience := cfg.trainer.early_stopping_patience) is not None:
        what = counted(patience, "epoch" if val_set is None else "validation")
        lines.append(f"stops     early after {what} without progress in {cfg.objective.metric}")
    skipped = [skipped_by(data) for data in (train_set, val_set)]
    lines += [f"skipped   {text}" for text in dict.fromkeys(skipped) if text]
    if position.step:
        note = sampler.resumed(position.offset) if isinstance(sampler, StreamSampler) else ""
        lines.append(
            f"resumed   at step {position.step:,}, epoch {position.epoch + 1}, sample {position.samples:,}{note}"
        )
    epochs = epochs_of(sampler, total_steps, position) if epoch_steps else None
    return Start(lines, total_steps, epochs, world_size, epoch_means=True)


def epochs_of(sampler: Any, total_steps: int, position: Position) -> int:
    """Return the epochs of a run, the last of which may be cut short. Those before `position` may have had other steps.

    Args:
        sampler: knows how many steps it has in an epoch.
        total_steps: of the run.
        position: where this attempt begins.
    """
    later = total_steps - position.step - planned_steps(sampler, position.offset)
    epochs = position.epoch + (position.offset > 0 or total_steps > position.step)
    return epochs + max(0, math.ceil(later / planned_steps(sampler)))


def samples_in(train_set: Any, val_set: Any) -> str:
    """Return how many samples the data sets have, as far as they know."""
    train, val = map(length, (train_set, val_set))
    text = "iterable" if train is None else counted(train, "sample")
    if val_set is None:
        return text
    return f"{text}, {'an iterable' if val is None else f'{val:,}'} for validation"
