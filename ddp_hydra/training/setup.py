"""Builds a run from its config on one rank: sampler, model, updates, the state to resume, and the header."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from ddp_hydra import results
from ddp_hydra.config import checkpoint_config
from ddp_hydra.console.text import counted
from ddp_hydra.data.samplers import Repeated
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.data.workers import InWorkers
from ddp_hydra.rank import fault_injection
from ddp_hydra.record import Start
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, memory, parameter_groups, resume
from ddp_hydra.training.build_updates import UpdateBuilder
from ddp_hydra.training.cadence import Cadence, EarlyStopping, LogClock
from ddp_hydra.training.callbacks import Callback, Callbacks, check_names
from ddp_hydra.training.checkpoint import CheckpointSaver, load_fitting, read
from ddp_hydra.training.consensus import StepConsensus, StopSignal, from_rank_0
from ddp_hydra.training.data_description import DataDescription, length
from ddp_hydra.training.data_stats import skipped_by
from ddp_hydra.training.ema import Ema
from ddp_hydra.training.lr_schedules import ScheduleProgress, planned_steps, steps_in_epoch
from ddp_hydra.training.metrics import EpochMeans
from ddp_hydra.training.monitor import Monitor
from ddp_hydra.training.nonfinite import NonFiniteHandler
from ddp_hydra.training.profiler import Profiler
from ddp_hydra.training.run import TrainingRun, seed_step
from ddp_hydra.training.state import Position, TrainingState, together
from ddp_hydra.training.train_step import trained_loss
from ddp_hydra.training.update import Update


def build(
    cfg: DictConfig,
    train_set: Any,
    val_set: Any,
    files: Mapping[str, Path],
    fault: fault_injection.FaultInjector,
    stop_signal: StopSignal,
    kept: Mapping[str, Any] | None = None,
) -> TrainingRun:
    # A collective.
    description = DataDescription.of(train_set)
    description.check_validation(DataDescription.of(val_set))
    rank, device = dist.get_rank(), builders.device(cfg)
    memory.begin(device)
    sampler, consensus = build_sampler(cfg, train_set)
    builders.set_float32(cfg)
    seed_step(cfg.seed, 0, 0)  # all ranks build the same model
    bare, channels_last, untouched = build_model(cfg, train_set, device, files.get("weights"))
    task = builders.task(cfg, train_set, device)
    saved = from_rank_0(lambda: read(files["resume"])) if "resume" in files else {}
    check_data(cfg, task, train_set, val_set, saved)

    position = Position()
    progress = ScheduleProgress(cfg.trainer.epochs, cfg.trainer.max_steps, sampler, position)
    progress.load_state_dict(saved.get("progress") or progress.state_dict())
    builder = UpdateBuilder(cfg, bare, task, consensus, sampler.global_batch, device)
    updates = builder.first(progress, saved.get("unfrozen") or [])
    frozen_norms = parameter_groups.frozen_norms(bare)  # after sync_batchnorm has replaced layers
    build_again = lambda: builders.model(cfg, train_set).to(device)  # noqa: E731
    state, changed = build_state(
        cfg, bare, task, updates, progress, builders.callbacks(cfg), kept, saved, description, build_again
    )
    state.check()
    total_steps = position.step + steps_left(cfg.trainer, sampler, position)
    loader = build_data.loader(cfg, train_set, device, channels_last)
    validation = builders.evaluation(cfg, val_set, task, device, channels_last) if val_set is not None else None

    if rank == 0:
        header = describe(cfg, bare, train_set, val_set, sampler, total_steps, position, device)
        header.lines.extend(more_lines(task, changed, untouched if "weights" in files else None))
        results.emit(header, position.step)

    profiler = Profiler(cfg.trainer.profile_steps, rank, bare, device, cfg.trainer.precision, total_steps)
    return TrainingRun(
        cfg=cfg,
        rank=rank,
        seed=cfg.seed,
        sampler=sampler,
        loader=loader,
        model=bare,
        frozen_norms=frozen_norms,
        autocast=builders.autocast(cfg, device),
        task=task,
        updates=updates,
        ema=state.extras["ema"],
        schedule_progress=progress,
        state=state,
        early_stopping=state.extras["early_stopping"],
        epoch_means=state.extras["epoch_means"],
        validation=validation,
        cadence=Cadence.from_config(cfg.trainer, total_steps),
        consensus=consensus,
        nonfinite=NonFiniteHandler(cfg.trainer.on_nonfinite, cfg.trainer.max_nonfinite, state),
        checkpoints=CheckpointSaver(),
        monitor=Monitor(
            consensus, task, loader, updates.values(), profiler, position.samples, state.extras["epoch_means"]
        ),
        fault=fault,
        stop_signal=stop_signal,
        log_clock=LogClock(cfg.trainer.log_every_s if rank == 0 else None, cfg.trainer.log_growth),
        callbacks=state.extras.get("callbacks") or Callbacks({}, state),
        builder=builder,
        logged_at=position.step,
    )


def check_data(cfg: DictConfig, task: Task, train_set: Any, val_set: Any, saved: Mapping[str, Any]) -> None:
    description = DataDescription.of(train_set)
    for data in (train_set, val_set):
        build_data.check_classes(cfg, task, data, description.num_classes)
    changed = DataDescription.from_dict(saved.get("data")).check_resume(description)
    for warning in (build_data.only_class(task, description), changed):
        if warning and dist.get_rank() == 0:
            results.warn(warning)


def more_lines(task: Task, changed: str, untouched: list[str] | None) -> list[str]:
    loss = trained_loss(task)
    number = sum(one.numel() for one in loss.parameters() if one.requires_grad) if loss is not None else 0
    lines = {
        "changed": changed,
        "weighs": task.note,
        "loss": f"{type(loss).__name__}, {counted(number, 'parameter')}, trained with the model"
        if loss is not None
        else "",
        "weights": f"from a file, all but {', '.join(untouched) or 'none'}" if untouched is not None else "",
    }
    return [f"{name:10}{text}" for name, text in lines.items() if text]


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


def build_state(
    cfg: DictConfig,
    model: nn.Module,
    task: Task,
    updates: Mapping[str, Update],
    progress: ScheduleProgress,
    callbacks: Mapping[str, Callback],
    kept: Mapping[str, Any] | None,
    saved: dict[str, Any],
    description: DataDescription,
    build_again: Callable[[], nn.Module] | None = None,
) -> tuple[TrainingState, str]:
    extras = {
        "scaler": together({name: update.optimizer_step.scaler for name, update in updates.items()}),
        "weighing": together({name: update.weighing for name, update in updates.items()}),
        "ema": Ema(model, cfg.trainer.ema_decay, build_again) if cfg.trainer.ema_decay else None,
        "early_stopping": EarlyStopping.from_config(cfg),
        "epoch_means": EpochMeans(task),
        "loss": builders.loss_state(task),
        "progress": progress,
        "stream": progress.sampler if isinstance(progress.sampler, StreamSampler) else None,
    }
    state = TrainingState(
        model,
        together({name: update.optimizer_step.optimizer for name, update in updates.items()}),
        together({name: update.scheduler for name, update in updates.items()}),
        progress.position,
        dict(kept or checkpoint_config.stored_config(cfg)),
        extras,
        description.as_dict(),
    )
    if callbacks:
        extras["callbacks"] = Callbacks(callbacks, state)
    if not saved:
        return state, ""
    changed = resume.restore(state, saved)
    progress.move(state.scheduler)
    return state, changed


def steps_left(trainer: DictConfig, sampler: Any, position: Position) -> int:
    left = (trainer.max_steps - position.step) if trainer.max_steps else float("inf")
    if trainer.epochs:
        more = trainer.epochs - position.epoch - 1
        of_epochs = planned_steps(sampler, position.offset) + (more and more * planned_steps(sampler))
        left = min(left, of_epochs if more >= 0 else 0)
    return max(0, int(left))


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
