"""Builds the objects that the config names, on a rank: data sets, loader, model, optimizer, schedule.

The framework knows no model and no data set. A batch is what the task takes: (x, y), a dict, any structure of tensors.
A data set has these methods and attributes:

    __len__, __getitem__              as every map-style data set; for an iterable one, see below
    __getitems__(indices)             optional: a whole batch at once
    collate(samples) -> batch         optional: makes a batch; default: torch's default_collate
    prepare(batch) -> batch           optional: works on the device; normalises, encodes
    classes or num_classes            optional: fills model.num_classes; `classes` are names, for predictions
    sample_id(index) -> str           optional: identifies a sample that was read, as by its file; for predictions
    error_of(index) -> str            optional: why a sample that was read is replaced by another; "" if it is not
    labelled = False                  optional: its targets mean nothing, so that it can only be predicted
    set_epoch(epoch)                  optional: for augmentation
    expect(indices)                   optional: gets the indices that this rank will read in the epoch, in order
    shard_lengths, targets            optional: some samplers use them
    built_once = True                 optional: the data set is built on rank 0 and pickled to the other ranks
    bad                               optional: {name: reason} of samples that were replaced
    bad_counts                        optional: {name: number} of samples, if a name stands for several
    skipped                           optional: {extension: number} of files that it left out
    max_bad_fraction                  optional: the largest share of bad samples that is allowed over all ranks
    stats() -> {name: number}         optional: the cost of reading so far; see `monitoring/data_stats.py`
    close()                           optional: called at the end

An iterable data set has `__iter__`, and no `__getitem__` or the base class `IterableDataset`. These are optional:

    __len__                           samples in an epoch; `data.n_samples` in the config goes before it
    set_epoch(epoch)                  the next `iter()` gives the samples of this epoch
    of_rank(rank, world_size)         returns an iterable of this rank's samples; None: each rank takes its share of all
    state_dict, load_state_dict       the place reached; the next `iter()` goes on there. Plain values and tensors
    collate, prepare, classes, num_classes, stats, close    as above

If an exception of a data set has `mistake = True`, only a person can mend its cause: it is shown without a traceback,
and the job is not tried again.

A sampler takes n_samples, batch_size, rank, world_size, and the arguments in the config. It has

    global_batch                      samples of all ranks in one step
    steps(position)                   number of steps left in an epoch after so many samples
    batches(epoch, position)          this rank's batches of indices, as many as every other rank has
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_hydra import heartbeat
from ddp_hydra.config import objective
from ddp_hydra.data import streams
from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training import parameter_groups, precision, stream_sampler
from ddp_hydra.training.callbacks import Callback
from ddp_hydra.training.eval_metrics import EvalMetrics
from ddp_hydra.training.evaluation import Evaluation
from ddp_hydra.training.instantiate import init_parameters, make, parameters
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.train_step import TrainStep


def dataset(node: DictConfig | None) -> Any:
    """Build a data set; return None for none. If its class has `built_once`, only rank 0 builds it. A collective."""
    if node is None:
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1 or not built_once(node):
        return make(node)
    box = [make(node) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def datasets(cfg: DictConfig) -> Iterator[tuple[Any, Any]]:
    """Build the training set and the validation set (or None), and close them at the end."""
    with ExitStack() as stack:
        built = []
        for node in (cfg.data.train, cfg.data.get("val")):
            built.append(dataset(node))
            if hasattr(built[-1], "close"):
                stack.callback(built[-1].close)
        yield built[0], built[1]


def built_once(node: DictConfig) -> bool:
    """Return whether only one rank builds data sets of this class."""
    try:
        return bool(getattr(get_class(node["_target_"]), "built_once", False))
    except (ValueError, ImportError):  # not a class; a bad name is reported when it is built
        return False


def sampler(cfg: DictConfig, data: Any, rank: int, world_size: int) -> Any:
    """Build the training sampler of a rank; pass the attributes of the data set that it takes."""
    known = {"shard_lengths": getattr(data, "shard_lengths", None), "targets": getattr(data, "targets", None)}
    batch_size = cfg.data.batch_size * cfg.trainer.gradient_accumulation_steps
    if streams.is_stream(data):
        return stream_sampler.build(cfg, data, batch_size, rank, world_size)
    taken = parameters(cfg.sampler["_target_"])
    of_data = {name: value for name, value in known.items() if name in taken and value is not None}
    arguments = {"n_samples": len(data), "batch_size": batch_size, "rank": rank, "world_size": world_size}
    return make(cfg.sampler, **arguments, **of_data)


def loader(cfg: DictConfig, data: Any, device: torch.device, channels_last: bool) -> Loader:
    """Build the loader of a data set."""
    bounds = {name: cfg.data[name] for name in ("prefetch", "memory_mb") if cfg.data.get(name) is not None}
    if streams.is_stream(data):
        options = {"way": cfg.data.get("shard_by"), "progress": heartbeat.progress}
        return streams.StreamLoader(data, device, channels_last, **bounds, **options)
    return Loader(data, device, channels_last, **bounds, progress=heartbeat.progress)


def model(cfg: DictConfig, data: Any) -> nn.Module:
    """Build the model. If its `num_classes` is null, the data set fills it."""
    return make(fill_num_classes(cfg.model, data, "model"))


@dataclass
class Classes:
    """The classes of a data set. A checkpoint keeps those of the training data, so that its model needs no data.

    Args:
        classes: their names; () if the data set has none.
        num_classes: their number; 0 if the data set does not know it.
    """

    classes: tuple[str, ...] = ()
    num_classes: int = 0

    @classmethod
    def of(cls, data: Any) -> Classes:
        """Return the classes of a data set."""
        names = getattr(data, "classes", None)
        names = () if names is None else tuple(map(str, names))
        return cls(names, int(getattr(data, "num_classes", None) or len(names)))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"names": list(self.classes), "number": self.num_classes}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> Classes:
        """Return the classes that a checkpoint holds; none if it holds none."""
        return cls(tuple(values["names"]), values["number"]) if values else cls()


def fill_num_classes(node: DictConfig, data: Any, key: str) -> DictConfig:
    """Return a node whose `num_classes`, if it is null, comes from the data set.

    Args:
        node: of the config.
        data: the data set.
        key: of the node, for the error message.

    Raises:
        ConfigError: the data set does not know its classes.
    """
    if "num_classes" not in node or node.num_classes is not None:
        return node
    num_classes = Classes.of(data).num_classes
    if not num_classes:
        raise ConfigError(
            f"{key}.num_classes is null, and {type(data).__name__} has neither `classes` nor `num_classes` to "
            f"take it from: give {key}.num_classes=<n>"
        )
    return OmegaConf.merge(node, {"num_classes": num_classes})  # type: ignore[return-value]


def parallel(cfg: DictConfig, step: TrainStep) -> Parallel:
    """Wrap a training step for its ranks, and compile its model if trainer.compile is set."""
    wrapped: Parallel = make(cfg.parallel, step)
    if cfg.trainer.compile is not None:
        step.compile_model(cfg.trainer.compile.replace("_", "-"))
    return wrapped


def task(cfg: DictConfig, data: Any, device: torch.device) -> Task:
    """Build the task; pass what it takes of the loss, the mix and the classes. Its own models go to the device."""
    taken = init_parameters(str(cfg.task["_target_"]))
    known: dict[str, Callable[[], Any]] = {
        "criterion": lambda: make(cfg.loss),
        "mix": lambda: mix(cfg, data),
        "class_axis": lambda: objective.class_axis(cfg),
        "names": lambda: Classes.of(data).classes,
    }
    node = OmegaConf.masked_copy(cfg.task, [key for key in cfg.task if key not in objective.OF_A_TASK])
    built = make(node, **{name: value() for name, value in known.items() if name in taken and name not in node})
    if not isinstance(built, Task):
        raise ConfigError(
            f"task._target_={node['_target_']} is no subclass of ddp_hydra.tasks.Task, but a {type(built).__name__}"
        )
    for part in vars(built).values():
        if isinstance(part, nn.Module):
            part.to(device)
    return built


def callbacks(cfg: DictConfig) -> dict[str, Callback]:
    """Build the callbacks, by their names.

    Raises:
        ConfigError: one of them is none.
    """
    built = {str(name): make(node) for name, node in cfg.callbacks.items() if node is not None}
    for name, one in built.items():
        if not isinstance(one, Callback):
            raise ConfigError(
                f"callbacks.{name}: {type(one).__name__} is no subclass of ddp_hydra.training.callbacks.Callback"
            )
    return built


def mix(cfg: DictConfig, data: Any) -> Any:
    """Build the function that mixes the samples of a batch: (x, y) -> (x, shares of the classes); None for none."""
    if cfg.mix.get("_target_") is None:
        return None
    return make(fill_num_classes(cfg.mix, data, "mix"))


def eval_metrics(cfg: DictConfig, data: Any, device: torch.device) -> EvalMetrics | None:
    """Build the additional metrics of the validation; None if the config has none."""
    if not cfg.metrics:
        return None
    of_torchmetrics = [name for name, node in cfg.metrics.items() if node["_target_"].startswith("torchmetrics.")]
    if of_torchmetrics and importlib.util.find_spec("torchmetrics") is None:
        raise ConfigError(
            f"the metrics {', '.join(map(str, of_torchmetrics))} need torchmetrics, which is not on this worker: type "
            "`pip install 'ddp-hydra[metrics]'` there, or metrics=none"
        )
    metrics = {
        str(name): make(fill_num_classes(node, data, f"metrics.{name}")).to(device)
        for name, node in cfg.metrics.items()
    }
    return EvalMetrics(metrics, getattr(data, "classes", ()))


def evaluation(cfg: DictConfig, data: Any, task: Task, device: torch.device, channels_last: bool) -> Evaluation:
    """Build the evaluation of the model on the validation set."""
    return Evaluation(
        loader(cfg, data, device, channels_last),
        cfg.data.batch_size,
        precision.autocast(cfg.trainer.precision, device),
        task,
        eval_metrics(cfg, data, device),
    )


def optimizer(cfg: DictConfig, model: nn.Module, global_batch: int = 0, update: str = "") -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of a model, or of a part of it.

    Args:
        cfg: the config.
        model: the model, or its part; frozen parameters are left out.
        global_batch: samples in a step; with trainer.base_batch_size, lr grows with it.
        update: name of the part; "" for the whole model.
    """
    node = of_update(cfg.optimizer, update, "optimizer")
    if cfg.trainer.base_batch_size is not None and global_batch:
        node = OmegaConf.merge(node, {"lr": node.lr * global_batch / cfg.trainer.base_batch_size})  # type: ignore[assignment]
    return make(node, parameter_groups.parameters(model, decay_all=cfg.trainer.decay_all))


def of_update(node: DictConfig, update: str, key: str) -> DictConfig:
    """Return the node of an update: its own, where the config has one for each name, else the one for all.

    Args:
        node: of the config.
        update: name of the update; "" for the only one.
        key: of the node, for the error message.

    Raises:
        ConfigError: there is no node of that name.
    """
    if "_target_" in node:
        return node
    if update not in node:
        there = ", ".join(map(str, node))
        what = f"has no {update}" if update else "has no _target_, and this task has one update of the whole model"
        raise ConfigError(
            f"{key} {what}: give {key}={{_target_: …}}, or one for each update of the task; it has {there}"
        )
    return node[update]


def schedule(
    cfg: DictConfig, optimizer: torch.optim.Optimizer, total_steps: int, epoch_steps: int = 1, update: str = ""
) -> Any:
    """Build the learning-rate schedule: one of ours or one of torch's.

    Args:
        cfg: the config.
        optimizer: its learning rate is scheduled.
        total_steps: steps of the run.
        epoch_steps: steps of an epoch.
        update: name of the update whose optimizer it is.
    """
    node = of_update(cfg.scheduler, update, "scheduler")
    known = {"total_steps": total_steps, "epoch_steps": epoch_steps}
    taken = parameters(node["_target_"])
    arguments = {name: value for name, value in known.items() if name in taken}
    return make(node, optimizer, **(arguments if taken else {"total_steps": total_steps}))


def device(cfg: DictConfig) -> torch.device:
    """Return the rank's device. Each rank sees its own GPU first, so that is always `cuda:0`.

    Raises:
        ConfigError: trainer.device=cuda, but there is no GPU.
    """
    given = cfg.trainer.device
    if given == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch finds no GPU on this worker: give trainer.device=cpu or auto")
    return torch.device("cuda:0" if given != "cpu" and torch.cuda.is_available() else "cpu")


def channels_last(cfg: DictConfig, model: nn.Module) -> bool:
    """Return whether the model takes images as channels_last: by default, if it has 2-d convolutions."""
    given: bool | None = cfg.trainer.channels_last
    return any(isinstance(module, nn.Conv2d) for module in model.modules()) if given is None else given
