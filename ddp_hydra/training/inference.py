"""Evaluates a trained model on the ranks of a gang, and predicts with it: every sample once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_hydra import heartbeat, results
from ddp_hydra.config import checkpoint_config
from ddp_hydra.data import streams
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import fault_injection, rows
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, load_run, precision, predictions
from ddp_hydra.training.build_data import Classes
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import StepConsensus, StopSignal
from ddp_hydra.training.load_run import Trained
from ddp_hydra.training.run import seed_numpy_and_python

PARTS = 64
"""Parts that a small data set is cut into, if it has so many batches."""
MOST_ROWS = 4096
"""The most rows of a part, unless a batch is larger."""
SPOOL_BYTES = 64 * 2**20
"""Rows of a part that are kept in memory; more go to the disk."""


@dataclass
class Opened:
    """A trained model with the data to compute.

    Args:
        trained: the model.
        task: says what a prediction is.
        data: the data set.
        rank: this rank.
        world_size: number of ranks.
    """

    trained: Trained
    task: Task
    data: Any
    rank: int
    world_size: int


@contextmanager
def opened(job: Mapping[str, Any], checkpoint: str) -> Iterator[Opened]:
    """Build model, task and data; close the data at the end. A collective.

    Args:
        job: overrides: changes of the run's config; groups: nodes that replace its groups; split: "train" or "val";
            faults: to inject.
        checkpoint: the file, on rank 0's host.
    """
    fault_injection.activate(job["faults"])
    heartbeat.at("start", 0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    content = broadcast(load_run.needed(read(Path(checkpoint))) if rank == 0 else None)
    split, other = job["split"], {"train": "data.val", "val": "data.train"}[job["split"]]
    cfg = checkpoint_config.composed(content["config"], job["overrides"], job["groups"], without=[other])
    if cfg.data.get(split) is None:
        raise ConfigError(
            f"this run has no data.{split}: choose another data set with data=<group>, or give split=train for the "
            "training data"
        )
    seed_numpy_and_python(cfg.seed)  # as in training: all ranks split a data set alike
    precision.set_float32(cfg.trainer.precision)
    trained = load_run.restore(content, cfg)
    data = build_data.dataset(cfg.data[split])
    try:
        yield Opened(trained, builders.task(cfg, trained.classes, trained.device), data, rank, world_size)
    finally:
        if hasattr(data, "close"):
            data.close()


def broadcast(value: Any) -> Any:
    """Return rank 0's value. A collective."""
    box = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def evaluate(job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Repeat the validation of a run.

    Args:
        job: see `opened`.
        files: "checkpoint", on rank 0's host.

    Returns:
        metrics, samples (None of a data set without a length), step of the checkpoint, and `interrupted`: the reason
        why it stopped early, or "".
    """
    with opened(job, files["checkpoint"]) as run:
        cfg, trained = run.trained.cfg, run.trained
        check_labels(run.data, trained.classes, run.rank)
        evaluation = builders.evaluation(cfg, run.data, run.task, trained.device, trained.channels_last)
        stop = StopSignal(None)
        heartbeat.at("validate", 0)
        metrics = evaluation.run(trained.model, stop=stop.reason)
        stopped = StepConsensus().vote(stop=stop.reason()).result().stop
        return {
            "metrics": metrics,
            "samples": len(run.data) if hasattr(run.data, "__len__") else None,
            "step": trained.step,
            "interrupted": heartbeat.REASONS[stopped],
        }


def check_labels(data: Any, classes: Classes, rank: int) -> None:
    """Refuse a data set without labels; warn if its classes are not those of the model."""
    if not getattr(data, "labelled", True):
        raise ConfigError(f"{type(data).__name__} has no labels here, so there is nothing to compare with: use predict")
    own = Classes.of(data).classes
    if rank == 0 and own and classes.classes and own != classes.classes:
        results.warn(
            f"the data set's classes are {shown(own)}, and the model was trained on {shown(classes.classes)}: the "
            "metrics compare their numbers"
        )


def shown(names: Sequence[str]) -> str:
    """Return the first few names."""
    return ", ".join(names[:5]) + (f" … ({len(names)})" if len(names) > 5 else "")


def predict(job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Predict a data set, and send the rows in parts; each part is the same whatever the number of ranks.

    Args:
        job: see `opened`; kind: of the result, see `predictions.KINDS`; done: numbers of parts that are there.
        files: "checkpoint", on rank 0's host.

    Returns:
        samples, step of the checkpoint, and `interrupted`: the reason why this rank stopped early, or "".
    """
    with opened(job, files["checkpoint"]) as run:
        trained = run.trained
        if streams.is_stream(run.data):
            raise ConfigError(
                f"{type(run.data).__name__} is an iterable data set, whose samples have no numbers by which rows could "
                "be kept in order: predict needs one with __len__ and __getitem__"
            )
        n_samples, batch_size = len(run.data), trained.cfg.data.batch_size
        length = part_length(n_samples, batch_size)
        results.emit("start", {"samples": n_samples, "rows": length})  # on each rank, before its parts
        done = set(job["done"])
        missing = [part for part in range(-(-n_samples // length)) if part not in done]
        # Neighbouring parts go to one rank, which then opens few shards.
        share = [len(missing) * rank // run.world_size for rank in (run.rank, run.rank + 1)]
        interrupted = send_parts(run, missing[slice(*share)], length, job["kind"])
        return {"samples": n_samples, "step": trained.step, "interrupted": interrupted}


def part_length(n_samples: int, batch_size: int) -> int:
    """Return the rows of each part but the last: a multiple of the batch size that does not depend on the ranks."""
    batches = -(-n_samples // batch_size)
    return batch_size * max(1, min(-(-batches // PARTS), MOST_ROWS // batch_size))


def send_parts(run: Opened, parts: Sequence[int], length: int, kind: str) -> str:
    """Predict the samples of some parts, and send each part as a file; return why it stopped early, or ""."""
    trained, n_samples = run.trained, len(run.data)
    cfg, stop = trained.cfg, StopSignal(None)
    ends = {part: min((part + 1) * length, n_samples) for part in parts}
    batches = [
        list(range(begin, min(begin + cfg.data.batch_size, ends[part])))
        for part in parts
        for begin in range(part * length, ends[part], cfg.data.batch_size)
    ]
    autocast = precision.autocast(cfg.trainer.precision, trained.device)
    loader = build_data.loader(cfg, run.data, trained.device, trained.channels_last)
    left = iter(parts)
    part = next(left, 0)
    spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
    heartbeat.at("load", 1)
    try:
        for number, (batch, indices) in enumerate(zip(loader.load(batches), batches, strict=True), start=1):
            heartbeat.at("validate", number)
            with torch.no_grad(), autocast:
                predicted = run.task.predict(trained.model, batch)
            values = predictions.columns(predicted, len(indices), kind)
            rows.write(spool, identified(run.data, indices, values))
            if indices[-1] + 1 == ends[part]:
                submit(spool, part)
                spool.close()
                spool, part = tempfile.SpooledTemporaryFile(SPOOL_BYTES), next(left, 0)  # noqa: SIM115
            if reason := stop.reason():
                return heartbeat.REASONS[reason]
    finally:
        spool.close()
    return ""


def identified(data: Any, indices: Sequence[int], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a batch with the sample's id in front, and why it could not be read, if the data set knows."""
    found: dict[str, Any] = {}
    if hasattr(data, "sample_id"):
        found["id"] = [str(data.sample_id(index)) for index in indices]
    if hasattr(data, "error_of"):
        found["error"] = [str(data.error_of(index)) for index in indices]
    if taken := found.keys() & values.keys():
        raise ConfigError(f"the task predicts {', '.join(sorted(taken))}, and so the data set's column is called")
    return {**found, **values}


def submit(spool: Any, part: int) -> None:
    """Send the rows of a part as a file."""

    def write(path: Path) -> None:
        spool.seek(0)
        with path.open("wb") as file:
            shutil.copyfileobj(spool, file)

    results.submit_file(rows.NAME.format(part), write)
