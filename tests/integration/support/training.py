"""Running the training loop on a gang, and reading what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.config.project import pack
from ddp_hydra.dispatch import Gang
from ddp_hydra.record import Record
from ddp_hydra.writers.handler import ResultsHandler, default_writers

CLOCKS = ("time", "samples_per_s", "tokens_per_s", "slowest_rank", "data_wait", "data/bytes_per_s", "data/cache_hits")
"""Metrics that are measured by a clock, or hang on who was first."""


BLOCKS = (
    "data=tiny",
    "model=blocks",
    "optimizer=adamw",
    "optimizer.fused=false",  # its last elements round otherwise on a CPU, by the length of a share
    "scheduler=cosine",
    "trainer.log_every_steps=1",
    "results.keep_checkpoints=null",
)
"""A run of the model of blocks."""


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def metrics_of(folder: Path, *without: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what is measured by a clock."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in (*CLOCKS, *without)} for line in lines]


@dataclass
class Trained:
    """One run of the training loop on a gang."""

    folder: Path
    value: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def metrics(self, *without: str) -> list[dict[str, Any]]:
        return metrics_of(self.folder, *without)

    def samples(self) -> list[list[int]]:
        """The global batches, as the model saw them, the ranks' parts one after the other."""
        told = [r for r in self.records if r.kind == "text" and r.data.name == "samples"]
        by_rank: dict[int, list[list[int]]] = {}
        for record in told:
            by_rank.setdefault(record.rank, []).append(json.loads(record.data.text))
        return [list(chain(*parts)) for parts in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]

    def checkpoint(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / "checkpoints" / name, weights_only=True)


def configured(project: Path, *overrides: str) -> DictConfig:
    """Compose what a job is given."""
    schema.register()
    with initialize_config_dir(str(project / "conf"), **VERSION_BASE):
        return compose("config", list(overrides))


def composed(project: Path, *overrides: str) -> dict[str, Any]:
    """Compose what the ranks are given."""
    return schema.resolved(configured(project, *overrides))


def train(
    client: Any, project: Path, folder: Path, *overrides: str, ranks: int = 2, resume: Path | None = None
) -> Trained:
    """Run the training loop on some ranks of a cluster."""
    plain = composed(project, *overrides)
    files = {"resume": resume} if resume else {}
    gang = Gang(client, ranks=ranks, threads=1, project=pack(project), files=files)
    trained = Trained(folder)
    with ResultsHandler(default_writers(folder, gang.fetch, keep=None, progress=False)) as handler:

        def take(record: Record) -> None:
            trained.records.append(record)
            handler.handle(record)

        gang.on_record = take
        trained.value = gang.run("ddp_hydra.training.loop:train", plain)[0]
    return trained


def learned(run: Trained) -> dict[str, Any]:
    """What the run's last checkpoint has but for its config."""
    content = run.checkpoint("last.pt")
    return {
        name: content[name]
        for name in ("model", "optimizer", "position", "best", "scheduler", "ema")
        if name in content
    }
