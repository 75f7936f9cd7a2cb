"""Runs jobs of this project for the report, each in a run directory that is removed, and reads what came of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import commands, overhead, report
from benchmarks.gpu.card import Card
from benchmarks.report import Goal

SHORT = ("data=digits", "model=mlp", "data.batch_size=32", "scheduler=none", "trainer.log_every_steps=1")
"""A job of a second: 1,437 images of 8x8, a network without noise."""
SHOWN = 6000
"""Characters of what a command printed last that are shown when it does not end as it should."""


class Missing(Exception):
    """A part can't run here; the message says what it needs."""


class Broken(Exception):
    """A job ended otherwise than it should; the message has the last thing that it said."""


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Args:
        dir: its run directory.
        returncode: of its command.
        output: what its command printed.
        seconds: from the command to the prompt.
    """

    dir: Path
    returncode: int
    output: str
    seconds: float

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return dict(json.loads((self.dir / "summary.json").read_text()))

    def every(self, name: str) -> list[float]:
        """Return all values of a metric."""
        return [record[name] for record in self.records if name in record]

    def speed(self, skip: int) -> float:
        """Return samples/s after the first `skip` steps."""
        return overhead.speed(self.dir / "metrics.jsonl", skip)

    def checkpoint(self, name: str = "last.pt") -> dict[str, Any]:
        """Return a checkpoint without its config, on the CPU."""
        found = torch.load(self.dir / "checkpoints" / name, weights_only=True, map_location="cpu")
        return {part: value for part, value in found.items() if part != "config"}


class Bench:
    """Starts jobs on the device that is reported on.

    Args:
        card: the GPUs; none of them on the CPU.
        folder: for run directories.
        variables: of the environment of all commands.
        repeats: how often a speed is measured.
    """

    def __init__(self, card: Card, folder: Path, variables: Mapping[str, str], repeats: int = 1) -> None:
        self.card, self.folder, self.repeats = card, folder, repeats
        self.variables = dict(variables)
        self.device = "cuda" if card.gpus else "cpu"
        self.timeout_s = 1200.0 if card.gpus else 480.0
        self._count = 0

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs are reported on."""
        return self.card.gpus > 0

    @property
    def half(self) -> str:
        """The precision of 16 bits that suits the card; fp32 on CPUs, many of which only imitate the others."""
        if not self.on_gpu:
            return "fp32"
        return "bf16" if self.card.bf16 else "fp16"

    def goal(self, limit: float, at_most: bool = False) -> Goal | None:
        """Return the goal of a speed; None on the CPU, where sizes are too small to tell one."""
        return Goal(limit, at_most) if self.on_gpu else None

    def ranks(self, number: int) -> tuple[str, ...]:
        """Return the overrides for a number of ranks; where there are fewer GPUs, the ranks share them through gloo."""
        shared = ("dispatch.backend=gloo",) if 0 < self.card.gpus < number else ()
        return f"cluster.n_workers={number}", f"dispatch.ranks={number}", *shared

    @property
    def backend(self) -> str:
        """What two ranks exchange gradients by."""
        return "nccl" if self.card.gpus >= 2 else "gloo"

    def new_folder(self, name: str) -> Path:
        """Return the path of a new folder, which is not made."""
        self._count += 1
        return self.folder / f"{self._count:02d}-{name}"

    def job(self, name: str, *overrides: str, ends: int = 0, variables: Mapping[str, str] | None = None) -> Job:
        """Train once, by the command that users type.

        Args:
            name: of the run directory.
            overrides: of its config.
            ends: the exit code that is expected.
            variables: more of the environment.

        Raises:
            Broken: it ended otherwise, or not in time.
        """
        folder = self.new_folder(name)
        threads = () if self.on_gpu else ("trainer.threads=1",)  # as a rehearsal may share its cores
        command = commands.job(f"trainer.device={self.device}", *threads, *overrides, run_dir=folder)
        job = self.command(command, folder, variables or {})
        if job.returncode != ends:
            report.progress(job.output[-SHOWN:])
            raise Broken(f"{name} ended with code {job.returncode}: {last_line(job.output)}")
        return job

    def command(self, command: list[str], folder: Path, variables: Mapping[str, str]) -> Job:
        """Run any command to its end.

        Raises:
            Broken: it did not end in time.
        """
        environment = commands.with_ours({**self.variables, **variables})
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=commands.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.timeout_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            report.progress(output[-SHOWN:])
            raise Broken(f"no end after {self.timeout_s:.0f} s: {last_line(output)}") from None
        return Job(folder, process.returncode, output, time.monotonic() - begin)

    def python(self, module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Run a module of ours as a command, and return the JSON of its last line.

        Args:
            module: its name.
            arguments: of its command line.
            variables: more of the environment.

        Raises:
            Broken: it failed.
        """
        done = self.command([sys.executable, "-m", module, *arguments], self.folder, variables or {})
        if done.returncode:
            report.progress(done.output[-SHOWN:])
            raise Broken(f"{module} ended with code {done.returncode}: {last_line(done.output)}")
        return dict(json.loads(done.output.strip().splitlines()[-1]))


def last_line(output: str) -> str:
    """Return the sentence of an error: the last line that is not indented."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def differing(one: Any, other: Any) -> list[str]:
    """Return the names of what is not equal bit for bit, all the way down; NaN equals NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        only = [str(key) for key in one.keys() ^ other.keys()]
        below = ((key, name) for key in one.keys() & other.keys() for name in differing(one[key], other[key]))
        return sorted(only + [f"{key}.{name}".rstrip(".") for key, name in below])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [f"{i}.{name}".rstrip(".") for i, (a, b) in pairs for name in differing(a, b)]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        return [] if same else [""]
    return [] if type(one) is type(other) and one == other else [""]


def relative(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two curves, over the size of the second's values."""
    assert len(one) == len(other) > 0, (len(one), len(other))
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one, other, strict=True))
