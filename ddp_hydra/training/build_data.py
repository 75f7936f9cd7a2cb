"""Builds the data of a run on a rank: data sets, loader and sampler.

The framework knows no model and no data set. A batch is what the task takes: (x, y), a dict, any structure of tensors.
A data set has these methods and attributes:

    __len__, __getitem__              as every map-style data set; for an iterable one, see below
    __getitems__(indices)             optional: a whole batch at once
    collate(samples) -> batch         optional: makes a batch; default: torch's default_collate
    prepare(batch) -> batch           optional: works on the device; normalises, encodes
    check_classes(number, ignored)    optional: raises a ConfigError if its targets can't be the numbers of classes
    described() -> str                optional: features and target, for the header of a run
    classes or num_classes            optional: fills model.num_classes; `classes` are names, for predictions
    features                          optional: names of the columns of x; evaluate and predict compare them
    feature_widths                    optional: how many numbers each of these has in a row
    scaling                           optional: how x is scaled, in words: alike in training and validation, or refused
    sample_id(index) -> str           optional: identifies a sample that was read, as by its file; for predictions
    error_of(index) -> str            optional: why a sample that was read is replaced by another; "" if it is not
    labelled = False                  optional: its targets mean nothing, so that it can only be predicted
    set_epoch(epoch)                  optional: for augmentation
    expect(indices)                   optional: gets the indices that this rank will read in the epoch, in order
    shard_lengths, targets            optional: some samplers use them
    mixture                           optional: how sets of samples are mixed, see `Mixture`
    check_model(model)                optional: raises a ConfigError if the model can't take its samples. A collective
    built_once = True                 optional: the data set is built on rank 0 and pickled to the other ranks
    thread_safe = True                optional: threads may read it at once, and it draws from no global generator
    share(workers)                    optional: called in each of data.workers: it has a part of threads and memory
    bad                               optional: {name: reason} of samples that were replaced
    bad_counts                        optional: {name: number} of samples, if a name stands for several
    skipped                           optional: {extension: number} of files that it left out
    max_bad_fraction                  optional: the largest share of bad samples that is allowed over all ranks
    stats() -> {name: number}         optional: the cost of reading so far; see `monitor.py`
    close()                           optional: called at the end

An iterable data set has `__iter__`, and no `__getitem__` or the base class `IterableDataset`. These are optional:

    __len__                           samples in an epoch; `data.n_samples` in the config goes before it
    set_epoch(epoch)                  the next `iter()` gives the samples of this epoch
    of_rank(rank, world_size)         returns an iterable of this rank's samples; None: each rank takes its share of all
    state_dict, load_state_dict       the place reached; the next `iter()` goes on there. Plain values and tensors
    collate, prepare, classes, num_classes, stats, close    as above

If an exception of a data set has `mistake = True`, only a person can mend its cause: it is shown without a traceback,
and the job is not tried again. With `told = True`, it is shown without a traceback, and the job is tried again.

A sampler takes n_samples, batch_size, rank, world_size, and the arguments in the config. It has

    global_batch                      samples of all ranks in one step
    steps(position)                   number of steps left in an epoch after `position` samples
    batches(epoch, position)          this rank's batches of indices, as many as every other rank has
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ddp_hydra import heartbeat, results
from ddp_hydra.config.targets import make, parameters
from ddp_hydra.data import draws, streams, wrappers
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.workers import InWorkers, open_files, with_workers
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Regression
from ddp_hydra.tasks.counting import takes_class_numbers
from ddp_hydra.training.data_description import DataDescription, check_same_data, length, shown

CPU = torch.device("cpu")
ORDER_OF_DATA = ("ddp_hydra.data.samplers.Distributed",)
"""Samplers that the config of an iterable data set may name: the default one, which is not used."""


def dataset(node: DictConfig | None, seed: int, key: str = "data.train", world: World = ALONE) -> Any:
    # If its class has `built_once`, only rank 0 builds it. A collective. The global generators are seeded before, so
    # that it is split in the same way each time that it is built.
    if node is None:
        return None

    def build() -> Any:
        with draws.StateGuard():
            draws.seed_all(seed)
            made = make(node)
        _check_kind(made, key)
        return made

    return wrappers.look_into(world.from_rank_0(build) if built_once(node) else build())


@contextmanager
def opened(
    cfg: DictConfig, split: str, device: torch.device = CPU, like: Any = None, world: World = ALONE
) -> Iterator[Any]:
    # At the end name its bad samples, and close it. A collective.
    node, workers = cfg.data.get(split), cfg.data.get("workers")
    if node is not None and like is not None:
        node = with_features(node, DataDescription.of(like))
    before = open_files()
    built = kept = dataset(node, cfg.seed, f"data.{split}", world)
    files = open_files() - before
    if split == "train" and streams.is_stream(built) and workers:  # a validation set is read without them
        raise ConfigError(
            f"data.workers={workers} needs a data set with a length and __getitem__, and {name_of(built)} is iterable: "
            f"leave it out, or make a DataLoader(..., batch_size=None, num_workers={workers}) of the data set"
        )
    if built is not None and not streams.is_stream(built):
        kept = with_workers(workers, built, device.type == "cuda", results.warn, files)
    try:
        if built is not None and world.size > 1 and not built_once(node) and not streams.is_stream(built):
            check_same_data(built, f"data.{split}", cfg.seed, world)
        yield kept
        happened = "left out" if streams.is_stream(built) else "replaced by its neighbour"
        for name, reason in getattr(kept, "bad", {}).items():
            print(f"bad sample, {happened}: {name}: {reason}")  # noqa: T201
    finally:
        if hasattr(kept, "close"):
            kept.close()


def _check_kind(data: Any, key: str) -> None:
    name = name_of(data)
    if isinstance(data, (list, tuple)) and data and all(isinstance(part, Dataset) for part in data):
        raise ConfigError(f"{len(data)} data sets were built, as by random_split: let _target_ return one of them")
    if isinstance(data, DataLoader) and (data.batch_sampler is not None or isinstance(data.sampler, BatchSampler)):
        raise ConfigError(
            "the DataLoader makes batches: give it batch_size=None and no BatchSampler, or give its data set in its "
            "place"
        )
    n = _checked_length(data, name)
    if not streams.is_stream(data) and n is None:
        raise ConfigError(f"{name} has no length: give it __len__, or make it an IterableDataset")
    if n == 0:
        or_none = "" if key == "data.train" else f", or type {key}=null if none are meant"
        raise ConfigError(f"{name} ({key}) has no samples: check its arguments{or_none}")


def _checked_length(data: Any, name: str) -> int | None:
    try:
        return len(data)
    except (TypeError, ValueError, OverflowError) as error:
        if not hasattr(type(data), "__len__"):
            return None
        try:
            given = type(data).__len__(data)
        except TypeError:  # of what it holds, which has no length
            if streams.is_stream(data):
                return None
            raise ConfigError(f"{name}.__len__ raises TypeError: {error}: let it return a whole number") from error
    raise ConfigError(
        f"{name}.__len__ returns {given!r:.40}, a {type(given).__name__}: let it return a whole number from 0 on, as "
        "by int()"
    )


def built_once(node: DictConfig) -> bool:
    try:
        return bool(getattr(get_class(node["_target_"]), "built_once", False))
    except (ValueError, ImportError):  # not a class; a bad name is reported when it is built
        return False


def sampler(
    cfg: DictConfig, data: Any, world: World, agree: Callable[[], Any] | None = None, ranks: int | None = None
) -> Any:
    # ranks: of the job that this process stands for; None: of the world.
    rank, world_size = world.rank, world.size if ranks is None else ranks
    batch_size = cfg.data.batch_size * cfg.trainer.gradient_accumulation_steps
    if streams.is_stream(data):
        return stream_sampler(cfg, data, batch_size, world, world_size, agree)
    taken = parameters(cfg.sampler["_target_"])
    if getattr(data, "mixture", None) is not None and "mixture" not in taken:
        own = str(cfg.sampler["_target_"]).rpartition(".")[2]
        raise ConfigError(f"{own} does not mix sets by weight: give sampler=distributed or sampler=sequential")
    asked = (name for name in ("shard_lengths", "targets", "mixture") if name in taken)  # targets may be no array
    of_data = {name: value for name in asked if (value := getattr(data, name, None)) is not None}
    arguments = {"n_samples": len(data), "batch_size": batch_size, "rank": rank, "world_size": world_size}
    takes_all = not taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())
    if refused := [] if takes_all else [name for name in arguments if name not in taken]:
        _refuse_sampler(cfg, f"takes no {', '.join(refused)}")
    made = make(cfg.sampler, **arguments, **of_data)
    if lacking := [name for name in ("global_batch", "steps", "batches") if not hasattr(made, name)]:
        _refuse_sampler(cfg, f"has no {', '.join(lacking)}")
    return made


def _refuse_sampler(cfg: DictConfig, what: str) -> NoReturn:
    raise ConfigError(
        f"sampler._target_={cfg.sampler['_target_']} {what}: a sampler is given n_samples, batch_size, rank and "
        "world_size, and yields this rank's batches of indices: make it a subclass of "
        "ddp_hydra.data.samplers.Distributed with a method order(self, epoch), see docs/data.md"
    )


def stream_sampler(
    cfg: DictConfig, data: Any, batch_size: int, world: World, ranks: int, agree: Callable[[], Any] | None = None
) -> streams.StreamSampler:
    target = cfg.sampler["_target_"]
    if target not in ORDER_OF_DATA or not cfg.sampler.get("drop_last", True):
        what = target.rpartition(".")[2] if target not in ORDER_OF_DATA else "sampler.drop_last=false"
        raise ConfigError(
            f"{what} needs a data set with a length and __getitem__, and {type(data).__name__} is iterable: it has an "
            "order of its own, and ends with its last full global batch. Leave sampler=… and sampler.drop_last=… out"
        )
    n_samples = cfg.data.get("n_samples")
    if n_samples is None:
        n_samples = _length_of_all(cfg, data, world)
    if n_samples is None:
        _refuse_without_length(cfg, data)
    part = streams.split(data, world.rank, ranks, cfg.data.get("shard_by"), heartbeat.progress, cfg.seed)
    if steps := cfg.trainer.overfit_batches:
        part = streams.RepeatedPart(part.dataset, world.rank, ranks, part.dealt, how=part.how, part=part, steps=steps)
    return streams.StreamSampler(part, batch_size, n_samples, agree)


def _length_of_all(cfg: DictConfig, data: Any, world: World) -> int | None:
    # A collective.
    lengths: list[int] = world.gather_objects(length(data))
    if len(set(lengths)) == 1 or None in lengths:
        return lengths[0]
    if cfg.data.get("shard_by") == "itself":
        return sum(lengths)
    raise ConfigError(
        f"{name_of(data)} has {', '.join(f'{n:,}' for n in lengths)} samples on the ranks: if it gives each rank "
        "samples of its own, type +data.shard_by=itself; else give their number, +data.n_samples=<n>"
    )


def _refuse_without_length(cfg: DictConfig, data: Any) -> None:
    needs = []
    if cfg.trainer.max_steps is None:
        needs.append(f"trainer.epochs={cfg.trainer.epochs} without trainer.max_steps")
    of_updates = {f"scheduler.{name}": node for name, node in cfg.scheduler.items() if isinstance(node, DictConfig)}
    for key, node in {"scheduler": cfg.scheduler, **of_updates}.items():
        if node.get("warmup_epochs"):
            needs.append(f"{key}.warmup_epochs={node.warmup_epochs}")
        if node.get("by") == "epoch":
            needs.append(f"{key}.by=epoch")
    if needs:
        raise ConfigError(
            f"{type(data).__name__} does not know how many samples it has, as needed for {', '.join(needs)}: give "
            "trainer.max_steps=<optimizer steps> (and scheduler.warmup_steps=…), or +data.n_samples=<their number>"
        )


def loader(cfg: DictConfig, data: Any, device: torch.device, channels_last: bool, world: World = ALONE) -> Loader:
    bounds = {name: cfg.data[name] for name in ("prefetch", "memory_mb") if cfg.data.get(name) is not None}
    if streams.is_stream(data):
        options = {"way": cfg.data.get("shard_by"), "progress": heartbeat.progress, "seed": cfg.seed}
        options |= {"warn": results.warn, "gather": world.gather_objects if world.size > 1 else None}
        return streams.StreamLoader(data, device, channels_last, **bounds, **options)
    return Loader(data, device, channels_last, **bounds, progress=heartbeat.progress, seed=cfg.seed, warn=results.warn)


def name_of(data: Any) -> str:
    return wrappers.name_of(data.dataset if isinstance(data, InWorkers) else data)


def with_features(node: DictConfig, trained: DataDescription) -> DictConfig:
    is_open = node.features is None if "features" in node else "features" in parameters(str(node.get("_target_")))
    if not trained.features or not is_open:
        return node
    copied = copy.copy(node)  # at the node's place in the config
    with open_dict(copied):
        copied.features = list(trained.features)
    return copied


def check_classes(cfg: DictConfig, task: Any, data: Any, num_classes: int) -> None:
    if isinstance(task, Regression):
        _check_numbers(data)
    criterion = getattr(task, "criterion", None)
    if not hasattr(data, "check_classes") or not takes_class_numbers(criterion):
        return
    given = cfg.model.get("num_classes", sys.maxsize)
    data.check_classes(given or num_classes or None, getattr(criterion, "ignore_index", None))


def check_validation_classes(cfg: DictConfig, task: Any, train: DataDescription, val_set: Any) -> None:
    # A model that the training data gives its size has no output for another class, which an epoch would find late.
    names, more = DataDescription.of(val_set).classes, list[str]()
    is_filled = cfg.model.get("num_classes", 0) is None and getattr(val_set, "target_transform", None) is None
    if is_filled and train.num_classes and takes_class_numbers(getattr(task, "criterion", None)):
        numbers = np.asarray([])
        with suppress(ValueError, TypeError, RuntimeError):  # of samples with several targets each
            numbers = np.asarray(getattr(val_set, "targets", ()))
        if numbers.ndim == 1 and numbers.dtype.kind in "iu":
            more = [names[number] for number in np.unique(numbers) if train.num_classes <= number < len(names)]
    if more:
        raise ConfigError(
            f"data.val has samples of classes that data.train does not have: {shown(more)}; the model gets the "
            f"{train.num_classes} of data.train: give model.num_classes=<n>, or leave these samples out"
        )


def _check_numbers(data: Any) -> None:
    numbers = getattr(data, "class_to_idx", None) or {}
    try:
        are_others = any(float(name) != number for name, number in numbers.items())
    except ValueError:  # names that are words
        return
    if are_others and getattr(data, "target_transform", None) is None:
        raise ConfigError(
            f"{name_of(data)} numbers its classes {shown(list(numbers), 3)} from 0, and task=regression would predict "
            "these numbers: give data.train and data.val a target_transform, number of a class -> target"
        )


def description_of(cfg: DictConfig, task: Any, data: Any) -> DataDescription:
    # Of whole numbers that neither the loss nor the model takes for classes, the largest means nothing.
    found = DataDescription.of(data)
    is_used = "num_classes" in cfg.model and cfg.model.num_classes in (None, found.num_classes)
    if found.classes or is_used or takes_class_numbers(getattr(task, "criterion", None)):
        return found
    return replace(found, num_classes=0)


def only_class(task: Any, description: DataDescription) -> str:
    if description.num_classes != 1 or not takes_class_numbers(getattr(task, "criterion", None)):
        return ""
    name = "".join(f" ({name})" for name in description.classes)
    return f"data.train has one class only{name}, and nothing is learned. Is the prefix one folder too low?"


def fill_num_classes(node: DictConfig, data: Any, key: str) -> DictConfig:
    if "num_classes" not in node or node.num_classes is not None:
        return node
    num_classes = DataDescription.of(data).num_classes
    if not num_classes and hasattr(data, "check_classes"):
        data.check_classes(None)
    if not num_classes:
        raise ConfigError(f"{key}.num_classes is null, and {name_of(data)} has no `classes`: give {key}.num_classes=…")
    return OmegaConf.merge(node, {"num_classes": num_classes})  # type: ignore[return-value]
