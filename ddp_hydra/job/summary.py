"""summary.json, and what is said of a job that is done."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import ddp_hydra
from ddp_hydra.config import project
from ddp_hydra.console.plural import counted
from ddp_hydra.console.text import message_of, traceback_of
from ddp_hydra.errors import ConfigError, DdpHydraError, JobFailed, RecordError, RunFailed
from ddp_hydra.heartbeat import REASONS
from ddp_hydra.job import bottleneck
from ddp_hydra.job import run_dir as run_dirs
from ddp_hydra.results import finite


def read_value(value: Any) -> dict[str, Any]:
    """Read what `train` returned; it comes from a rank, so nothing in it is trusted.

    Raises:
        RecordError: it is something else.
    """
    try:
        counts = {name: int(value[name]) for name in ("steps", "samples", "bad_samples")}
        speeds = {name: float(value[name]) for name in ("train_s", "samples_per_s")}
        metrics, data = (
            {str(name): float(number) for name, number in value[part].items()} for part in ("metrics", "data")
        )
        peak_memory = int(value["peak_memory"])
        slowest = {str(name): float(number) for name, number in value["slowest"].items()}
        reason = REASONS[REASONS.index(value["interrupted"])]
        if finite(speeds) != speeds or finite(data) != data or not {"wait_s", "wait"} <= data.keys():
            raise ValueError(speeds, data)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise RecordError(f"rank 0 returned what no training returns: {value!r:.200} ({error!r:.100})") from None
    insight = {"peak_memory": peak_memory, "slowest": finite(slowest)}
    return {**counts, **speeds, "metrics": metrics, "data": data, **insight, "interrupted": reason}


@contextmanager
def summarised(run_dir: Path, cfg: DictConfig, where: str = "") -> Iterator[dict[str, Any]]:
    """Write summary.json at the end, however it comes.

    Args:
        run_dir: of the job.
        cfg: of the job.
        where: the results are, as their user would type it.
    """
    begin, where = time.time(), where or shown_path(run_dir)
    summary: dict[str, Any] = {
        "status": "failed", "tags": list(cfg.tags), "restarts": 0, "steps_lost": 0, "failure": None
    }  # fmt: skip
    try:
        yield summary
    except BaseException as error:
        _note_end(summary, error)
        _finish(run_dir, summary, begin, error)
        if isinstance(error, KeyboardInterrupt) and not error.args:  # at once, without another checkpoint
            step = run_dirs.saved_step(run_dir)
            error.args = () if step is None else (f"interrupted; step {step} is saved: go on with resume={where}",)
        if run_dirs.is_full(error):
            error.add_note(run_dirs.once_there_is_room(run_dir, where))
        raise
    _finish(run_dir, summary, begin)


def _note_end(summary: dict[str, Any], error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        summary["status"] = "interrupted"
    elif isinstance(error, RunFailed):  # elsewhere, whose summary says how
        pass
    elif isinstance(error, JobFailed):
        summary["failure"] = error.failure.as_dict()
    elif isinstance(error, Exception):
        nobody = dict.fromkeys(("rank", "host", "attempt", "step"))
        trace = "" if isinstance(error, DdpHydraError) else traceback_of(error)
        told = {"message": message_of(error), "place": "", "traceback": trace}
        summary["failure"] = {"kind": type(error).__name__, **nobody, **told}


def _finish(run_dir: Path, summary: dict[str, Any], begin: float, error: BaseException | None = None) -> None:
    summary |= {"started": begin, "wall_s": time.time() - begin, "ddp_hydra": ddp_hydra.__version__}
    try:
        run_dirs.write_summary(run_dir, summary)
    except ConfigError as unwritten:
        if error is None:
            raise
        if not run_dirs.is_full(error):  # why it failed is more important
            error.add_note(str(unwritten))


def closing_lines(summary: dict[str, Any], where: str) -> str:
    """What is said of a job that is done.

    Args:
        summary: of the job.
        where: its results are.
    """
    metrics = summary["metrics"]
    names = ("train/loss", "val/loss", "val/accuracy")
    shown = [f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None]
    speed = f"{summary['samples_per_s']:,.0f} samples/s"
    steps = summary["steps"]
    lines = [
        f"done: {counted(steps, 'step')} in {summary['train_s']:.1f} s, {', '.join([speed, *shown])}  ->  {where}",
        bottleneck.describe(summary["data"], summary["train_s"], steps),
        bottleneck.describe_slowest(summary["slowest"], steps),
        f"profile: {where}/{summary['profile']}, and a trace of each rank beside it (ui.perfetto.dev)"
        if summary.get("profile")
        else None,
    ]
    return "\n".join(filter(None, lines))


def why_stopped(reason: str, steps: int) -> str:
    """Say why a job stopped before its end, and which step is saved."""
    said = {
        "interrupt": "interrupted",
        "time_limit": "the time of trainer.time_limit_s is up",
        "preemption": "a worker is being shut down (SIGTERM)",
    }
    return f"{said[reason]}; saved at step {steps}"


def shown_path(path: Path) -> str:
    """Return a path as its user would type it: relative to where the command was typed, if it is below."""
    relative = os.path.relpath(path, project.typed_in())
    return str(path) if relative.startswith("..") else relative
