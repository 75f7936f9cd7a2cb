"""Evaluates a trained model on the ranks of a gang, and predicts with it: every sample once.

What a task predicts for a batch becomes columns that can travel: arrays, texts and PNGs.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_hydra import heartbeat, results
from ddp_hydra.config import checkpoint_config
from ddp_hydra.console.text import encodable
from ddp_hydra.data import streams
from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.rank import fault_injection, spec
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.record import Rows
from ddp_hydra.tasks import Task
from ddp_hydra.tasks.base import target_of
from ddp_hydra.training import build_data, builders, load_run, sharded_checkpoint
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import Rounds, StepConsensus, StopSignal
from ddp_hydra.training.data_description import DataDescription, length, shown
from ddp_hydra.training.load_run import TrainedModel, refuse_reads, refuse_targets
from ddp_hydra.training.seeds import OF_EVALUATION, seeded, seeded_as
from ddp_hydra.training.train_step import modules_of

PARTS = 64
"""Parts that a small data set is cut into, if it has as many batches."""
MOST_ROWS = 4096
"""The most rows of a part, unless a batch is larger."""
STREAM_ROWS = 1024
"""The same for an iterable data set, whose length is not known."""
SPOOL_BYTES = 64 * 2**20
"""Rows of a part that are kept in memory; more go to the disk."""


@dataclass
class Inference:
    """A trained model with the data to compute, and what was asked for."""

    job: Mapping[str, Any]
    trained: TrainedModel
    task: Task
    data: Any
    world: World


@contextmanager
def opened(job: Mapping[str, Any], checkpoint: str, world: World) -> Iterator[Inference]:
    # A collective.
    fault_injection.activate(job["faults"])
    heartbeat.at("start", 0)
    content = sharded_checkpoint.send(lambda: load_run.needed(read(Path(checkpoint), whole=False)), world)
    split = job["split"]
    if not job["trust"]:
        refuse_reads(content["config"], job["overrides"], job["groups"])
    cfg = checkpoint_config.composed(content["config"], job["overrides"], job["groups"], split)
    if not job["trust"]:
        refuse_targets(cfg, job["overrides"], job["groups"])
    if cfg.data.get(split) is None:
        raise ConfigError(f"this run has no data.{split}: choose a data set with data=<group>, or give split=train")
    builders.set_float32(cfg)
    trained = load_run.restore_model(content, cfg, world, job["overrides"], job["groups"])
    with build_data.opened(cfg, split, trained.device, trained.data, world) as data:
        check_data(trained.data, DataDescription.of(data), f"data.{split}", world)
        with seeded_as(cfg.seed, 0, 1):  # what the task has drawn and not changed is in no checkpoint
            task = builders.task(cfg, trained.data, trained.device)
        load_run.restore_task(task, content, cfg, trained.data, world.rank, job["trust"])
        for module in modules_of(task):
            module.eval()
        yield Inference(job, trained, task, data, world)


@in_world
def evaluate(world: World, job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    with opened(job, files["checkpoint"], world) as run:
        cfg, trained = run.trained.cfg, run.trained
        check_labels(run.data)
        build_data.check_classes(cfg, run.task, run.data, trained.data.num_classes)
        evaluation = builders.evaluation(cfg, run.data, run.task, trained.device, trained.parallel)
        stop = StopSignal(None)
        heartbeat.at("validate", 0)
        with trained.parallel.many_passes():
            metrics = evaluation.run(trained.model, stop=stop.reason)
        stopped = StepConsensus(world).decide(stop=stop.reason()).stop
        return {
            "metrics": metrics,
            "matrices": evaluation.metrics.lists(),
            "samples": length(run.data),
            "step": trained.step,
            "interrupted": heartbeat.REASONS[stopped],
        }


def check_labels(data: Any) -> None:
    if not getattr(data, "labelled", True):
        raise ConfigError(f"{build_data.name_of(data)} has no labels here: use predict")


def check_data(trained: DataDescription, data: DataDescription, key: str, world: World) -> None:
    trained.check_model(data, key)
    if world.rank == 0 and trained.other_names(data):
        results.warn(
            f"the classes of {key} are {shown(data.classes)}, and the model was trained on {shown(trained.classes)}: "
            "they are compared by their numbers"
        )


@in_world
def predict(world: World, job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    with opened(job, files["checkpoint"], world) as run:
        trained = run.trained
        loader = build_data.loader(trained.cfg, run.data, trained.device, trained.parallel.channels_last, world)
        send: Any = send_stream if isinstance(loader, streams.StreamLoader) else send_samples
        with trained.parallel.many_passes():
            samples, interrupted = send(run, loader)
        return {"samples": samples, "step": trained.step, "interrupted": interrupted}


def part_length(n_samples: int | None, batch_size: int) -> int:
    if n_samples is None:
        return batch_size * max(1, STREAM_ROWS // batch_size)
    batches = -(-n_samples // batch_size)
    return batch_size * max(1, min(-(-batches // PARTS), MOST_ROWS // batch_size))


def send_samples(run: Inference, loader: Loader) -> tuple[int, str]:
    cfg, n_samples, done = run.trained.cfg, len(run.data), frozenset(run.job["done"])
    length = part_length(n_samples, cfg.data.batch_size)
    results.emit(Rows(n_samples, length))  # on each rank, before its parts
    missing = [part for part in range(-(-n_samples // length)) if part not in done]
    # Neighbouring parts go to one rank, which then opens few shards.
    rank, ranks = run.world.rank, run.world.size
    share = [len(missing) * one // ranks for one in (rank, rank + 1)]
    batches = [
        list(range(begin, min(begin + cfg.data.batch_size, n_samples)))
        for part in missing[slice(*share)]
        for begin in range(part * length, min((part + 1) * length, n_samples), cfg.data.batch_size)
    ]
    return n_samples, send_parts(run, loader, zip(loader.load(batches), batches, strict=True), length)


def send_stream(run: Inference, loader: streams.StreamLoader) -> tuple[int, str]:
    # Each rank reads all samples, as their numbers are known only by counting, and predicts its share of the parts.
    cfg, done = run.trained.cfg, frozenset(run.job["done"])
    length = part_length(None, cfg.data.batch_size)
    rank, ranks = run.world.rank, run.world.size
    reader = streams.whole(run.data, ranks, cfg.data.get("shard_by"), heartbeat.progress, cfg.seed)
    results.emit(Rows(None, length))

    def wanted(first: int) -> bool:
        part = first // length
        return part % ranks == rank and part not in done

    interrupted = send_parts(run, loader, loader.in_order(reader, cfg.data.batch_size, wanted), length)
    counts = run.world.gather_objects(None if interrupted else reader.n_read)
    if None not in counts and len(set(counts)) > 1:
        raise DataError(
            f"{type(run.data).__name__} gave the ranks {', '.join(f'{n:,}' for n in counts)} samples, and some were "
            "left out: predict on one rank (dispatch.ranks=1 or cluster=inline)"
        )
    if not interrupted:
        if not reader.n_read:
            raise ConfigError(f"{type(run.data).__name__} gives no samples, so there is nothing to predict")
        results.emit(Rows(reader.n_read, length))
    return reader.n_read, interrupted


def send_parts(run: Inference, loader: Loader, batches: Iterable[tuple[Any, list[int]]], length: int) -> str:
    # A collective.
    trained, classes, kind = run.trained, DataDescription.of(run.data).classes, run.job["kind"]
    with_targets = run.job["targets"] and getattr(run.data, "labelled", True)
    autocast = builders.autocast(trained.cfg, trained.device, trained.parallel)
    rounds, number, first = Rounds(run.world, StopSignal(None).reason, loader.spare), 0, dict[str, Any]()
    heartbeat.at("load", 1)
    for part, group in groupby(rounds.of(batches), lambda one: one[1][0] // length if one[2] else None):
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            for batch, indices, is_own in group:
                number += 1
                heartbeat.at("validate", number)
                key = (trained.cfg.seed, indices[0] if is_own else -1, OF_EVALUATION)  # whichever rank computes it
                with torch.no_grad(), autocast, seeded(*key):
                    predicted = run.task.predict(trained.model, batch)
                if not is_own:
                    continue
                values = columns(predicted, len(indices), kind)
                if with_targets:
                    true = targets(batch, len(indices), classes)
                    more = columns(true, len(indices), "arrays" if kind == "arrays" else "table")
                    values |= {name: column for name, column in more.items() if name not in values}
                first = first or values
                check_alike(first, values, indices[0])
                spec.write_rows(spool, identified(run.data, indices, values))
            if part is not None and (not rounds.stopped or indices[-1] + 1 == (part + 1) * length):
                submit(spool, part)
    return heartbeat.REASONS[rounds.stopped]


def check_alike(first: Mapping[str, Any], values: Mapping[str, Any], row: int) -> None:
    names = [name for name in {**first, **values} if not are_alike(first.get(name), values.get(name))]
    if names:
        shown = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        is_predicted = any(not name.startswith("target") for name in names)
        advice = spec.ONE_LENGTH if is_predicted else "give targets=false"
        raise ConfigError(f"the columns of row {row} differ in name or shape from those before ({shown}): {advice}")


def are_alike(column: Any, other: Any) -> bool:
    if isinstance(column, np.ndarray) and isinstance(other, np.ndarray):
        return column.shape[1:] == other.shape[1:]
    return column is not None and other is not None


def identified(data: Any, indices: Sequence[int], values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if hasattr(data, "sample_id"):
        found["id"] = [encodable(str(data.sample_id(index))) for index in indices]
    if hasattr(data, "error_of"):
        found["error"] = [encodable(str(data.error_of(index))) for index in indices]
    if taken := {"index", *found} & values.keys():
        raise ConfigError(
            f"predict() of the task has a column {', '.join(sorted(taken))}, a name of the table's own: rename it"
        )
    return {**found, **values}


def submit(spool: Any, part: int) -> None:
    def write(path: Path) -> None:
        spool.seek(0)
        with path.open("wb") as file:
            shutil.copyfileobj(spool, file)

    results.submit_file(spec.ROWS_NAME.format(part), write)


def columns(prediction: Any, size: int, kind: str) -> dict[str, Any]:
    # The kind: "table" of numbers and texts, "arrays" of any shape, or "pictures", which are PNGs with a table.
    named = prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
    found: dict[str, Any] = {}
    for name, values in named.items():
        values = plain(str(name), values)
        is_number = isinstance(values, np.ndarray) and values.ndim == 0
        if is_number or len(values) != size:
            rows = "a number in place of rows" if is_number else f"{len(values)} rows"
            raise ConfigError(f"the task predicted {rows} of {name!r} for {size} samples: predict must return rows")
        found |= fitted(str(name), values, kind)
    if kind == "pictures" and not any(isinstance(part, list) and isinstance(part[0], bytes) for part in found.values()):
        raise ConfigError(f"a folder takes pictures, but the task predicts {', '.join(found)}: give out=<file>.csv")
    return found


_TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a batch that is a dict, or attributes of another, one of which may hold its targets."""


def targets(batch: Any, size: int, classes: Sequence[str]) -> dict[str, Any]:
    fields = {key: getattr(batch, key) for key in _TARGETS if hasattr(batch, key)}  # of a named tuple, a dataclass
    named = batch if isinstance(batch, Mapping) else fields
    found = next((named[key] for key in _TARGETS if key in named), target_of(batch))
    if not isinstance(found, Tensor) or not found.ndim or len(found) != size:
        return {}
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim > 2 or (found.ndim == 2 and not found.is_floating_point()):
        return {}
    if not classes or found.ndim > 1 or found.is_floating_point():
        return {"target": found}
    numbers = found.tolist()
    names = [str(classes[number]) if 0 <= number < len(classes) else "" for number in numbers]
    return {"target": found, "target_name": names}


def plain(name: str, values: Any) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.is_floating_point() and values.itemsize < 4 else values).numpy()
    if isinstance(values, np.ndarray) and not values.dtype.hasobject:
        return values
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"the task predicted {name!r} as {type(values).__name__}: return tensors or lists, or a dict")
    values = [scalar(value) for value in values]
    known = [value for value in values if value is not None]
    if all(isinstance(value, str) for value in known):
        return values
    if all(isinstance(value, (bool, int, float, np.number, np.bool_)) for value in known):
        return np.asarray([math.nan if value is None else value for value in values])
    return [None if value is None else json.dumps(_jsonable(value), separators=(",", ":")) for value in values]


def scalar(value: Any) -> Any:
    """Return a tensor or array without axes as its number; numpy's texts and times as texts."""
    if isinstance(value, Tensor) and not value.ndim:
        value = plain("", value)
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    return str(value) if isinstance(value, (np.str_, np.datetime64, np.timedelta64)) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def fitted(name: str, values: Any, kind: str) -> dict[str, Any]:
    if isinstance(values, list) or values.ndim == 1 or kind == "arrays":
        return {name: values}
    if values.ndim == 2:
        if values.shape[1] == 1:
            return {name: values[:, 0]}
        return {f"{name}_{number}": values[:, number] for number in range(values.shape[1])}
    if kind == "pictures":
        return {name: [png(picture) for picture in values]}
    raise ConfigError(f"{name!r} of shape {values.shape[1:]} is no row of a table: give out=<folder>/ or <file>.npz")


def png(picture: np.ndarray) -> bytes:
    from PIL import Image

    if picture.ndim == 3 and picture.shape[0] in (1, 3, 4):
        picture = picture[0] if picture.shape[0] == 1 else np.moveaxis(picture, 0, -1)
    elif picture.ndim != 2:
        raise ConfigError(f"a picture has 1, 3 or 4 channels and two axes, not {picture.shape}: give out=<file>.npz")
    if picture.dtype == bool or picture.dtype.kind == "f":
        picture = (np.nan_to_num(picture.astype(np.float32)).clip(0, 1) * 255).round()
    deep = picture.max(initial=0) > 255
    if picture.min(initial=0) < 0 or picture.max(initial=0) > 65535 or (deep and picture.ndim == 3):
        raise ConfigError(f"no PNG holds numbers from {picture.min()} to {picture.max()}: give out=predictions.npz")
    buffer = io.BytesIO()
    Image.fromarray(picture.astype(np.uint16 if deep else np.uint8)).save(buffer, "png")
    return buffer.getvalue()
