"""Runs the training loop on one rank; for `dry_run=true`, one step of it without a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ddp_hydra import heartbeat, results
from ddp_hydra.config import objective, rank_batch
from ddp_hydra.config.hydra_compat import config_of
from ddp_hydra.config.validate import expected_ranks
from ddp_hydra.console.text import counted, size_text
from ddp_hydra.data.batch import described
from ddp_hydra.data.loader import MicroBatch
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.fault_injection import FaultInjector
from ddp_hydra.rank.world import ALONE, World, in_world
from ddp_hydra.record import Start
from ddp_hydra.storage.manifest import BEST
from ddp_hydra.training import build_data, builders, memory, setup, sharded_checkpoint
from ddp_hydra.training.build_data import opened
from ddp_hydra.training.cadence import Actions
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import LEAVE, Decision, StopSignal
from ddp_hydra.training.lr_schedules import steps_in_epoch
from ddp_hydra.training.metrics import Count, Meter, computed, count, named
from ddp_hydra.training.monitor import bad_of_all_ranks, count_bad
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.parallel.parameter_groups import evaluation_mode
from ddp_hydra.training.run import TrainingRun
from ddp_hydra.training.seeds import OF_EVALUATION, seed_step, seeded
from ddp_hydra.training.train_step import modules_of
from ddp_hydra.training.update import Update

OF_THE_CLIENT = ("cluster", "dispatch", "results")
"""Parts of the config that no rank reads. OmegaConf would take as long for them as for the rest."""


@in_world
def train(
    world: World,
    config: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
    kept: Mapping[str, Any] | None = None,
    first_ranks: int | None = None,
    first_save: bool = False,
) -> dict[str, Any]:
    """Train one job's model.

    Args:
        world: of this rank.
        config: the resolved config as plain dicts; see `schema.Config`.
        files: files of the client on rank 0's host: "resume", the checkpoint to resume; "weights", to begin with.
        kept, first_ranks: see `TrainingRun`.
        first_save: where no step is left, a checkpoint is saved: the run directory has none.
    """
    cfg = config_of({name: part for name, part in config.items() if name not in OF_THE_CLIENT})
    fault, stop_signal = fault_injection.activate(cfg.faults), StopSignal(cfg.trainer.time_limit_s)
    heartbeat.at("start", 0)
    paths = {name: Path(path) for name, path in (files or {}).items()}
    device = builders.device(cfg)
    with (
        opened(cfg, "train", device, None, world) as train_set,
        opened(cfg, "val", device, train_set, world) as val_set,
    ):
        with memory.explained(cfg), torch.autograd.set_detect_anomaly(cfg.trainer.detect_anomaly):
            former = world.kept.get("run") if world.generation else None
            weights = None if world.generation else paths.get("weights")  # else the state of the world before is taken
            given = (weights, fault, stop_signal, kept, world)
            # What this process has trained in the world before goes before a checkpoint.
            saved = furthest(world, former) or resumed(world, paths.get("resume"))
            run = TrainingRun(cfg, train_set, val_set, *given, saved, former and former.parallel, first_ranks)
            del former, saved  # the optimizer's state of the world before, and a checkpoint, would stay in memory
            if world is not ALONE:  # jobs in one process have that in common
                world.kept["run"] = run
            with run.parallel.explain_errors():
                fit(run, first_save)
            world.kept.clear()
            summary = summarise(run)
        return summary | {"bad_samples": count_bad(bad_of_all_ranks(world, train_set, val_set))}


def resumed(world: World, checkpoint: Path | None) -> dict[str, Any]:
    # A collective.
    return {} if checkpoint is None else sharded_checkpoint.send(lambda: read(checkpoint, whole=False), world)


def furthest(world: World, former: TrainingRun | None) -> dict[str, Any]:
    """Return the state of the rank that has come furthest in the world before; {} if no rank was there. A collective.

    An exchange that has returned on one rank holds what all ranks have computed, so no completed step is lost.
    """
    steps = world.gather_objects(-1 if former is None else former.position.step) if world.generation else []
    if max(steps, default=-1) < 0:
        return {}
    found: dict[str, Any] = world.send(lambda: former and former.state.begin_capture()(), steps.index(max(steps)))
    return found


def fit(run: TrainingRun, first_save: bool = False) -> None:
    # A run that should stop early is saved first.
    if results.is_first_attempt():  # a later one waits for space where a save lacks it
        run.checkpoints.check_space(run.header.checkpoint_bytes)
    if run.rank == 0:
        results.emit(run.header, run.position.step)
    if run.validation is not None:
        run.validation.try_few(run.model, run.cfg.objective.metric)
        if run.cfg.trainer.validate_first and run.position.step == 0:  # nothing goes by these numbers
            validate(run, {})
            run.stop = 0  # there is nothing to save yet: the first step will stop the run
    run.call("start")
    run.state.check()  # not before: callbacks may make in on_start what they have a state of
    run.nonfinite.remember()
    run.pause_if_due()
    while not run.is_over:
        run.remember_unfrozen()
        run.begin_epoch()
        if run.state.validation_due and run.position.offset > 0 and not run.epoch_is_over:
            validate_amid_epoch(run, Actions(validate=True))
            continue
        for micro_batches in run.steps():
            seed_step(run.cfg.seed, run.step, run.rank)
            run.nonfinite.before_step()
            nonfinite = None
            for update, batches in run.begin_updates(micro_batches):  # most tasks have one
                decision, losses, counts = forward_backward(run, update, batches)
                run.hear(decision.stop)
                ends_epoch = run.step_ends_epoch
                due = run.cadence.after_step(run.step, ends_epoch, bool(run.stop), decision.log)

                heartbeat.at("update", run.step)
                # What is logged or saved can't be taken back, so there the gradients are checked at once.
                at_once = due.log or run.step in run.state.nonfinite
                nonfinite = update.find_nonfinite(decision, losses, at_once)
                if nonfinite is not None:
                    break
                if not update.weighing.is_empty:  # else the weights stay
                    run.apply(update)
                run.monitor.meter.add(*counts)
            if nonfinite is not None and run.rolls_back(nonfinite):
                break  # the position has moved: ask for its batches
            run.advance(updated=nonfinite is None)
            run.call("step")
            run.remember_unfrozen()
            if nonfinite is None and run.state.check_new():
                run.tell_unsaved()

            if due.log:
                run.log_interval(hold=not run.stop and (due.validate or due.leave or ends_epoch))
            if run.stop == LEAVE:
                run.leave()
            if due.validate:
                validate_amid_epoch(run, due)
            elif due.save:
                run.save_mid_epoch()
            run.monitor.after_step()
            if due.leave or run.is_over:
                break
        owes_epoch = run.state.validation_due and run.position.offset == 0
        if (run.epoch_is_over or owes_epoch) and not run.ends_early:
            means = run.end_epoch()
            validate_and_decide(run, run.cadence.after_epoch(run.position.step, run.position.epoch), means)
    if first_save and not run.checkpoints.number:
        run.save_validated(may_be_best=False)
    run.checkpoints.wait()  # what a callback does wrong at the end loses nothing
    run.call("end")


def forward_backward(
    run: TrainingRun, update: Update, micro_batches: Iterable[MicroBatch]
) -> tuple[Decision, list[Tensor], list[Count]]:
    # A collective.
    losses: list[Tensor] = []
    counts: list[Count] = []
    for batch in micro_batches:
        heartbeat.at("forward", run.step)
        with update.part.sync_gradients(batch.last):
            with run.autocast:
                result = update.part(batch.batch)
            loss = update.weighing.weigh(result, batch.size, is_only=batch.last and not losses)
            if run.fault.corrupts(run.step):
                loss = loss * float("nan")
            losses.append(loss.detach())
            if batch.last:
                # The vote travels while the gradients do; from a GPU, after them.
                decision = update.vote(losses, stop=run.stop_signal.reason(), log=run.log_clock.is_due())
            heartbeat.at("backward", run.step)
            update.backward(loss)
        counts.append(count(result, batch.size, update.name))
    return decision(), losses, counts


def validate_amid_epoch(run: TrainingRun, due: Actions) -> None:
    # A collective. An objective of the training waits for the epoch's end.
    validate_and_decide(run, due, {}, amid_epoch=True)
    run.train_mode()
    run.remember_unfrozen()


def validate_and_decide(run: TrainingRun, due: Actions, means: Mapping[str, float], amid_epoch: bool = False) -> None:
    # A collective. `means`: new ones of the training, over an epoch.
    run.synchronise()
    validated = due.validate and (run.validation is None or validate(run, means))
    if not validated or run.validation is None:
        run.log({} if run.stop else means)
    if validated:
        run.logged = {}  # a resume does not know what was logged before
        run.model.eval()  # also where its average was validated, or nothing
        averages = [] if run.ema is None else [run.ema.model]
        with evaluation_mode(averages), seeded(run.cfg.seed, run.position.step, run.rank, OF_EVALUATION):
            run.call("validation")
        run.hear_callbacks()
    metric = run.cfg.objective.metric
    has_new = validated or objective.is_of_run(metric)  # a callback logs it only where it is called
    validated |= run.validation is None
    counts = validated and has_new and (bool(means) or objective.is_of_validation(metric))
    if counts:
        run.schedule_progress.judge(run.state.scheduler, run.state.metrics.get(metric))
    is_unknown = counts and objective.is_unknown(metric, run.state.metrics)
    ends_early = counts and run.early_stopping.update(run.state.metrics)
    run.state.validation_due = bool(run.stop) or is_unknown  # a resume with another objective validates first
    may_be_best = counts and not run.stop
    run.state.validations += validated and not is_unknown
    run.pause_if_due()
    if run.stop or run.is_done or is_unknown or ends_early or due.save:
        run.save_validated(may_be_best)
    elif amid_epoch and (run.cadence.checkpoint_every_steps or run.cadence.checkpoint_every_epochs):
        run.save_validated(may_be_best, only_best=True)
    if is_unknown:
        run.checkpoints.wait()
        run.consensus.decide()  # no rank ends before the run is saved
        raise objective.unknown(metric, run.state.metrics)


def validate(run: TrainingRun, means: Mapping[str, float]) -> bool:
    assert run.validation is not None
    heartbeat.at("validate", run.position.step)
    with run.monitor.throughput.paused(), run.parallel.many_passes():
        metrics = run.validation.run(run.ema.model if run.ema else run.model, stop=run.stop_signal.interrupted)
    run.stop = run.consensus.decide(stop=run.stop_signal.interrupted()).stop
    if run.stop:
        return False
    run.log({**means, **metrics})
    if run.rank == 0:
        run.validation.metrics.show(run.position.step)
    return True


def summarise(run: TrainingRun) -> dict[str, Any]:
    # A collective.
    stopped_early = run.stopped_early()
    if stopped_early and run.rank == 0:
        results.text("stopped early", stopped_early, run.position.step)
    return {
        "steps": run.position.step,
        "samples": run.position.samples,
        "metrics": run.state.metrics,
        **run.monitor.totals(run.position.samples),
        "peak_memory": max(run.world.gather_objects(memory.peak_bytes(run.loader.device))),
        "interrupted": heartbeat.REASONS[run.stop],
        "stopped_early": stopped_early,
        "matrices": run.validation.metrics.lists() if run.validation is not None else {},
    }


def dry_run(config: Mapping[str, Any]) -> None:
    cfg = config_of(config)
    with opened(cfg, "train") as train_set, opened(cfg, "val", like=train_set) as val_set:
        results.emit(Start(first_step(cfg, train_set, val_set)))


def first_step(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    world_size = expected_ranks(cfg)
    rank_batch.settle(cfg, {}, world_size, world_size)
    cfg.data.global_batch = None  # this process makes the step of one of these ranks
    epoch_steps = steps_in_epoch(build_data.sampler(cfg, train_set, ALONE, ranks=world_size))
    precision = "bf16" if cfg.trainer.precision == "fp8" else cfg.trainer.precision  # this machine may have no GPU
    trainer = {"compile": None, "precision": precision}
    cfg = OmegaConf.merge(cfg, {"trainer": trainer, "data": {"prefetch": 0}})  # type: ignore[assignment]
    needed, told = setup.outlined(cfg, train_set, world_size)
    if needed > (free := memory.free_bytes(builders.device(cfg))):
        return [
            f"data      {setup.samples_in(train_set, val_set)}",
            *told,
            f"dry run: no step was made, since one process needs {size_text(needed)} for it, and {size_text(free)} are "
            "free here",
        ]
    run = TrainingRun(cfg, train_set, val_set, None, FaultInjector(), StopSignal())
    with run.parallel.explain_errors():
        run.begin_epoch()
        micro_batches, meter = list(next(run.steps())), Meter(run.loader.device)
        for update in run.updates.values():
            update.begin()
            with update.others_frozen():
                decision, _, counts = forward_backward(run, update, micro_batches)
            meter.add(*counts)
            update.rescale(update.weighing.factor(decision.n))
            if not update.weighing.is_empty:
                update.apply()
        run.advance(updated=True)
        run.state.check()
        metrics, batch = named("train", computed(run.task, meter.result())), micro_batches[0].batch
        losses = ", ".join(f"{value:.4f}" for name, value in metrics.items() if name.endswith("loss"))
        run.model.eval()
        with torch.no_grad(), run.autocast, evaluation_mode(modules_of(run.task)):
            predicted = described(run.task.predict(run.model, batch))
        if run.validation is not None:
            metrics |= run.validation.run(run.model, lambda: True, are_few=True)
    metric = cfg.objective.metric
    goes_by_callback = bool(cfg.callbacks) and not objective.is_of_run(metric)  # none of which is called here
    if not goes_by_callback and objective.is_unknown(metric, metrics):
        raise objective.unknown(metric, metrics, saved=False)
    by = f"{metric}, which a callback has to log" if goes_by_callback else metric
    in_epoch = f"{epoch_steps:,}" if epoch_steps else "an unknown number"
    return [
        f"data      {setup.samples_in(train_set, val_set)}",
        *(f"columns   {text}" for text in [setup.columns_in(train_set)] if text),
        f"batch     {described(batch)}",
        f"model     {type(run.model).__name__}, {weights.sizes(run.model)[0]:,} parameters",
        told[-1],
        f"steps     {in_epoch} in an epoch with {counted(world_size, 'rank')} of {cfg.data.batch_size}",
        f"loss      {losses} before training",
        f"predicts  {predicted}",
        f"metrics   {', '.join(metrics)}; {BEST} goes by {by}",
        "dry run: all of it works",
    ]
