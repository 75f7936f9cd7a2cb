"""Holds the parts of one training run, and does with them what the loop asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig

from ddp_hydra import heartbeat, results
from ddp_hydra.config import checkpoint_config, objective, rank_batch
from ddp_hydra.console.text import listed
from ddp_hydra.data import draws
from ddp_hydra.data.loader import MicroBatch
from ddp_hydra.data.streams import StreamSampler
from ddp_hydra.errors import WorldLeft
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, load_run, memory, optimizers, setup
from ddp_hydra.training.cadence import Cadence, EarlyStopping, LogClock
from ddp_hydra.training.callbacks import Callbacks, MetricNames, RunView
from ddp_hydra.training.checkpoint import CheckpointSaver, load_fitting
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.lr_schedules import ScheduleProgress
from ddp_hydra.training.metrics import EpochMeans, named
from ddp_hydra.training.monitor import Monitor
from ddp_hydra.training.nonfinite import NonFiniteHandler, NonFiniteStep
from ddp_hydra.training.optimizers import UpdateBuilder
from ddp_hydra.training.parallel import Parallel, parameter_groups
from ddp_hydra.training.parallel.weights import restored_state
from ddp_hydra.training.profiler import Profiler
from ddp_hydra.training.seeds import seed_step, seeded
from ddp_hydra.training.state import Position, TrainingState, together
from ddp_hydra.training.task_state import TaskState
from ddp_hydra.training.train_step import loss_module
from ddp_hydra.training.update import Update, check_updates

DONE = heartbeat.REASONS.index("done")


class TrainingRun:
    """A training run on one rank.

    Args:
        weights: a file of weights to begin with; None for none.
        kept: the part of the config that checkpoints keep; None: all.
        saved: the state to go on from, the same on all ranks; None or {} for none.
        parallel: owns the model since the world before; None: the model is built.
        first_ranks: number of ranks of the job's first attempt; None: as many as in this one.

    Attributes:
        frozen_norms: layers that stay in evaluation mode.
        stop: the reason to stop early and be resumed, a number of `heartbeat.REASONS`; 0 for none.
        held: metrics of the step that wait for its validation.
        logged: on rank 0, the last value of each metric that callbacks have logged since the newest validation.
        is_done: a callback has called the run done at a validation.
        ended_by_callback: a callback has called the run done, there or after a step.
        total_steps: of the whole run; `cadence` has fewer, where a callback has called it done.
        logged_at: the step after which the training metrics were logged last.
    """

    def __init__(
        self,
        cfg: DictConfig,
        train_set: Any,
        val_set: Any,
        weights: Path | None,
        fault: fault_injection.FaultInjector,
        stop_signal: StopSignal,
        kept: Mapping[str, Any] | None = None,
        world: World = ALONE,
        saved: Mapping[str, Any] | None = None,
        parallel: Parallel | None = None,
        first_ranks: int | None = None,
    ) -> None:
        # A collective.
        DataDescription.of(train_set).check_validation(DataDescription.of(val_set))
        self.cfg, self.fault, self.stop_signal, self.world = cfg, fault, stop_signal, world
        self.rank, device = world.rank, builders.device(cfg)
        memory.begin(device)
        before, config = dict(saved or {}), dict(kept or checkpoint_config.stored_config(cfg))
        batch, warning = rank_batch.settle(cfg, before, world.size, first_ranks or world.size)
        if warning and self.rank == 0:
            results.warn(warning)
        self.sampler, self.consensus = setup.build_sampler(cfg, train_set, world)
        builders.set_float32(cfg)
        seed_step(cfg.seed, 0, 0)  # all ranks build the same model
        self.names = MetricNames()
        results.reserve(self.names.take)
        untouched: list[str] = []
        if parallel is None:
            parallel = builders.parallel(cfg, world)
            load = None if weights is None else partial(load_fitting, weights)
            make = lambda: memory.watch(builders.with_float8(builders.model(cfg, train_set), cfg, device))  # noqa: E731
            untouched = parallel.build(cfg.trainer, make, device, load, before.get("model") or ())
        else:
            parallel.rebind(world)
        self.parallel, self.model = parallel, parallel.model
        self.autocast = builders.autocast(cfg, device, parallel)
        self.task_state = TaskState(partial(seeded_task, cfg, train_set, device))
        self.task = self.task_state.task
        description = setup.check_data(cfg, self.task, train_set, val_set, before, world)
        for data in (train_set, val_set):
            if hasattr(data, "check_model"):
                with restored_state(self.model):
                    data.check_model(self.model)

        self.schedule_progress = progress = ScheduleProgress(
            cfg.trainer.epochs, cfg.trainer.max_steps, self.sampler, Position()
        )
        if before:
            progress.load_state_dict(before["progress"])
        self.builder = UpdateBuilder(cfg, self.parallel, self.task, self.consensus, self.sampler.global_batch, device)
        self.updates = self.builder.first(progress, before.get("unfrozen") or [])
        # after sync_batchnorm has replaced layers
        self.frozen_norms = parameter_groups.frozen_norms(self.model, cfg.trainer.freeze)
        self._build_state(config, description, batch)
        changed = load_run.restore(self.state, before, cfg, train_set) if before else ""
        if before:
            progress.move(self.state.scheduler)
        self._go_on_from(self.state.metrics)
        heartbeat.here().commit(self.position.step)

        self.total_steps = self.position.step + setup.steps_left(cfg.trainer, self.sampler, self.position)
        self.cadence = Cadence.from_config(cfg.trainer, self.total_steps)
        self.loader = build_data.loader(cfg, train_set, device, parallel.channels_last, world)
        self.validation = None
        if val_set is not None:
            self.validation = builders.evaluation(cfg, val_set, self.task, device, parallel)
            self.names.add(f"val/{name}" for name in ("loss", *self.validation.metrics.metrics))
        trainer = cfg.trainer
        self.nonfinite = NonFiniteHandler(trainer.on_nonfinite, trainer.max_nonfinite, self.state)
        self.checkpoints = CheckpointSaver(world, cfg.trainer.shard_above_gb)
        passes = setup.passes_of(self) if cfg.trainer.profile_steps and self.rank == 0 else []
        profiler = Profiler(self.rank, self.model, device, cfg.trainer, self.total_steps, passes, cfg.data.batch_size)
        self.monitor = Monitor(
            self.consensus,
            self.task,
            self.loader,
            self.updates.values(),
            profiler,
            self.position.samples,
            self.epoch_means,
            setup.operations(self, passes),
        )
        self.log_clock = LogClock(cfg.trainer.log_every_s if self.rank == 0 else None, cfg.trainer.log_growth)
        self.stop, self.logged_at = 0, self.position.step
        self.held: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.is_done = self.ended_by_callback = False
        self.header = setup.describe(self, train_set, val_set, changed, None if weights is None else untouched)

    def _build_state(self, config: dict[str, Any], description: DataDescription, batch: dict[str, int]) -> None:
        updates, trainer, goal, sampler = self.updates, self.cfg.trainer, self.cfg.objective, self.sampler
        has_eval_weights = any(optimizers.has_eval_weights(update.optimizer) for update in updates.values())
        self.ema = None
        if trainer.ema_decay or has_eval_weights:
            self.ema = self.parallel.build_average(trainer.ema_decay or 0.0)
        stopping = trainer.early_stopping_patience, trainer.early_stopping_min_delta
        self.early_stopping = EarlyStopping(goal.metric, goal.direction == "maximize", *stopping)
        self.epoch_means = EpochMeans(self.task)
        callbacks = builders.callbacks(self.cfg)
        extras = {
            "scaler": together({name: update.scaler for name, update in updates.items()}),
            "weighing": together({name: update.weighing for name, update in updates.items()}),
            "ema": self.ema,
            "early_stopping": self.early_stopping,
            "epoch_means": self.epoch_means,
            "loss": loss_module(self.task),
            "task": self.task_state,
            "progress": self.schedule_progress,
            "stream": sampler if isinstance(sampler, StreamSampler) else None,
        }
        self.state = TrainingState(
            self.parallel,
            together({name: update.optimizer for name, update in updates.items()}),
            together({name: update.scheduler for name, update in updates.items()}),
            self.schedule_progress.position,
            config,
            extras,
            description.as_dict(),
            batch=batch,
            ranks=self.world.size,
        )
        self.callbacks, self.is_refrozen = Callbacks(callbacks, self.state, self.world), False
        if callbacks:
            extras["callbacks"] = self.callbacks

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def step(self) -> int:
        return self.state.position.step + 1

    @property
    def is_over(self) -> bool:
        is_at_end = self.position.step >= self.cadence.total_steps and not self.state.validation_due
        return is_at_end or self.ends_early

    @property
    def ends_early(self) -> bool:
        return self.early_stopping.should_stop or self.is_done or bool(self.stop)

    @property
    def epoch_is_over(self) -> bool:
        return self.position.step >= self.cadence.total_steps or self._samples_are_used_up()

    def _samples_are_used_up(self, samples: int = 0) -> bool:
        return not self.sampler.steps(self.position.offset + samples)

    def hear(self, reason: int) -> None:
        # A run that is done ends as at its last step: with a validation.
        if reason == DONE:
            self.cadence = replace(self.cadence, total_steps=self.step)
            self.ended_by_callback = True
        else:
            self.stop = self.stop or reason

    def hear_callbacks(self) -> None:
        # A collective.
        if not self.callbacks.callbacks:
            return
        if self.consensus.decide(stop=self.stop_signal.asked).stop == DONE:
            self.is_done = self.ended_by_callback = True
        metric, logged = self.cfg.objective.metric, self.logged
        if not objective.is_of_run(metric):
            self.state.metrics.pop(metric, None)
            self.state.metrics |= self.world.send(lambda: {metric: logged[metric]} if metric in logged else {})

    def call(self, event: str) -> None:
        may_freeze = any(one.changes_training for one in self.callbacks.callbacks.values())
        parts = [update.part for update in self.updates.values()] if may_freeze else []
        before = [part.are_trained() for part in parts]
        self.callbacks.call(event, RunView(self))
        self.is_refrozen |= before != [part.are_trained() for part in parts]

    def unfreeze(self, patterns: str | Sequence[str], lr: float | None) -> None:
        # A collective.
        stage = {"patterns": listed(patterns), "lr": lr, "by_function": True}
        of_step = self._of_step()
        self.updates = self.builder.unfrozen(self.updates, stage)
        self._go_on_from(of_step)
        self.monitor.watch(self.updates.values())
        self.frozen_norms = parameter_groups.frozen_norms(self.model, self.cfg.trainer.freeze)
        self.state.unfrozen.append(stage)

    def follow_frozen(self) -> None:
        # A collective, once a callback has changed which parameters are trained. What a task changes inside its steps
        # is not followed: DDP would lack what a step thaws.
        updates, is_refrozen, self.is_refrozen = self.updates.values(), self.is_refrozen, False
        if is_refrozen and any(update.part.is_outdated for update in updates):
            for update in updates:
                update.part.synchronise()
            for update in updates:
                update.part = self.parallel.build_part(self.cfg.trainer, self.task, update.name)
            self.monitor.watch(updates)

    def stopped_early(self) -> str:
        # A collective.
        if self.ended_by_callback:
            reasons = self.world.gather_objects(self.stop_signal.why)
            return next(filter(None, reasons), "a callback has ended it")
        is_early = self.early_stopping.should_stop and self.position.step < self.cadence.total_steps
        return self.early_stopping.reason if is_early and not self.stop else ""

    def pause_if_due(self) -> None:
        # All ranks count them alike.
        after = self.cfg.trainer.pause_after_validations
        if after is not None and self.state.validations >= after and not self.is_over:
            self.stop = heartbeat.REASONS.index("pause")

    # -- epochs and steps --------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.loader.begin_epoch(self.position.epoch)
        self.train_mode()

    def train_mode(self) -> None:
        parameter_groups.train_mode(self.model, self.frozen_norms)
        for update in self.updates.values():  # a validation or a callback may have changed them
            update.part.buffers.are_due = True

    def steps(self) -> Iterator[Iterator[MicroBatch]]:
        heartbeat.at("load", self.step)
        batches = () if self.state.validation_due else self.batches()
        for micro_batches in self.loader.steps(batches, self.cfg.trainer.gradient_accumulation_steps):
            self.follow_frozen()
            yield map(self.monitor.count, micro_batches)
            if not self.epoch_is_over:
                heartbeat.at("load", self.step)

    def batches(self, steps_ago: int = 0) -> Any:
        epoch, offset = self.position.epoch, self.position.offset - steps_ago * self.sampler.global_batch
        if isinstance(self.sampler, StreamSampler):
            return self.sampler.batches(epoch, offset)
        batches = draws.ordered(self.sampler.batches, epoch, offset, self.cfg.seed)
        return draws.numbered(batches, epoch, offset, self.sampler.global_batch, self.rank)

    def begin_updates(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[Update, Iterable[MicroBatch]]]:
        names = listed(self.task.updates(self.step))
        check_updates(self.task, self.step, names, self.updates)
        if len(names) > 1:
            micro_batches = list(micro_batches)
        for update in map(self.updates.__getitem__, names):
            with update.others_frozen():
                update.begin()
                yield update, micro_batches

    def apply(self, update: Update) -> None:
        if not update.may_draw:  # the generators are slow to seed
            update.apply()
            return
        number = list(self.updates).index(update.name)
        with seeded(self.cfg.seed, self.step, number, _OF_AN_UPDATE, self.parallel.share):
            update.apply()

    @property
    def step_ends_epoch(self) -> bool:
        if isinstance(self.sampler, StreamSampler):  # only with the next batch does a rank know
            heartbeat.at("load", self.step + 1)
        return self._samples_are_used_up(self.sampler.global_batch)

    def rolls_back(self, found: NonFiniteStep) -> bool:
        for update in self.updates.values():
            update.part.leave_out_step()
        if not self.nonfinite.handle(found, self.rank, next(iter(self.batches(found.steps_ago)))):
            return False
        self.stop = 0  # the next step will stop the run: only then there is something to save
        self.ended_by_callback, self.cadence = False, replace(self.cadence, total_steps=self.total_steps)
        if self.stop_signal.asked_after > self.position.step:  # the callback will ask again
            self.stop_signal.asked = 0
        self._go_on_from(self.state.metrics)
        self.logged_at = self.position.step
        self.monitor.meter.clear()  # the steps since the last logged point are taken again
        self.monitor.throughput.interval(self.position.samples)
        return True

    def advance(self, updated: bool) -> None:
        if updated and self.ema is not None and self.ema.decay:
            self.ema.update(self.model)
        self.position.advance(self.sampler.global_batch)
        heartbeat.here().commit(self.position.step)
        self.schedule_progress.move(self.state.scheduler)

    def end_epoch(self) -> dict[str, float]:
        # The mean over the few steps of an epoch that is cut short is not comparable with a whole epoch's, so the last
        # whole epoch counts.
        means = self.epoch_means
        if self._samples_are_used_up():
            self.position.end_epoch()
            means.end_epoch()
            self.schedule_progress.move(self.state.scheduler)
            epochs = self.cfg.trainer.epochs
            if epochs is not None and self.position.epoch >= epochs:  # the data may end before the run's last step
                self.cadence = replace(self.cadence, total_steps=self.position.step)
        is_new = self.position.offset == 0 or not means.last
        found = means.last or means.so_far()
        self.state.metrics |= named("train", found)
        return named("train_epoch", found) if is_new else {}

    def synchronise(self) -> None:
        # A collective.
        if self.ema is not None and not self.ema.decay:
            given, key = [update.optimizer for update in self.updates.values()], (self.cfg.seed, self.step)
            with seeded(*key, len(given), _OF_AN_UPDATE, self.parallel.share), optimizers.eval_weights(given):
                self.ema.take(self.model)
        for name, update in self.updates.items():
            averages = [self.task.part(self.ema.model, name) if name else self.ema.model] if self.ema else []
            update.part.synchronise(*averages)

    # -- results -----------------------------------------------------------------------------------------------

    def log_interval(self, hold: bool = False) -> None:
        # A collective.
        heartbeat.at("log", self.position.step)
        self.logged_at = self.position.step
        self.log_clock.restart()
        metrics = self.monitor.interval(self.position.samples, self._of_step())
        if hold:
            self.held = metrics
            self.state.metrics |= metrics
        else:
            self.log(metrics)

    def _of_step(self) -> dict[str, float]:
        return {name: value for update in self.updates.values() for name, value in update.metrics().items()}

    def _go_on_from(self, of_step: Mapping[str, float]) -> None:
        for update in self.updates.values():
            update.go_on_from(of_step)

    def log(self, metrics: Mapping[str, float]) -> None:
        self.state.metrics |= metrics
        self.names.add(metrics)
        if self.validation is not None:  # it has most names of the training, but is still to come
            self.names.add(f"val/{name.removeprefix('train/')}" for name in metrics if name.startswith("train/"))
        metrics, self.held = {**self.held, **metrics}, {}
        if self.rank == 0 and metrics:
            results.send_metrics(metrics, self.position.step, self.epoch_shown, self.position.samples)

    @property
    def epoch_shown(self) -> int:
        return self.position.epoch + (self.position.offset > 0)

    def save_mid_epoch(self) -> None:
        # A collective.
        heartbeat.at("save", self.position.step)
        self._owe_validation()
        self.synchronise()
        self._save(best=False)

    def _owe_validation(self) -> None:
        self.state.validation_due = self.epoch_is_over or self.cadence.validates_amid_epoch(self.position.step)

    def leave(self) -> NoReturn:
        # A collective.
        self._owe_validation()
        self.synchronise()
        self.call("checkpoint")
        self.state.gather(self.world)
        self.checkpoints.wait()
        raise WorldLeft(f"the rank has left its world after step {self.position.step}")

    def save_validated(self, may_be_best: bool, only_best: bool = False) -> None:
        metric, direction = self.cfg.objective.metric, self.cfg.objective.direction
        is_best = may_be_best and self.state.improves_best(self.state.metrics.get(metric), direction)
        if is_best or not only_best:
            heartbeat.at("save", self.position.step)
            self._save(is_best)

    def _save(self, best: bool) -> None:
        # A collective.
        self.call("checkpoint")
        self.tell_unsaved()
        self.checkpoints.save(self.state, self.state.metrics, best)
        self.nonfinite.remember()

    def tell_unsaved(self) -> None:
        if self.rank == 0:
            self.task_state.tell_unsaved(*self.state.modules())

    def remember_unfrozen(self) -> None:
        # A collective. At the end of an epoch nothing is remembered: its validation may still be to come.
        if self.nonfinite.is_outdated and not self.epoch_is_over:
            if self.position.step > self.logged_at:
                self.log_interval()  # a rollback drops what is not logged
            self.state.gather(self.world)
            self.nonfinite.remember()


_OF_AN_UPDATE = 2


def seeded_task(cfg: DictConfig, train_set: Any, device: torch.device) -> Task:
    seed_step(cfg.seed, 0, 1)  # wherever the model was built, and whatever that has drawn
    return builders.trained_task(cfg, train_set, device)
