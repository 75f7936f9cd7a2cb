"""Traces a few steps for `debug=profile`, and makes a table of where their time and FLOPs go."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from ddp_hydra import heartbeat, results
from ddp_hydra.errors import ConfigError
from ddp_hydra.training import memory
from ddp_hydra.training.cost import Pass
from ddp_hydra.training.parallel import weights

TRAINING = 3
"""A training step costs about three forward passes: the backward pass costs two."""

PEAK_TFLOPS = {
    ("B200", "bf16"): 2250.0,
    ("H200", "bf16"): 989.0,
    ("H200", "tf32"): 495.0,
    ("H100", "bf16"): 989.0,
    ("H100", "tf32"): 495.0,
    ("A100", "bf16"): 312.0,
    ("A100", "tf32"): 156.0,
    ("L40S", "bf16"): 362.0,
    ("L4", "bf16"): 121.0,
    ("A10", "bf16"): 125.0,
    ("V100", "fp16"): 125.0,
    ("T4", "fp16"): 65.0,
}
"""Dense peaks of matrix units, from the makers' data sheets; SXM where there are several."""


def peak_tflops(device: str, precision: str) -> float | None:
    kinds = {"fp8": ("bf16",), "fp16": ("fp16", "bf16")}.get(precision, (precision,))  # fp8 as torchtitan counts
    words: Sequence[str] = device.replace("-", " ").split()
    return next((peak for (name, kind), peak in PEAK_TFLOPS.items() if name in words and kind in kinds), None)


def utilisation(flops_per_s: float, device: torch.device, precision: str) -> float | None:
    # The share of the device's peak; None on CPUs, and where it is not known.
    if device.type != "cuda":
        return None
    peak = peak_tflops(torch.cuda.get_device_name(device), precision)
    return None if peak is None else flops_per_s / (peak * 1e12)


WARM_UP = 3
"""Steps before the first traced one: work that is done once per run is not typical."""
NAMES = {
    "load": "waiting for data",
    "forward": "forward pass",
    "backward": "backward pass, with the exchange of gradients",
    "update": "optimizer",
    "log": "results: metrics",
    "save": "results: checkpoint",
    "validate": "validation",
}
EXCHANGES = ("gloo:", "nccl:", "c10d::", "shared:")


class Profiler:
    """Traces some steps of this rank; sends the trace, and rank 0 a table.

    Args:
        passes: forward passes of a step, of `batch_size` samples; [] if torch can't count their operations.
    """

    def __init__(
        self,
        rank: int,
        model: nn.Module,
        device: torch.device,
        trainer: DictConfig,
        total_steps: int,
        passes: Sequence[Pass] = (),
        batch_size: int = 1,
    ) -> None:
        steps = trainer.profile_steps
        needed = WARM_UP + steps
        if steps and total_steps < needed:
            few = f"trainer.profile_steps={steps} takes {needed} steps, but this run has {total_steps}"
            raise ConfigError(f"{few}: give trainer.max_steps={needed}")
        self.steps, self.rank, self.model, self.device, self.precision = steps, rank, model, device, trainer.precision
        self.passes, self.batch_size = passes, batch_size
        self.steps_seen = self.samples = 0
        self.trace: Any = None
        self.span: Any = None
        self.spent_s: defaultdict[str, float] = defaultdict(float)  # by phase; on a GPU, the time to launch its work

    def count(self, samples: int) -> None:
        self.samples += samples if self.trace is not None else 0

    def after_step(self) -> None:
        if not self.steps or self.steps_seen > WARM_UP + self.steps:
            return
        self.steps_seen += 1
        if self.steps_seen == WARM_UP:
            self._begin()
        elif self.steps_seen == WARM_UP + self.steps:
            self._end()

    def _begin(self) -> None:
        on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self.trace = torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self.trace.start()
        self.phase, self.phase_began = "", time.perf_counter()
        heartbeat.on_phase(self._enter)

    def _enter(self, phase: str, step: int) -> None:
        now = time.perf_counter()
        if self.phase:
            self.spent_s[self.phase] += now - self.phase_began
        self.phase, self.phase_began = phase, now
        if self.span is not None:
            self.span.__exit__(None, None, None)
        self.span = None
        if self.trace is not None:
            self.span = record_function(phase)
            self.span.__enter__()

    def _end(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        profiler, self.trace = self.trace, None
        self._enter("", 0)
        profiler.stop()
        results.submit_file(f"profile/rank-{self.rank}.json.gz", lambda target: _export(profiler, target))
        if self.rank == 0:
            table = self._table(profiler)
            results.text("profile", table)
            results.submit("profile/table.md", table)
            print(table)  # noqa: T201

    def _table(self, profiler: Any) -> str:
        spent = {phase: self.spent_s[phase] for phase in NAMES if self.spent_s[phase]}
        total = sum(spent.values())
        rows = [(NAMES[phase], seconds) for phase, seconds in spent.items()]
        exchange_s = (
            sum(event.self_cpu_time_total for event in profiler.key_averages() if event.key.startswith(EXCHANGES)) / 1e6
        )
        lines = [
            f"Steps of rank 0, the mean of {self.steps}; the trace is in profile/rank-0.json.gz (ui.perfetto.dev).",
            "",
            "| | ms a step | share |",
            "| --- | ---: | ---: |",
            *(f"| {name} | {1e3 * s / self.steps:.2f} | {s / total:.0%} |" for name, s in rows),
            f"| all | {1e3 * total / self.steps:.2f} | 100% |",
            "",
            f"Communication: {1e3 * exchange_s / self.steps:.2f} ms of CPU time a step, besides the backward pass.",
            f"Memory: at most {memory.peak_bytes(self.device) / 2**20:,.0f} MiB of the "
            f"{'GPU' if self.device.type == 'cuda' else 'process'}.",
            *self._computed(total),
        ]
        return "\n".join(lines) + "\n"

    def _computed(self, total_s: float) -> list[str]:
        forward = sum(one.flops for one in self.passes) / self.batch_size
        if not forward:
            return ["Operations: torch can't count the operations of this model."]
        speed = self.samples / total_s
        done = TRAINING * forward * speed
        lines = [
            f"Operations: {forward / 1e9:.3f} GFLOP a sample forward; {done / 1e12:.3f} TFLOP/s in training "
            f"at {speed:,.1f} samples/s of this rank (backward counted as twice forward)."
        ]
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            share = utilisation(done, self.device, self.precision)
            known = f"{share:.1%} of the peak of {name}" if share else f"the peak of {name} is not known"
            lines.append(f"MFU: {known}.")
        return [
            *lines,
            "",
            "| part | class | parameters | MFLOP a sample |",
            "| --- | --- | ---: | ---: |",
            *(
                f"| {name} | {type(part).__name__} | {weights.sizes(part)[0]:,} | "
                f"{sum(one.parts[name] for one in self.passes) / self.batch_size / 1e6:,.1f} |"
                for name, part in self.model.named_children()
            ),
        ]


def _export(profiler: Any, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
        packed = Path(folder) / "trace.json.gz"  # torch compresses by this name
        profiler.export_chrome_trace(str(packed))
        shutil.copyfile(packed, target)
