"""Writes summary.json, and describes a job that has ended, or the error that has ended it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from hydra.errors import CompactHydraException, InstantiationException
from msgspec import Struct
from omegaconf import DictConfig

from ddp_hydra.checked import Count, Finite
from ddp_hydra.config import project, redact, unknown_keys
from ddp_hydra.console import text
from ddp_hydra.console.text import TRACE_CHARS, counted, message_of, printable, shorten, traceback_of, typed
from ddp_hydra.errors import ClusterError, DdpHydraError, Failure, RankFailed, RecordError
from ddp_hydra.heartbeat import REASONS
from ddp_hydra.job.run_dir import full_disk_advice, is_held, saved_step, write_held
from ddp_hydra.run_state import Summary
from ddp_hydra.storage.manifest import BEST, FOLDER, named_checkpoint
from ddp_hydra.writers.run_dir import is_full, summary_written

ENOUGH_STEPS, ENOUGH_S = 20, 5.0
"""What limits shorter runs is not described: the first steps wait for connections, caches and compilation."""
DATA_BOUND_SHARE = 0.1
"""A run is bound by data if its loop waits for batches for this share of the time or more."""
SLOW_RATIO = 1.15
"""A rank is called slow if it takes this many times as long as the median rank or more."""


class TrainResult(Struct, kw_only=True):
    """What `train` returns on rank 0; `Summary` has the same fields."""

    steps: Count
    samples: Count
    bad_samples: Count
    train_s: Finite
    samples_per_s: Finite | None
    tokens_per_s: Finite | None = None
    mfu: Finite | None = None
    metrics: dict[str, float]
    data: dict[str, Finite]
    exchange_s: Finite | None
    peak_memory: Count
    slowest: dict[str, int | float]
    interrupted: str
    stopped_early: str
    matrices: dict[str, list[Any]]

    def __post_init__(self) -> None:
        self.stopped_early = printable(message_of(self.stopped_early))
        if self.interrupted not in REASONS or not {"wait_s", "wait"} <= self.data.keys():
            raise ValueError("it says neither why it ended nor how long it waited")


def read_result(value: Any) -> TrainResult:
    try:
        return msgspec.convert(value, TrainResult)
    except (ValueError, OverflowError) as error:
        raise RecordError(f"rank 0 returned what no training returns: {value!r:.200} ({error!s:.100})") from None


@contextmanager
def summarised(run_dir: Path, cfg: DictConfig, shown_dir: str = "") -> Iterator[Summary]:
    """Write summary.json at the end of the block, also when the job fails. `shown_dir`: as the user would type it.

    That of an earlier run stays if the job has ended before it began to train; but not if it was lost, because torchrun
    may start it again then, and reads why it has ended.
    """
    shown_dir = shown_dir or shown_path(run_dir)
    summary = Summary(status="failed", tags=redact.without([str(tag) for tag in cfg.tags]))
    try:
        with summary_written(run_dir, summary, lambda: is_held(run_dir) and not _has_own(summary)):
            yield summary
            write_held(run_dir)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not error.args:  # ended at once, without another checkpoint
            step = saved_step(run_dir)
            error.args = (
                () if step is None else (f"interrupted; step {step} is saved: go on with {typed('resume', shown_dir)}",)
            )
        if is_full(error):
            error.add_note(full_disk_advice(run_dir, shown_dir))
        elif isinstance(error, RankFailed | ClusterError):
            failure = error.failure if isinstance(error, RankFailed) else None
            if lines := failed_lines(run_dir, shown_dir, failure):
                error.add_note(f"\n{lines}")
        raise


def _has_own(summary: Summary) -> bool:
    return summary.from_step is not None or (summary.failure is not None and summary.failure.kind == "lost")


def failed_lines(run_dir: Path, shown_dir: str, failure: Failure | None) -> str:
    log = f"logs/rank-{failure.rank}.log" if failure is not None and not failure.mistake else None
    step = saved_step(run_dir)
    lines = [
        f"log:     {shown_dir}/{log}" if log and (run_dir / log).exists() else None,
        f"saved:   step {step}; go on with {typed('resume', shown_dir)}" if step is not None else None,
    ]
    return "\n".join(filter(None, lines))


def closing_lines(summary: Summary, shown_dir: str, run_dir: Path | None = None) -> str:
    assert summary.objective is not None
    objective, steps, train_s = summary.objective.metric, summary.steps or 0, summary.train_s or 0.0
    values = {name: summary.metrics.get(name) for name in ("train/loss", "val/loss", objective)}
    shown = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
    speed = f"{summary.samples_per_s or 0:,.0f} samples/s"
    if summary.tokens_per_s:
        speed += f", {summary.tokens_per_s:,.0f} tokens/s"
    if summary.mfu:
        speed += f", MFU {summary.mfu:.1%}"
    best, before = summary.best, summary.from_step  # its last attempt, whose time is told, began there
    last = f", the last {steps - before:,}" if before else ""
    has_failed = any(one.started >= (summary.started or 0.0) for one in summary.attempts)  # not in an earlier process
    took = f"{counted(steps, 'step')}{last} in {train_s:.1f} s"
    # In a store, the name is an entry of the manifest, which its URL leads to.
    file = BEST if run_dir is None else named_checkpoint(run_dir / FOLDER / BEST).name
    lines = [
        f"{summary.status}: {', '.join([took, speed, *shown])}  ->  {shown_dir}",
        "nothing was left to train: resume= with more, as trainer.epochs=<n>, goes on"
        if before and before == steps and summary.status == "done" and not (summary.stopped_early or has_failed)
        else None,
        f"stopped early: {summary.stopped_early}" if summary.stopped_early else None,
        f"best: {objective} {best.value:.4g} at step {best.step:,}: {FOLDER}/{file}"
        if best is not None and best.step != steps
        else None,
        describe_data(summary.data or {}, train_s, steps),
        describe_straggler(summary.slowest or {}, train_s, steps),
        f"profile: {shown_dir}/{summary.profile}, and a trace of each rank in the same folder (ui.perfetto.dev)"
        if summary.profile
        else None,
        f"{why_stopped('pause', steps)}: go on with {typed('resume', shown_dir)}"
        if summary.status == "paused"
        else None,
    ]
    return "\n".join(filter(None, lines))


def describe_data(total: Mapping[str, float], train_s: float, steps: int) -> str | None:
    share = total["wait"]
    parts = []
    if steps >= ENOUGH_STEPS and train_s >= ENOUGH_S:
        bound = "data" if share >= DATA_BOUND_SHARE else "compute"
        parts.append(
            f"bound by {bound}: a rank waited {total['wait_s']:.1f} of {train_s:.1f} s ({share:.0%}) for batches"
        )
    if "bytes" in total:
        parts.append(f"{total['bytes'] / 1e6:,.1f} MB read, {total['bytes'] / 1e6 / max(train_s, 1e-9):,.1f} MB/s")
        requests = total["cache_hits"] + total["cache_misses"]
        parts.append(f"{total['cache_hits'] / max(requests, 1):.0%} from the cache")
        parts += [counted(total["retries"], "retry"), counted(total["bad_samples"], "bad sample")]
    return f"data: {', '.join(parts)}" if parts else None


def describe_straggler(slowest: Mapping[str, int | float | None], train_s: float, steps: int) -> str | None:
    times = slowest.get("times")
    if times is None or times < SLOW_RATIO or steps < ENOUGH_STEPS or train_s < ENOUGH_S:
        return None
    part = "for its own part of a step (waiting for data, and the forward pass); the others waited for it"
    return f"slow: rank {slowest['rank']} took {times:.2f} times as long as the median rank {part}"


def why_stopped(reason: str, steps: int) -> str:
    reasons = {
        "interrupt": "interrupted",
        "time_limit": "the time of trainer.time_limit_s is up",
        "preemption": "a worker is being shut down (SIGTERM)",
        "callback": "a callback asked to stop",
        "pause": "paused by trainer.pause_after_validations",
    }
    return f"{reasons[reason]}; saved at step {steps}"


def shown_path(path: Path) -> str:
    """Return a path as the user would type it: relative if it is below the folder where the command was typed."""
    try:
        relative = os.path.relpath(path, project.typed_in())
    except FileNotFoundError:  # the program has removed its current folder
        return str(path)
    return str(path) if relative.startswith("..") else relative


def explain(error: Exception) -> str:
    """Return the message of our errors and of Hydra's with their notes, and which file the system has refused to these.

    Any other error is told with its traceback.
    """
    if isinstance(error, DdpHydraError):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    # Hydra advises to append an unknown key, which does not help with a misspelt one.
    if said := unknown_keys.explain(error):
        return said
    if isinstance(error, CompactHydraException | InstantiationException):  # the second is the first in Hydra 1.3 only
        return "\n".join(str(part) for part in (error, error.__cause__) if part)
    if getattr(error, "mistake", False) or getattr(error, "told", False):  # as in `rank.process.describe`
        return message_of(error)
    if where := text.user_location(error):
        told = text.shortened(error, others="HYDRA_FULL_ERROR=1 shows them")
        return f"{type(error).__name__}: {message_of(error)} ({where})\n\n{shorten(told, TRACE_CHARS)}"
    if isinstance(error, OSError) and error.filename is not None and text.is_ours(error):
        advice = "check its rights and those of its folders; " if isinstance(error, PermissionError) else ""
        return f"{printable(str(error.filename))}: {error.strerror}: {advice}HYDRA_FULL_ERROR=1 shows where"
    return traceback_of(error)
