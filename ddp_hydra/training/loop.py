"""The training loop, as one rank runs it. It reads like the loop one would write by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_hydra import heartbeat, results
from ddp_hydra.config import checkpoint_config, objective
from ddp_hydra.console.plural import counted
from ddp_hydra.data.samplers import Repeated
from ddp_hydra.rank import fault_injection
from ddp_hydra.training import builders, parameter_groups, precision, pretrained, resume
from ddp_hydra.training.checkpoint import Position, Saver, State, read_on_all_ranks
from ddp_hydra.training.consensus import StepConsensus, StopSignal
from ddp_hydra.training.early_stopping import EarlyStopping
from ddp_hydra.training.ema import Ema
from ddp_hydra.training.inspection import Inspection
from ddp_hydra.training.metrics import Count, Meter, count, means
from ddp_hydra.training.monitoring import memory
from ddp_hydra.training.monitoring.data_stats import DataStats, bad_of_all_ranks, count_bad, skipped_by
from ddp_hydra.training.monitoring.profiler import Profile
from ddp_hydra.training.monitoring.stragglers import Stragglers
from ddp_hydra.training.monitoring.throughput import Throughput
from ddp_hydra.training.nonfinite import NonFinite
from ddp_hydra.training.optimizer_step import OptimizerStep
from ddp_hydra.training.progress import Progress


def train(
    config: Mapping[str, Any], files: Mapping[str, str] | None = None, kept: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train one job's model.

    Args:
        config: the resolved config, plain; see `config.Config`.
        files: files of the client on rank 0's host: "resume", the checkpoint to go on from; "weights", to begin with.
        kept: what checkpoints keep of the config, see `stored.of`; None: all but the cluster.

    Returns:
        On each rank: steps, samples, train_s, the last metrics by name, what the data cost, and `interrupted`: why it
        stopped before its end, or "".
    """
    cfg = OmegaConf.create(dict(config))
    fault, stop_signal = fault_injection.wait(cfg.faults), StopSignal(cfg.trainer.time_limit_s)
    heartbeat.at("start", 0)
    seed_others(cfg.seed)  # all ranks split a data set alike
    with builders.datasets(cfg) as (train_set, val_set):
        with memory.explained(cfg), torch.autograd.set_detect_anomaly(cfg.trainer.detect_anomaly):
            paths = {name: Path(path) for name, path in (files or {}).items()}
            value = fit(cfg, train_set, val_set, paths, fault, stop_signal, kept)
        for name, reason in {**getattr(train_set, "bad", {}), **getattr(val_set, "bad", {})}.items():
            print(f"bad sample, replaced by its neighbour: {name}: {reason}")  # noqa: T201
        return value | {"bad_samples": count_bad(bad_of_all_ranks(train_set, val_set))}


def fit(
    cfg: DictConfig,
    train_set: Any,
    val_set: Any,
    files: Mapping[str, Path],
    fault: fault_injection.Armed,
    stop_signal: StopSignal,
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on a data set.

    Args:
        cfg: the resolved config.
        train_set: the training data.
        val_set: the validation data, or None.
        files: "resume", the checkpoint to go on from; "weights", to begin with; only rank 0 reads them.
        fault: what shall go wrong on this rank on purpose.
        stop_signal: whether to stop before the end.
        kept: what checkpoints keep of the config; None: all but the cluster.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = builders.device(cfg)
    memory.begin(device)
    sampler = builders.sampler(cfg, train_set, rank, world_size)
    if cfg.trainer.overfit_batches:
        sampler = Repeated(sampler, cfg.trainer.overfit_batches)
    precision.set_float32(cfg.trainer.precision)
    autocast = precision.autocast(cfg.trainer.precision, device)

    # model
    seed_step(cfg.seed, 0, 0)  # all ranks build the same
    bare = builders.model(cfg, train_set).to(device)
    memory.watch(bare)
    new = pretrained.load(bare, files["weights"]) if "weights" in files else []  # DDP hands them on from rank 0
    channels_last = builders.choose(cfg.trainer.channels_last, builders.has_convolutions(bare))
    if channels_last:
        bare = bare.to(memory_format=torch.channels_last)
    parameter_groups.freeze(bare, cfg.trainer.freeze)
    parameter_groups.activation_checkpointing(bare, cfg.trainer.activation_checkpointing)
    model = builders.parallel(cfg, bare)
    frozen = parameter_groups.frozen_norms(model.model)  # only now: sync_batchnorm puts others in their places
    criterion, mix, class_axis = builders.loss(cfg), builders.mix(cfg, train_set), objective.class_axis(cfg)

    # optimizer, and where to begin
    position = Position()
    progress = Progress(cfg.trainer.epochs, cfg.trainer.max_steps, sampler, position)
    saved = read_on_all_ranks(files["resume"]) if "resume" in files else {}
    progress.load_state_dict(saved.get("progress") or progress.state_dict())
    optimizer = builders.optimizer(cfg, model.model, sampler.global_batch)
    scheduler = builders.schedule(cfg, optimizer, progress.total, progress.epoch_steps)
    scaler = precision.scaler(cfg.trainer.precision, device)
    ema = Ema(model.model, cfg.trainer.ema_decay) if cfg.trainer.ema_decay else None
    update = OptimizerStep(model, optimizer, scaler, cfg.trainer.clip_norm, ema)
    early_stop = EarlyStopping.of(cfg)
    extras = {"scaler": scaler, "ema": ema, "early_stop": early_stop, "progress": progress}
    state = State(model.model, optimizer, scheduler, position, dict(kept or checkpoint_config.of(cfg)), extras)
    changed = ""
    if saved:
        changed = resume.restore(state, saved)
        progress.move(scheduler)
        saved.clear()  # it is as large as the model
    total_steps = position.step + steps_left(cfg.trainer, sampler, position)

    loader = builders.loader(cfg, train_set, device, channels_last)
    validation = builders.evaluation(cfg, val_set, device, channels_last) if val_set is not None else None
    meter, saver, consensus = Meter(device), Saver(), StepConsensus()
    nonfinite = NonFinite(cfg.trainer.on_nonfinite, cfg.trainer.max_nonfinite, state)
    late = device.type == "cuda" and cfg.trainer.on_nonfinite != "skip" and model.alike
    inspection = Inspection(update, consensus, late)
    metrics: dict[str, float] = {}
    stop = 0
    if rank == 0:
        told = header(cfg, bare, train_set, val_set, sampler, total_steps, position, device)
        if changed:
            told["lines"].append(f"changed   {changed}")
        if "weights" in files:
            told["lines"].append(f"weights   from a file, all but {', '.join(new) or 'none'}")
        results.emit("start", told, position.step)

    watch, data_report = Throughput(position.samples), DataStats(loader)
    stragglers = Stragglers(model.model, loader, device, hooks=cfg.trainer.compile is None)
    profile = Profile(cfg.trainer.profile_steps, rank, model.model, device, cfg.trainer.precision)
    profile.check(total_steps)
    while (position.step < total_steps or state.pending) and not (stop or early_stop.wanted):
        if hasattr(train_set, "set_epoch"):
            train_set.set_epoch(position.epoch)
        model.train(frozen)
        heartbeat.at("load", position.step + 1)
        batches = sampler.batches(position.epoch, position.offset) if not state.pending else ()
        for parts in loader.steps(batches, cfg.trainer.gradient_accumulation_steps):
            step = position.step + 1
            seed_step(cfg.seed, step, rank)
            nonfinite.before_step()
            update.begin()
            losses: list[torch.Tensor] = []
            counts: list[Count] = []

            for part in parts:  # one, or trainer.gradient_accumulation_steps of them
                heartbeat.at("forward", step)
                x, y = mix(part.x, part.y)
                profile.note_batch(x)
                with model.sync_gradients(part.last):
                    with autocast:
                        logits = model(x)
                        loss = criterion(logits, y)
                    if fault.spoils(step):
                        loss = loss * float("nan")
                    shared = loss if part.share == 1 else loss * part.share
                    losses.append(shared.detach())
                    if part.last:
                        # It travels with the gradients; from a GPU, after them.
                        vote = inspection.vote(losses, stop=stop_signal.reason())

                    heartbeat.at("backward", step)
                    update.backward(shared)
                counts.append(count(loss, logits, y, class_axis))
            decision = vote.result()
            stop = decision.stop

            heartbeat.at("update", step)
            left = sampler.steps(position.offset + sampler.global_batch) if step < total_steps else 0
            often = cfg.trainer.log_every_steps, cfg.trainer.checkpoint_every_steps
            now = bool(stop) or not left or step in nonfinite.seen or any(due(step, every) for every in often)
            trouble = inspection.judge(decision, losses, now)
            if trouble is None:
                update.apply()
                meter.add(*counts)
            else:
                update.discard()
                offset = position.offset - trouble.ago * sampler.global_batch
                samples = next(iter(sampler.batches(position.epoch, offset)))
                if nonfinite.refuse(trouble, rank, samples):
                    stop = 0  # at the next step, from where there is something to save
                    meter.clear()  # what was counted since is done again
                    watch.lap(position.samples)
                    break
            position.advance(sampler.global_batch)
            progress.move(scheduler)  # also where the step was left out

            # log and save; a save is always logged too, so that a resumed run begins with an empty meter
            last = position.step >= total_steps
            boundary = last or epoch_over(sampler, position)
            save = bool(stop) or (due(position.step, cfg.trainer.checkpoint_every_steps) and not boundary)
            if due(position.step, cfg.trainer.log_every_steps) or save or boundary:
                heartbeat.at("log", step)
                counted = meter.take()  # waits for the device, whose work belongs to the lap
                lap_s, speed = watch.lap(position.samples)
                sums, reading, own = consensus.gather(counted, data_report.mine(lap_s), stragglers.mine())
                training = means("train", sums) | update.metrics() | {"samples_per_s": speed}
                training |= data_report.lap(reading) | stragglers.lap(own)
                metrics |= training
                log(training, position, rank)
            if save:
                state.pending = boundary
                heartbeat.at("save", step)
                update.synchronise()
                nonfinite.keep()
                if rank == 0:
                    saver.save(state, metrics, best=False)
            profile.step()
            if last or stop:
                break
            if not boundary:
                heartbeat.at("load", step + 1)
        state.pending = state.pending or position.step >= total_steps or epoch_over(sampler, position)
        if stop or not state.pending:
            continue

        # validate and save at the end of an epoch
        if epoch_over(sampler, position):
            position.end_epoch()
            progress.move(scheduler)
        last = position.step >= total_steps
        update.synchronise()
        judged = validation is None
        if validation is not None and (last or due(position.epoch, cfg.trainer.validate_every_epochs)):
            heartbeat.at("validate", position.step)
            with watch.paused():
                found = validation.run(ema.model if ema else model.model, stop=stop_signal.reason)
            stop = consensus.vote(stop=stop_signal.reason()).result().stop
            if not stop:
                judged = True
                metrics |= found
                log(found, position, rank)
                if rank == 0:
                    validation.show(position.step)
        unknown = judged and objective.is_unknown(cfg.objective.metric, metrics)
        state.pending = bool(stop) or unknown  # so that a resume with another objective validates first
        last |= judged and early_stop.note(metrics)
        by_step = due(position.step, cfg.trainer.checkpoint_every_steps)
        if stop or last or unknown or by_step or due(position.epoch, cfg.trainer.checkpoint_every_epochs):
            heartbeat.at("save", position.step)
            best = judged and not stop and is_best(state, metrics, cfg.objective)  # goes by these very weights
            nonfinite.keep()
            if rank == 0:
                saver.save(state, metrics, best)
        if unknown:
            saver.wait()
            consensus.vote().result()  # no rank ends before it is saved
            raise objective.unknown(cfg.objective.metric, metrics)
    saver.wait()
    total = watch.total(position.samples)
    ended = {"steps": position.step, "samples": position.samples, "metrics": metrics, "data": data_report.total()}
    ended |= {"slowest": stragglers.total(), "peak_memory": memory.peak_of_all_ranks(device)}
    return ended | total | {"interrupted": heartbeat.REASONS[stop]}


def epoch_over(sampler: Any, position: Position) -> bool:
    """Whether the epoch has no full global batch left."""
    return bool(sampler.steps(position.offset) == 0)


def steps_left(trainer: DictConfig, sampler: Any, position: Position) -> int:
    """Steps from a position to the end of the run: all epochs, or max_steps where that is less."""
    left = (trainer.max_steps - position.step) if trainer.max_steps else float("inf")
    if trainer.epochs:
        left = min(left, sampler.steps(position.offset) + (trainer.epochs - position.epoch - 1) * len(sampler))
    return max(0, int(left))


def due(count: int, every: int) -> bool:
    """Whether something that happens every so often happens now; 0 means never."""
    return every > 0 and count % every == 0


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make the randomness of a step (dropout, say) a function of where the run is, so that a resume repeats it."""
    mixed = (seed * 1_000_003 + step) * 65_537 + rank
    torch.default_generator.manual_seed(mixed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed % 2**63)
    seed_others(mixed)


def seed_others(seed: int) -> None:
    """Seed the global generators of numpy and Python: ranks are forks of one process, and would all draw the same."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def log(metrics: Mapping[str, float], position: Position, rank: int) -> None:
    """Send metrics, from rank 0, with the epoch that they belong to, the first being 1."""
    if rank == 0:
        epoch = position.epoch + (position.offset > 0)
        results.log(metrics, step=position.step, epoch=epoch, samples=position.samples)


def is_best(state: State, metrics: Mapping[str, float], objective: DictConfig) -> bool:
    """Whether the objective is better than ever before; remembers it."""
    value = metrics.get(objective.metric)
    if value is None or value != value:
        return False
    sign = 1 if objective.direction == "maximize" else -1
    if state.best is not None and sign * value <= sign * state.best:
        return False
    state.best = value
    return True


def header(
    cfg: DictConfig,
    model: nn.Module,
    train_set: Any,
    val_set: Any,
    sampler: Any,
    total_steps: int,
    position: Position,
    device: torch.device,
) -> dict[str, Any]:
    """What a person wants to see before it starts."""
    world_size = dist.get_world_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = f", {parameters - trained:,} of them frozen" if trained < parameters else ""
    validation = f", {len(val_set):,} for validation" if val_set is not None else ""
    ranks, threads = counted(world_size, "rank"), counted(torch.get_num_threads(), "thread")
    parts = f"{cfg.trainer.gradient_accumulation_steps} parts x " if cfg.trainer.gradient_accumulation_steps > 1 else ""
    lines = [
        f"model     {type(model).__name__}, {parameters:,} parameters{frozen}",
        f"data      {counted(len(train_set), 'sample')}{validation}",
        f"ranks     {world_size} on {device.type}, {threads} each, {cfg.trainer.precision}",
        f"batch     {cfg.data.batch_size} x {parts}{ranks} = {sampler.global_batch} effective",
        f"steps     {total_steps:,}, {len(sampler):,} in an epoch",
    ]
    lines += [f"skipped   {said}" for said in dict.fromkeys(map(skipped_by, (train_set, val_set))) if said]
    if position.step:
        lines.append(f"resumed   at step {position.step:,}, epoch {position.epoch + 1}, sample {position.samples:,}")
    epochs = -(-total_steps // len(sampler))
    return {
        "lines": lines,
        "total_steps": total_steps,
        "epochs": epochs,
        "steps_per_epoch": len(sampler),
        "world_size": world_size,
    }
