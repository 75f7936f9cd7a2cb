"""Runs of the loop on one rank in this process: their config, their data, and what they said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from ddp_hydra.config import objective
from ddp_hydra.config.schema import TrainerConfig
from ddp_hydra.record import Record
from ddp_hydra.training.checkpoint import read

STEPS = 4
"""In an epoch: 9 samples, 2 in a step, one left over."""


class Numbers:
    """Samples of three classes."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
        self.y = torch.arange(n) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def config(**trainer: Any) -> Any:
    given = {"epochs": 2, "log_every_steps": 3, "device": "cpu", **trainer}
    return OmegaConf.create(
        {
            "seed": 0,
            "data": {"batch_size": 2},
            "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
            "sampler": {"_target_": "ddp_hydra.data.samplers.Distributed", "seed": 0},
            "task": {"_target_": "ddp_hydra.tasks.Classification", "metric": "accuracy"},
            "loss": {"_target_": "ddp_hydra.tasks.losses.CrossEntropy"},
            "mix": {},
            "metrics": {},
            "callbacks": {},
            "parallel": {"_target_": "ddp_hydra.training.parallel.ddp.DDP"},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
            "scheduler": {"_target_": "ddp_hydra.training.lr_schedules.cosine"},
            "trainer": OmegaConf.to_container(OmegaConf.structured(TrainerConfig(**given)), enum_to_str=True),
            "objective": {"metric": "val/accuracy", "direction": "maximize"},
        }
    )


class Run:
    """One run of the loop, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []
        self.value: dict[str, Any] = {}

    @property
    def saved(self) -> list[Record]:
        return [record for record in self.records if record.kind == "file"]

    @property
    def steps_saved(self) -> list[int]:
        return [record.step for record in self.saved]

    @property
    def bests(self) -> list[tuple[int, bool]]:
        return [(record.step, record.data.checkpoint.best) for record in self.saved]

    @property
    def texts(self) -> list[str]:
        return [record.data.text for record in self.records if record.kind == "text"]

    @property
    def header(self) -> list[str]:
        return next(record.data.lines for record in self.records if record.kind == "start")

    @property
    def last(self) -> Path:
        return Path(self.saved[-1].data.source)

    def metrics(self, name: str) -> list[tuple[int, float]]:
        logged = [record for record in self.records if record.kind == "metrics"]
        return [(record.step, record.data.metrics[name]) for record in logged if name in record.data.metrics]


def same(one: Path, other: Path) -> bool:
    return flat(read(one)) == flat(read(other))


def repeated(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that an equal run repeats."""
    return {name: value for name, value in metrics.items() if not objective.is_of_machine(name)}


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items() if key != "config"}
    return [flat(part) for part in value] if isinstance(value, (list, tuple)) else value


def check_resume(train: Any, stop_at: tuple[str, int] = ("update", 1), **options: Any) -> tuple[Run, Run]:
    """Check that a run which is stopped and resumed ends as the whole one; return the latter, and the one stopped."""
    stopped, whole = train(stop_at=stop_at, **options), train(**options)
    assert stopped.value["interrupted"]
    resumed = train(resume=stopped.last, **options)
    assert flat(read(resumed.last)) == flat(read(whole.last))
    assert stopped.metrics("val/loss") + resumed.metrics("val/loss") == whole.metrics("val/loss")
    assert resumed.metrics("lr") == [point for point in whole.metrics("lr") if point[0] > stopped.value["steps"]]
    return whole, stopped


BY_LOSS = {"objective": {"metric": "train/loss", "direction": "minimize"}}
RISING = {"objective": {"metric": "val/loss", "direction": "maximize"}}
"""An objective that gets better with each validation of so small a set."""
FALLING = {"objective": {"metric": "val/loss", "direction": "minimize"}}


def weights(run: Run) -> torch.Tensor:
    return torch.cat([part.flatten() for part in read(run.last)["model"].values()])


def with_callbacks(**nodes: Any) -> dict[str, Any]:
    return {"callbacks": {name: {"_target_": target, **rest} for name, (target, rest) in nodes.items()}}
