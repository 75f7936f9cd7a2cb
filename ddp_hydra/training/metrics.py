"""Adds up what a task counts, over many batches and all ranks, without waiting for the device at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_hydra import results
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Step, Task

LOGGED, TIMES = "log:", "times logged:"
"""The names of what `ddp_hydra.log` was given, and of how often, begin with these among the sums."""
Shapes = tuple[tuple[str, torch.Size], ...]
"""Names and shapes of sums that lie one after the other."""


class Count(NamedTuple):
    """The sums of one batch: those on the device, one after the other in float64, and those known without it."""

    shapes: Shapes
    sums: Tensor
    numbers: dict[str, float]


@torch.no_grad()
def count(step: Step, size: int, update: str = "") -> Count:
    prefix = f"{update}/" if update else ""
    n = size if step.n is None else step.n
    flat = {
        **_flat({"loss": (step.loss, None)} if step.summed else {"loss": step.loss.double() * n}),
        **_flat(step.sums),
        "n": n,
    }
    sums = {prefix + name: part for name, part in flat.items()}
    for name, (total, times) in results.take_means().items():
        sums[LOGGED + name] = total.to(step.loss.device) if isinstance(total, Tensor) else total
        sums[TIMES + name] = times
    on_device = {name: part.detach().to(step.loss.device) for name, part in sums.items() if isinstance(part, Tensor)}
    numbers = {name: float(part) for name, part in sums.items() if not isinstance(part, Tensor)}
    shapes = tuple((name, part.shape) for name, part in on_device.items())
    return Count(shapes, torch.cat([part.double().reshape(-1) for part in on_device.values()]), numbers)


def computed(task: Task, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics that a task makes of sums, and the means of what `ddp_hydra.log` was given."""
    own = {name: total for name, total in sums.items() if not name.startswith((LOGGED, TIMES))}
    found = task.metrics(own) if own else {}
    logged = {
        name.removeprefix(LOGGED): float(total / sums[TIMES + name.removeprefix(LOGGED)])
        for name, total in sums.items()
        if name.startswith(LOGGED)
    }
    if taken := sorted(found.keys() & logged.keys()):
        raise ConfigError(f"ddp_hydra.log({taken[0]}=…): the task has a metric of this name: give another name")
    return {**found, **logged}


def _flat(sums: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in sums.items():
        total, n = value if isinstance(value, tuple) else (value, ())
        found[f"{name}/sum" if n is None else name] = total
        if n is not None and not isinstance(n, tuple):
            found[f"{name}/n"] = n
    return found


class Meter:
    """Adds up the sums of batches. They stay on the device until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device: dict[Shapes, Tensor] = {}
        self.numbers: dict[str, float] = {}

    def add(self, *counts: Count) -> None:
        for shapes, sums, numbers in counts:
            if shapes in self.on_device:
                self.on_device[shapes] += sums
            else:
                self.on_device[shapes] = sums
            for name, number in numbers.items():
                self.numbers[name] = self.numbers.get(name, 0.0) + number

    def take(self) -> dict[str, Tensor]:
        # Wait for the device.
        numbers = {name: torch.tensor(number, dtype=torch.float64) for name, number in self.numbers.items()}
        found = added([*(split(flat.cpu(), shapes) for shapes, flat in self.on_device.items()), numbers])
        self.clear()
        return found

    def result(self, world: World = ALONE) -> dict[str, Tensor]:
        # A collective.
        return added(world.gather_objects(self.take()))

    def clear(self) -> None:
        self.on_device.clear()
        self.numbers.clear()


def added(of_parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    # In the order of the parts, so that all ranks come to the same.
    total: dict[str, Tensor] = {}
    for sums in of_parts:
        for name, part in sums.items():
            if name in total and total[name].shape != part.shape:
                shapes = f"{tuple(total[name].shape)} and {tuple(part.shape)}"
                raise ValueError(f"the task's sums {name!r} have the shapes {shapes}: give each sum one shape")
            total[name] = total[name] + part if name in total else part
    return total


def split(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    parts = flat.split([shape.numel() for _, shape in shapes])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


class EpochMeans:
    """Adds up what all ranks have counted in the epoch under way, and keeps the means of the last whole epoch.

    All ranks hold the same sums, so a checkpoint saves them once, and a resume may have another number of ranks.

    Attributes:
        sums: over the epoch under way, float64 on the CPU.
        last: means over the last whole epoch; {} before its end.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sums: dict[str, Tensor] = {}
        self.last: dict[str, float] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        self.sums = added([self.sums, sums])

    def so_far(self) -> dict[str, float]:
        found = computed(self.task, self.sums)
        return {name: float(value) for name, value in found.items()}

    def end_epoch(self) -> None:
        # An epoch whose steps were all left out has none.
        self.last = self.so_far() or self.last
        self.sums = {}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "last": dict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums, self.last = dict(state["sums"]), dict(state["last"])
