"""A tracking service in a folder: one file per run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_hydra.record import Record
from ddp_hydra.writers.loggers import Logger, RunInfo, ServiceRun


class Tracker(Logger):
    """Append a line of JSON for all that it gets.

    Args:
        folder: where the files are.
        does: "blocks" blocks for ever, "fails" fails twice; "" works.
    """

    def __init__(self, folder: str, does: str = "") -> None:
        super().__init__("all")
        self.folder, self.does, self.file, self.tries = Path(folder), does, Path(), 0

    def begin(self, job: RunInfo) -> ServiceRun:
        """Make the run's file, called by the number of runs before."""
        if self.does == "blocks":
            time.sleep(10_000)
        self.tries += 1
        if self.does == "fails" and self.tries <= 2:
            raise ConnectionError("nobody there")
        self.folder.mkdir(parents=True, exist_ok=True)
        run = job.earlier or f"run-{job.name.replace('/', '-')}"
        self.file = self.folder / f"{run}.jsonl"
        self.say("begin", job.name, job.sweep, job.tags, job.params, job.earlier)
        return ServiceRun(run, f"http://tracker/{run}")

    def say(self, *what: Any) -> None:
        """Append a line."""
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def metrics(self, values: Mapping[str, float], record: Record) -> None:
        """Note the metrics of a step."""
        self.say("metrics", record.step, dict(values))

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        """Note a checkpoint and its size."""
        self.say("checkpoint", path.name, path.stat().st_size)

    def end(self, status: str) -> None:
        """Note the end."""
        self.say("end", status)
