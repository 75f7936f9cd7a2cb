"""Builds parts of a run from its config on one rank: its sampler, and the header."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig
from torch import nn

from ddp_hydra import results
from ddp_hydra.console.text import counted
from ddp_hydra.data.draws import StateGuard
from ddp_hydra.data.samplers import Repeated
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.data.workers import InWorkers
from ddp_hydra.data.wrappers import unwrapped
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.record import Start
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, cost, memory
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.data_description import DataDescription, length, shown
from ddp_hydra.training.lr_schedules import first_rate, planned_steps, steps_in_epoch
from ddp_hydra.training.monitor import skipped_by
from ddp_hydra.training.optimizers import RATE_KEYS, updates_of
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.profiler import TRAINING, utilisation
from ddp_hydra.training.state import Position
from ddp_hydra.training.train_step import trained_loss


def check_data(
    cfg: DictConfig, task: Task, train_set: Any, val_set: Any, saved: Mapping[str, Any], world: World
) -> DataDescription:
    description = build_data.description_of(cfg, task, train_set)
    for data in (train_set, val_set):
        build_data.check_classes(cfg, task, data, description.num_classes)
    build_data.check_validation_classes(cfg, task, description, val_set)
    changed = DataDescription.from_dict(saved.get("data")).check_resume(description)
    for warning in (build_data.only_class(task, description), changed):
        if warning and world.rank == 0:
            results.warn(warning)
    return description


def build_sampler(cfg: DictConfig, train_set: Any, world: World) -> tuple[Any, StepConsensus]:
    # The ranks of a stream tell each other when it has ended for one of them, with their votes.
    sampler = build_data.sampler(cfg, train_set, world, lambda: consensus.decide())
    is_stream = isinstance(sampler, StreamSampler)
    consensus = StepConsensus(world, sampler.counts, sampler.heard) if is_stream else StepConsensus(world)
    data = unwrapped(train_set.dataset if isinstance(train_set, InWorkers) else train_set)
    for one in () if is_stream or world.rank else (sampler, data):
        has_state = hasattr(type(one), "state_dict") and hasattr(type(one), "load_state_dict")
        if has_state and not isinstance(one, nn.Module):  # whose state is that of its transforms
            results.warn(f"the state_dict() of {type(one).__name__} is not saved: a resume begins with a new one")
    if cfg.trainer.overfit_batches and not is_stream:
        sampler = Repeated(sampler, cfg.trainer.overfit_batches, cfg.seed)
    return sampler, consensus


def steps_left(trainer: DictConfig, sampler: Any, position: Position) -> int:
    left = (trainer.max_steps - position.step) if trainer.max_steps else float("inf")
    if trainer.epochs:
        more = trainer.epochs - position.epoch - 1
        of_epochs = planned_steps(sampler, position.offset) + (more and more * planned_steps(sampler))
        left = min(left, of_epochs if more >= 0 else 0)
    return max(0, int(left))


def describe(run: Any, train_set: Any, val_set: Any, changed: str, untouched: list[str] | None) -> Start:
    cfg, model, sampler, position = run.cfg, run.model, run.sampler, run.position
    world_size, epoch_steps, total_steps = run.world.size, steps_in_epoch(sampler), run.cadence.total_steps
    parameters, trained = weights.sizes(model)
    frozen = f", {parameters - trained:,} of them frozen" if trained < parameters else ""
    ranks, threads = counted(world_size, "rank"), counted(torch.get_num_threads(), "thread")
    accumulation = cfg.trainer.gradient_accumulation_steps
    micro_batches = f"{accumulation} micro-batches x " if accumulation > 1 else ""
    first = run.schedule_progress.global_batch
    was = f"; {first} when the run began" if first != sampler.global_batch else ""
    loss, patience = trained_loss(run.task), cfg.trainer.early_stopping_patience
    loss_size = weights.sizes(loss)[1] if loss is not None else 0
    own_loss = f"{type(loss).__name__}, {counted(loss_size, 'parameter')}, trained with the model"
    what = counted(patience or 0, "epoch" if val_set is None else "validation")
    progress = f"{what} without progress in {cfg.objective.metric}"
    has_workers = isinstance(train_set, InWorkers) and train_set.asked
    reading = f"{counted(train_set.number, 'worker')} for each rank" if has_workers else ""
    is_stream = isinstance(sampler, StreamSampler)
    note = sampler.resumed(position.offset) if is_stream and position.step else ""
    reached = f"at step {position.step:,}, epoch {position.epoch + 1}, sample {position.samples:,}{note}"
    skipped = [skipped_by(data) for data in (train_set, val_set)]
    about = DataDescription.of(train_set)
    lines = [
        ("model", f"{run.parallel.model_name}, {parameters:,} parameters{frozen}"),
        ("data", samples_in(train_set, val_set)),
        ("classes", shown(about.classes) or str(about.num_classes or "")),
        ("columns", columns_in(train_set)),
        ("pixels", about.scaling),
        ("ranks", f"{world_size} on {run.loader.device.type}, {threads} each, {cfg.trainer.precision}"),
        ("batch", f"{cfg.data.batch_size} x {micro_batches}{ranks} = {sampler.global_batch} effective{was}"),
        ("memory", memory_of(run)),
        ("rate", rates_of(run)),
        ("steps", f"{total_steps:,}" + (f", {epoch_steps:,} in an epoch" if epoch_steps else " at most")),
        ("stream", sampler.part.how if is_stream else ""),
        ("reading", reading),
        ("stops", f"early after {progress}" if patience is not None else ""),
        *(("skipped", text) for text in dict.fromkeys(skipped)),
        ("resumed", reached if position.step else ""),
        ("changed", changed),
        ("weighs", run.task.note),
        ("loss", own_loss if loss is not None else ""),
        ("weights", weights_in(run, untouched)),
    ]
    epochs = epochs_of(sampler, total_steps, position) if epoch_steps else None
    header = [f"{name:10}{text}" for name, text in lines if text]
    show = None if cfg.trainer.show is None else list(cfg.trainer.show)
    # The least that a checkpoint has: weights, their average, and the moments that torch's optimizers keep.
    kept = sum(cost.moments(update.optimizer) for update in run.updates.values())
    size = weights.n_bytes(run.model) * (2 if run.ema else 1) + kept
    best = {} if run.state.best is None else {cfg.objective.metric: run.state.best}
    return Start(header, total_steps, epochs, world_size, epoch_means=True, checkpoint_bytes=size, show=show, best=best)


def memory_of(run: Any) -> str:
    """Return what a rank needs for a large model; "" for a small one, and where it can't be told."""
    whole = cost.memory_of(run.cfg, run.model, [update.optimizer for update in run.updates.values()])
    shards = run.world.size // run.cfg.parallel.get("replicas", 1) if run.parallel.is_sharded else None
    if whole.total / (shards or 1) < LARGE or run.rank:
        return ""
    try:
        outline = cost.build_outline(run.cfg, run.loader.dataset)
    except Exception:  # a model that can be built only once
        return ""
    whole.activations = most_kept(forward_passes(run.cfg, outline, run.task, run.builder.names, run.loader))
    free = memory.free_bytes(run.loader.device) + weights.bytes_on_rank(run.model)  # which are there already
    return needed(run.cfg, outline, whole, shards, free)


def needed(
    cfg: DictConfig, outline: nn.Module, whole: cost.Memory, shards: int | None, free: float, where: str = ""
) -> str:
    # What a rank needs, and what to do if that is more than is free. `shards`: None if the model is not sharded.
    gathered = cost.gathered_bytes(cfg, outline)
    a_rank = whole if shards is None else whole.over(shards, gathered)
    fits = f"; {cost.fitting(whole, gathered, 2 * (shards or 1), free)}" if a_rank.total > free else ""
    return f"{a_rank}{where}{fits}"


def passes_of(run: Any) -> list[cost.Pass]:
    try:
        outline = cost.build_outline(run.cfg, run.loader.dataset)
    except Exception:  # a model that can be built only once
        return []
    return forward_passes(run.cfg, outline, run.task, run.builder.names, run.loader)


def operations(run: Any, passes: Sequence[cost.Pass]) -> cost.Operations | None:
    # Only rank 0 tells them.
    if run.rank or utilisation(1.0, run.loader.device, run.cfg.trainer.precision) is None:
        return None
    if (found := cost.operations_of(run.model)) is not None:
        return found
    flops = sum(one.flops for one in passes or passes_of(run))
    return cost.Operations(sample=TRAINING * flops / run.cfg.data.batch_size) if flops else None


def outlined(cfg: DictConfig, train_set: Any, ranks: int) -> tuple[float, list[str]]:
    """Return the bytes that one process needs for a step of the whole model, and lines that tell what a rank needs."""
    cpu = torch.device("cpu")
    with StateGuard():
        outline, task = cost.build_outline(cfg, train_set), builders.trained_task(cfg, train_set, cpu)
        updates, loader = updates_of(task), build_data.loader(cfg, train_set, cpu, False, ALONE)
        whole = cost.memory_of(cfg, outline, cost.outlined_optimizers(cfg, outline, task, updates))
        whole.activations = most_kept(forward_passes(cfg, outline, task, updates, loader))
    is_sharded = get_object(cfg.parallel["_target_"]).shards and ranks > 1
    shards = ranks // cfg.parallel.get("replicas", 1) if is_sharded else None
    free, where = memory.free_bytes(builders.device(cfg)), f", on {counted(ranks, 'rank')}"
    return whole.total, [
        f"model     {type(outline).__name__}, {weights.sizes(outline)[0]:,} parameters",
        f"memory    {needed(cfg, outline, whole, shards, free, where)}",
    ]


def forward_passes(
    cfg: DictConfig, outline: nn.Module, task: Task, updates: Sequence[str], loader: Any
) -> list[cost.Pass]:
    # Of the updates of a step; [] if one of them can't be told. They are only an estimate: a batch may hold what can't
    # be on the device `meta`, and a data set may make no batch of one sample.
    try:
        if (batch := cost.one_batch(loader, cfg.data.batch_size)) is None:
            return []
        passes = [cost.forward_pass(outline, task, update, batch, cfg) for update in updates]
    except Exception:
        return []
    known = [one for one in passes if one]
    return known if len(known) == len(passes) else []


def most_kept(passes: Sequence[cost.Pass]) -> int | None:
    known = [one.activations for one in passes if one.activations is not None]
    return max(known, default=None) if len(known) == len(passes) else None


def rates_of(run: Any) -> str:
    """Return the learning rates of each update, before its schedule: one, or the smallest and the largest."""
    rates = {
        name: {float(rate) for rate in map(first_rate, update.optimizer.param_groups) if rate is not None}
        for name, update in run.updates.items()
    }
    rule, reference = (run.cfg.optimizer.get(key) for key in RATE_KEYS)
    how = f", {rule} in the batch: {run.sampler.global_batch} / {reference}" if reference else ""
    texts = [
        f"{name} {min(found):.4g}".lstrip() + (f" to {max(found):.4g}" if len(found) > 1 else "")
        for name, found in rates.items()
        if found
    ]
    return ", ".join(texts) + how


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


def weights_in(run: Any, untouched: list[str] | None) -> str:
    source, notes = getattr(run.model, "pretrained", None), []
    if untouched is not None:
        notes = [" but ".join(["all from a file", *filter(None, [", ".join(untouched)])])]
    elif source is not None and not run.position.step:
        if source.new:
            notes = [f"new, as the files lack them: {shown(weights.modules_of(source.new))}"]
        if source.unused:
            notes.append(f"not used of the files: {shown(weights.modules_of(source.unused))}")
    return "; ".join(notes)


def columns_in(train_set: Any) -> str:
    described = getattr(train_set, "described", None)
    return str(described()) if callable(described) else shown(DataDescription.of(train_set).features)


LARGE = 1_000_000_000
"""Bytes of a rank's state from which the header tells its parts."""
