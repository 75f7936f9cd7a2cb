"""From config to objects, on a rank: data sets, loader, model, optimizer, schedule.

The framework knows no model and no data set; it asks of a data set

    __len__, __getitem__              as every map-style data set has them
    __getitems__(indices)             optional: a whole batch at once
    collate(samples) -> batch         optional: torch's default_collate otherwise
    prepare(batch) -> (x, y)          optional: on the device; normalises, encodes
    classes or num_classes            optional: fills model.num_classes
    set_epoch(epoch)                  optional: for augmentation
    expect(indices)                   optional: what this rank will ask for in this epoch, in order
    shard_lengths, targets            optional: for samplers that go by them
    built_once = True                 optional: built on rank 0, pickled to the others
    bad                               optional: {name: reason} of samples that were replaced
    bad_counts                        optional: {name: number} where a name stands for more than one
    skipped                           optional: {extension: number} of files that it left out
    max_bad_fraction                  optional: share of them that all ranks together may have
    stats() -> {name: number}         optional: what reading cost so far; see `data_report.py`
    close()                           optional: at the end

An exception of it with `mistake = True` is one that only a person can put right: it is shown without a traceback, and
the job is not tried again.

And of a sampler (its arguments: n_samples, batch_size, rank, world_size, and those of the config)

    global_batch                      samples of all ranks in one step
    steps(position)                   steps that an epoch still has behind so many samples
    batches(epoch, position)          this rank's batches of indices, as many as all ranks have
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from hydra.utils import get_class, get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_hydra.config import objective, targets, unknown_keys
from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError, DdpHydraError
from ddp_hydra.training import parameter_groups, precision
from ddp_hydra.training.eval_metrics import EvalMetrics
from ddp_hydra.training.evaluation import Evaluation
from ddp_hydra.training.parallel import Parallel


def make(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Instantiate a node of the config; what the class says of a bad argument is passed on as a ConfigError."""
    try:
        # Arguments go past Hydra, which would copy each into a config.
        return instantiate(node, _partial_=True)(*args, **kwargs)
    except DdpHydraError:
        raise
    except InstantiationException as error:
        if error.__cause__ is None or isinstance(error.__cause__, (ImportError, AttributeError)):
            raise ConfigError(f"{node.get('_target_')}: {targets.explain(str(node.get('_target_')), error)}") from error
        raise
    except (OSError, ValueError, TypeError, LookupError, ImportError, AttributeError) as error:
        raise ConfigError(f"{node.get('_target_')}: {not_taken(node) or error}") from error


def not_taken(node: DictConfig) -> str:
    """Say which keys of a node its target does not take, as those of another optimizer; "" for none."""
    taken = parameters(str(node.get("_target_")))
    if not taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return ""
    refused = [str(key) for key in node if key not in taken and not str(key).startswith("_")]
    if not refused:
        return ""
    names = [name for name in taken if name not in ("self", "params")]
    hints = "".join(unknown_keys.meant(key, names) for key in refused)
    leave_out = " ".join(f"'~{node._get_full_key(key)}'" for key in refused)
    there = ", ".join(names)
    return f"it takes no {', '.join(refused)}{hints}; it takes {there}; to leave the others out, type {leave_out}"


def dataset(node: DictConfig | None) -> Any:
    """Build a data set, or let rank 0 build it for all where its class says `built_once`."""
    if node is None:
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1 or not built_once(node):
        return make(node)
    box = [make(node) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def datasets(cfg: DictConfig) -> Iterator[tuple[Any, Any]]:
    """The training and the validation set (None where there is none), closed at the end."""
    with ExitStack() as stack:
        built = []
        for node in (cfg.data.train, cfg.data.get("val")):
            built.append(dataset(node))
            if hasattr(built[-1], "close"):
                stack.callback(built[-1].close)
        yield built[0], built[1]


def built_once(node: DictConfig) -> bool:
    """Whether the data set's class wants to be built by one rank only."""
    try:
        return bool(getattr(get_class(node["_target_"]), "built_once", False))
    except (ValueError, ImportError):  # not a class; a bad name is reported when it is built
        return False


def sampler(cfg: DictConfig, data: Any, rank: int, world_size: int) -> Any:
    """Build the training sampler of a rank, and tell it what it wants to know of the data set."""
    known = {"shard_lengths": getattr(data, "shard_lengths", None), "targets": getattr(data, "targets", None)}
    wanted = parameters(cfg.sampler["_target_"])
    told = {name: value for name, value in known.items() if name in wanted and value is not None}
    batch_size = cfg.data.batch_size * cfg.trainer.gradient_accumulation_steps
    arguments = {"n_samples": len(data), "batch_size": batch_size, "rank": rank, "world_size": world_size}
    return make(cfg.sampler, **arguments, **told)


def loader(cfg: DictConfig, data: Any, device: torch.device, channels_last: bool) -> Loader:
    """Build the loader of a data set."""
    bounds = {name: cfg.data[name] for name in ("prefetch", "memory_mb") if cfg.data.get(name) is not None}
    return Loader(data, device, channels_last, **bounds)


def model(cfg: DictConfig, data: Any) -> nn.Module:
    """Build the model; a `num_classes` of null is what the data set has."""
    return make(counted(cfg.model, data, "model"))


def counted(node: DictConfig, data: Any, key: str) -> DictConfig:
    """Fill a `num_classes` of null with what the data set has."""
    if "num_classes" not in node or node.num_classes is not None:
        return node
    found = getattr(data, "num_classes", None) or len(getattr(data, "classes", ()))
    if not found:
        raise ConfigError(
            f"{key}.num_classes is null, and {type(data).__name__} has neither `classes` nor `num_classes` to "
            f"take it from: give {key}.num_classes=<n>"
        )
    return OmegaConf.merge(node, {"num_classes": found})  # type: ignore[return-value]


def parallel(cfg: DictConfig, model: nn.Module) -> Parallel:
    """Put a model among its ranks, and compile it if that is wanted."""
    wrapped: Parallel = make(cfg.parallel, model)
    if cfg.trainer.compile is not None:
        wrapped.compile(cfg.trainer.compile.replace("_", "-"))
    return wrapped


def loss(cfg: DictConfig) -> Any:
    """Build the loss of the training."""
    return make(cfg.loss)


def mix(cfg: DictConfig, data: Any) -> Any:
    """Build what mixes the samples of a batch: (x, y) -> (x, shares of the classes)."""
    if cfg.mix.get("_target_") is None:
        return lambda x, y: (x, y)
    return make(counted(cfg.mix, data, "mix"))


def scores(cfg: DictConfig, data: Any, device: torch.device) -> EvalMetrics | None:
    """Build the metrics of the validation beside loss and accuracy."""
    if not cfg.metrics:
        return None
    of_torchmetrics = [name for name, node in cfg.metrics.items() if node["_target_"].startswith("torchmetrics.")]
    if of_torchmetrics and importlib.util.find_spec("torchmetrics") is None:
        raise ConfigError(
            f"the metrics {', '.join(map(str, of_torchmetrics))} need torchmetrics, which is not on this worker: type "
            "`pip install 'ddp-hydra[metrics]'` there, or metrics=none"
        )
    metrics = {str(name): make(counted(node, data, f"metrics.{name}")).to(device) for name, node in cfg.metrics.items()}
    return EvalMetrics(metrics, getattr(data, "classes", ()))


def evaluation(cfg: DictConfig, data: Any, device: torch.device, channels_last: bool) -> Evaluation:
    """Build what judges the model on the validation set."""
    built = make(cfg.loss)
    return Evaluation(
        loader(cfg, data, device, channels_last),
        len(data),
        cfg.data.batch_size,
        precision.autocast(cfg.trainer.precision, device),
        getattr(built, "for_validation", built),
        objective.class_axis(cfg),
        scores(cfg, data, device),
    )


def optimizer(cfg: DictConfig, model: nn.Module, global_batch: int = 0) -> torch.optim.Optimizer:
    """Build the optimizer over a model's parameters.

    Args:
        cfg: the config.
        model: whose parameters, but those that are frozen.
        global_batch: samples of a step; with trainer.base_batch_size, lr grows with it.
    """
    node = cfg.optimizer
    if cfg.trainer.base_batch_size is not None and global_batch:
        node = OmegaConf.merge(node, {"lr": node.lr * global_batch / cfg.trainer.base_batch_size})
    return make(node, parameter_groups.parameters(model, decay_all=cfg.trainer.decay_all))


def schedule(cfg: DictConfig, optimizer: torch.optim.Optimizer, total_steps: int, epoch_steps: int = 1) -> Any:
    """Build the learning-rate schedule: ours, or any of torch's.

    Args:
        cfg: the config.
        optimizer: whose rate.
        total_steps: of the run.
        epoch_steps: of an epoch.
    """
    known = {"total_steps": total_steps, "epoch_steps": epoch_steps}
    wanted = parameters(cfg.scheduler["_target_"])
    arguments = {name: value for name, value in known.items() if name in wanted}
    return make(cfg.scheduler, optimizer, **(arguments if wanted else {"total_steps": total_steps}))


def parameters(target: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of what a `_target_` names; none where there is no such thing."""
    try:
        return inspect.signature(get_object(target)).parameters
    except (ValueError, ImportError, TypeError, InstantiationException):
        return {}


def device(cfg: DictConfig) -> torch.device:
    """The rank's device. Each rank sees its own GPU first, so that is always `cuda:0`."""
    wanted = cfg.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch finds no GPU on this worker: give trainer.device=cpu or auto")
    return torch.device("cuda:0" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def has_convolutions(model: nn.Module) -> bool:
    """Whether the model has 2-d convolutions, for which channels_last pays."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def choose(given: bool | None, otherwise: bool) -> bool:
    """What was given, or else the default."""
    return otherwise if given is None else given
