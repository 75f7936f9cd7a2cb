"""Evaluates a model: every sample counts exactly once, whatever the number of ranks. The config may choose metrics."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_hydra import heartbeat, results
from ddp_hydra.config import objective
from ddp_hydra.data.batch import described, mapped
from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Step, Task
from ddp_hydra.tasks.classification import is_samplewise
from ddp_hydra.training import memory
from ddp_hydra.training.consensus import Rounds
from ddp_hydra.training.metrics import Meter, added, computed, count, named
from ddp_hydra.training.parallel.parameter_groups import evaluation_mode
from ddp_hydra.training.parallel.weights import broadcast_buffers, restored_state, tensors_of
from ddp_hydra.training.seeds import OF_EVALUATION, seeded
from ddp_hydra.training.train_step import as_step, explained, loss_module, modules_of

FEW = 8
"""Samples of each rank with which metrics are tried."""
MAX_LABELS = 20
"""The most classes whose names and numbers a picture shows."""


@dataclass
class Evaluation:
    """Evaluates a model on a data set, with a batch size of each rank, and metrics besides the task's own."""

    loader: Loader
    batch_size: int
    autocast: Any
    task: Task
    metrics: EvalMetrics
    seed: int

    def try_few(self, model: nn.Module, metric: str) -> None:
        # A collective that changes nothing: a loss may learn from validations. A task's own `metrics` may need more
        # samples for some of its names.
        is_typed = metric.startswith("val/") and metric not in ("val/loss", "val/accuracy")
        if not self.metrics.metrics and not is_typed:
            return
        world = self.metrics.world
        task = copied(self.task, self.loader.device, world)
        are_copied = all(world.gather_objects(task is not None))
        if task is None or not are_copied:
            return
        few = replace(self, batch_size=min(self.batch_size, FEW), task=task, metrics=self.metrics.copied())
        # `train` of a model may undo what `eval` has done to its weights: it is called before attributes are put back.
        with warnings.catch_warnings(action="ignore"), restored_state(model), evaluation_mode([model]):
            found = few.run(model, stop=lambda: True, are_few=True)
        are_known = type(self.task).metrics is Task.metrics and few.metrics.are_complete
        if metric.startswith("val/") and are_known and "val/loss" in found and metric not in found:
            raise objective.unknown(metric, found, saved=False)

    @torch.no_grad()
    def run(self, model: nn.Module, stop: Callable[[], Any], are_few: bool = False) -> dict[str, float]:
        # A collective. The ranks' shares of the samples may differ in size; the number of forward passes does not.
        # BatchNorm's statistics may differ; rank 0's are saved. What else a task holds stays each rank's own.
        loss = loss_module(self.task)
        broadcast_buffers(self.metrics.world, model, *([loss] if loss is not None else []))
        model.eval()
        with evaluation_mode(modules_of(self.task)), seeded(self.seed, self.metrics.world.rank, OF_EVALUATION):
            return self._numbers(model, stop, are_few)

    def _numbers(self, model: nn.Module, stop: Callable[[], Any], are_few: bool) -> dict[str, float]:
        # A collective.
        world = self.metrics.world
        results.take_means()  # the training's
        mixture = getattr(self.loader.dataset, "mixture", None)
        of_sets = {}
        for name, samples in mixture.places.items() if mixture is not None else [("", None)]:
            rounds = Rounds(world, stop, self.loader.spare)
            of_sets[name] = self._sums(model, rounds, None if samples is None else samples.tolist())
            if rounds.stopped and not are_few:  # of a part of the samples, some metrics can't be computed
                for metric in self.metrics.metrics.values():
                    metric.reset()
                return {}
        own = named("val", computed(self.task, added(of_sets.values())))
        for name, sums in of_sets.items() if mixture is not None else ():
            own |= {f"{key}/{name}": value for key, value in named("val", computed(self.task, sums)).items()}
        more = self.metrics.result(are_few)
        if taken := sorted(own.keys() & (more.keys() | self.metrics.matrices.keys())):
            name = taken[0].removeprefix("val/").partition("/")[0]
            raise ConfigError(f"metrics.{name}: the task logs {', '.join(taken)} itself: call it +metrics.my_{name}")
        return own | more

    def _sums(self, model: nn.Module, rounds: Rounds, samples: list[int] | None) -> dict[str, Tensor]:
        # A collective.
        world, meter = self.metrics.world, Meter(self.loader.device)
        batches = self.loader.each_once(self.batch_size, world.rank, world.size, samples)
        for batch, indices, is_own in rounds.of(batches):
            with self.autocast, explained(batch):
                step = as_step(self.task.validation_step(model, batch), self.task)
            if is_own:
                meter.add(count(step, len(indices)))
                self.metrics.add(self.task, step)
            results.take_means()  # of a batch that is not this rank's
            heartbeat.progress()
        return meter.result(world)


def copied(task: Task, device: torch.device, world: World) -> Task | None:
    # None if it holds a lock or an open file, or too much for the memory that is free, as a large teacher or array.
    sharing = 1 if device.type == "cuda" else world.size
    try:
        arrays = [one for one in vars(task).values() if isinstance(one, Tensor | np.ndarray)]
        size = sum(one.nbytes for one in (*arrays, *(one for module in modules_of(task) for one in tensors_of(module))))
        return None if size * sharing > memory.free_bytes(device) / 2 else copy.deepcopy(task)
    except Exception:
        return None


def with_states(metric: Any) -> list[Any]:
    modules = metric.modules() if isinstance(metric, nn.Module) else ()
    return [part for part in modules if getattr(part, "_reductions", None)]


def synchronise(metric: Any, world: World) -> None:
    # A collective. Torchmetrics gathers a list entry by entry, so ranks with fewer batches would leave the others
    # waiting, and takes a state without samples for floats.
    parts = with_states(metric)
    own = [{name: getattr(part, name) for name in part._reductions} for part in parts]
    for part, *states in zip(parts, *world.gather_objects(mapped(Tensor.cpu, own)), strict=True):
        for name, reduce in part._reductions.items():
            values = [state[name] for state in states]
            if isinstance(getattr(part, name), list):  # as if one rank had seen all batches
                entries = (one for several in values for one in several)
                setattr(part, name, [one.to(part.device) if isinstance(one, Tensor) else one for one in entries])
            else:
                stacked = torch.stack(values).to(part.device)
                setattr(part, name, stacked if reduce is None else reduce(stacked))


def as_tensor(value: Any) -> Tensor | None:
    # None if it is neither a number nor a tensor nor an array of numbers.
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value)) if value.dtype.kind in "biuf" and value.itemsize <= 8 else None
    return torch.as_tensor(value) if isinstance(value, Tensor | float | int) else None


class EvalMetrics:
    """Several metrics of one evaluation. A metric that is a matrix, as a confusion matrix, becomes a picture.

    Tensors of more axes, as the matrices of several labels, are lists in the summary alone.
    """

    def __init__(self, metrics: Mapping[str, Any], classes: Sequence[str] = (), world: World = ALONE) -> None:
        self.metrics, self.classes, self.world = dict(metrics), list(classes), world
        for metric in self.metrics.values():
            for part in with_states(metric):
                part.distributed_available_fn = lambda: False  # `synchronise` does it
        self.matrices: dict[str, Tensor] = {}
        self.are_complete = True
        self.is_told = False

    def copied(self) -> EvalMetrics:
        # Some metrics remember over a `reset`, as torchmetrics' MinMaxMetric.
        copied = copy.copy(self)
        copied.metrics, copied.matrices = dict(self.metrics), {}
        for name, metric in self.metrics.items():
            with contextlib.suppress(Exception):  # a metric of one's own may hold what can't be copied
                copied.metrics[name] = copy.deepcopy(metric)
        return copied

    @torch.no_grad()
    def add(self, task: Task, step: Step) -> None:
        for name, metric in self.metrics.items():
            try:
                task.update_metric(metric, step)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                if not type(metric).__module__.startswith("torchmetrics."):
                    raise
                raise ConfigError(
                    f"metrics.{name} ({type(metric).__name__}) does not take what {type(task).__name__} predicts, "
                    f"{described(step.prediction)}, with targets of {described(step.target)} ({type(error).__name__}: "
                    f"{(str(error).splitlines() or [''])[0]:.200}): give it other arguments, or '~metrics.{name}'"
                ) from error

    def result(self, are_few: bool = False) -> dict[str, float]:
        # A collective.
        numbers: dict[str, float] = {}
        self.matrices.clear()
        self.are_complete = True
        for name, metric in self.metrics.items():
            if self.world.size > 1:
                if not with_states(metric):
                    raise ConfigError(
                        f"metrics.{name} ({type(metric).__name__}) has no states by torchmetrics' add_state, so what "
                        "several ranks have counted can't be put together: write it as a torchmetrics.Metric, or give "
                        "dispatch.ranks=1"
                    )
                synchronise(metric, self.world)
            try:
                found = metric.compute()
            except Exception:
                if not are_few:
                    raise
                found, self.are_complete = {}, False
            metric.reset()
            several = found.items() if isinstance(found, Mapping) else [("", found)]
            for key, one in several:
                if (value := as_tensor(one)) is None:
                    raise ConfigError(
                        f"metrics.{name} ({type(metric).__name__}) computes a {type(one).__name__}: it must compute a "
                        "number as AUROC does, a tensor, an array of numbers, or a dict of them; leave it out with "
                        f"'~metrics.{name}'"
                    )
                if is_samplewise(metric) and value.ndim:
                    value = value.double().mean(0)  # each sample counts once
                numbers |= self._logged(f"val/{name}/{key}" if key else f"val/{name}", value)
        return numbers

    def _logged(self, name: str, value: Tensor) -> dict[str, float]:
        if value.ndim == 0:
            return {name: float(value)}
        if value.ndim == 1:
            return {f"{name}/{label}": float(one) for label, one in zip(self._labels(value), value, strict=True)}
        self.matrices[name] = value.cpu()
        return {}

    def lists(self) -> dict[str, list[Any]]:
        return {name: matrix.tolist() for name, matrix in self.matrices.items()}

    def show(self, step: int) -> None:
        drawn = {name: matrix for name, matrix in self.matrices.items() if matrix.ndim == 2}
        if drawn and find_spec("matplotlib") is None:
            names = ", ".join(drawn)
            if not self.is_told:
                results.warn(f"there is no picture of {names} without matplotlib: pip install 'ddp-hydra[plot]'")
            self.is_told = True
            return
        for name, matrix in drawn.items():
            results.image(name, picture(matrix, self._labels(matrix)), step)

    def _labels(self, value: Tensor) -> list[str]:
        return self.classes if len(self.classes) == len(value) else [str(number) for number in range(len(value))]


def picture(matrix: Tensor, labels: Sequence[str]) -> bytes:
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    shares = (matrix.double() / matrix.double().sum(1, keepdim=True).clamp(min=1)).numpy()
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    axes.set(xlabel="predicted class", ylabel="true class")
    if len(matrix) <= MAX_LABELS:
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        axes.set_yticks(range(len(labels)), labels)
        for (true, guess), n in np.ndenumerate(matrix.numpy()):
            dark = shares[true, guess] > 0.4
            axes.text(guess, true, f"{n:g}", ha="center", va="center", color="white" if dark else "black")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=75)
    return buffer.getvalue()
