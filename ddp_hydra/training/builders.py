"""Builds what the config names, on a rank: model, task, callbacks, metrics, precision."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_hydra import results
from ddp_hydra.config import objective, validate
from ddp_hydra.config.targets import init_parameters, make, make_function, parameters, without
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Task
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training.build_data import fill_num_classes, loader
from ddp_hydra.training.callbacks import Callback
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.evaluation import EvalMetrics, Evaluation
from ddp_hydra.training.parallel import Parallel, weights
from ddp_hydra.training.train_step import attributes_of, modules_of, trained_loss

WEIGHTS = ("weight", "pos_weight")
"""Arguments of losses that are tensors."""
SMOOTHING = "label_smoothing"
FLOAT8 = (8, 9)
"""The least compute capability of GPUs that multiply float8."""


def model(cfg: DictConfig, data: Any) -> nn.Module:
    # If its `num_classes` is null, the data set fills it.
    is_open = "num_classes" in cfg.model and cfg.model.num_classes is None
    is_regression = cfg.task["_target_"] == "ddp_hydra.tasks.Regression"
    if is_open and is_regression and not DataDescription.of(data).classes:
        raise ConfigError("model.num_classes is null, and task=regression has no classes: give model.num_classes=1")
    target = cfg.model["_target_"]
    node = fill_num_classes(cfg.model, data, "model")
    if "weights" in node and "weights" not in parameters(str(target)):
        if node.weights is not None:  # a file or run would have been loaded, and null be left
            if Path(str(node.weights)).expanduser().exists():
                raise ConfigError(
                    f"model.weights={node.weights} begins a training; here the weights are those of run=: "
                    "give another run or checkpoint as run=<path>"
                )
            raise ConfigError(f"model.weights={node.weights}: there is no such file, nor a run directory")
        node = without(node, ["weights"])
    built = make(node)
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model._target_={target} returned a {type(built).__name__}: return a torch.nn.Module")
    adapter = cfg.get("adapter")
    if adapter and "_target_" in adapter:
        built = make(adapter, built)
    refuse_lazy(built, f"model._target_={target}")
    weights.give_memory(built)
    return built


def refuse_lazy(module: nn.Module, what: str) -> None:
    if lazy := weights.without_shape(module):
        raise ConfigError(f"{what}: {', '.join(lazy)} has no shape yet (nn.LazyLinear): give its size")


def parallel(cfg: DictConfig, world: World = ALONE) -> Parallel:
    if cfg.trainer.compile is not None and cfg.parallel["_target_"].endswith(".parallel.dp.DP"):
        raise ConfigError(f"trainer.compile={cfg.trainer.compile} does not go with parallel=dp: give parallel=ddp")
    if world.size > 1:
        validate.check_static_graph(cfg)
    built: Parallel = make(cfg.parallel, world)
    return built


def inference_parallel(cfg: DictConfig, world: World) -> Parallel:
    # For a model that is not trained: as one copy, which is sharded where it was in the training.
    if world.group is None or not getattr(get_object(cfg.parallel["_target_"]), "shards", False):
        return Parallel(world)
    sharded: Parallel = make(without(cfg.parallel, {"replicas"} & cfg.parallel.keys()), world)
    return sharded


def makes_cuda_graphs(cfg: DictConfig, device: torch.device) -> bool:
    return device.type == "cuda" and cfg.trainer.compile in ("reduce_overhead", "max_autotune")


def trained_task(cfg: DictConfig, data: Any, device: torch.device) -> Task:
    # For a training. A trained model is evaluated whatever its run was told in vain.
    check_taken(cfg)
    return task(cfg, data, device)


def check_taken(cfg: DictConfig) -> None:
    """Refuse a loss or a mix that is asked for, and that the task doesn't take."""
    target, said = str(cfg.task["_target_"]), []
    taken, name = init_parameters(target), target.rpartition(".")[2]
    mix = OmegaConf.select(cfg, "mix._target_")
    asked_of_mix = {} if mix is None else {"_target_": mix}
    for group, argument, asked in (("loss", "criterion", asked_of_loss(cfg)), ("mix", "mix", asked_of_mix)):
        if argument in taken and argument not in cfg.task:
            continue
        # Keys of the task and the model may refer to the group or a key of it: task.criterion=${loss}.
        used = list(
            _values_in([OmegaConf.to_container(cfg[name], resolve=True) for name in ("task", "model") if cfg.get(name)])
        )
        idle = [key for key, value in asked.items() if value not in used]
        if not idle:
            continue
        usual = "mix=none" if group == "mix" else "loss=cross_entropy with its usual keys"
        if argument in taken:
            why, instead = f"takes task.{argument} in its place", f"'task.{argument}={{_target_: <class>}}' for another"
        else:
            why, instead = f"takes no {group}", f"write a task whose __init__ takes `{argument}`"
        given = " ".join(f"{group}.{key}={asked[key]}" for key in idle)
        said.append(f"{given} would have no effect, as {name} {why}: give {usual}, or {instead}")
    if said:
        raise ConfigError("; ".join(said))


def _values_in(node: Any) -> Iterator[Any]:
    yield node
    if isinstance(node, list | dict):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _values_in(value)


def asked_of_loss(cfg: DictConfig) -> dict[str, Any]:
    # What differs from `conf/loss/cross_entropy.yaml`, whose values are the defaults of its class.
    loss = cfg.get("loss") or {}
    usual = {name: one.default for name, one in inspect.signature(CrossEntropy).parameters.items()}
    usual["_target_"] = f"{CrossEntropy.__module__}.{CrossEntropy.__name__}"
    return {str(key): value for key, value in loss.items() if "_target_" in loss and value != usual.get(str(key))}


def task(cfg: DictConfig, data: Any, device: torch.device) -> Task:
    # The task's own models go to the device.
    taken = init_parameters(str(cfg.task["_target_"]))
    known: dict[str, Callable[[], Any]] = {
        "criterion": lambda: criterion(cfg),
        "mix": lambda: mix(cfg, data),
        "class_axis": lambda: objective.class_axis(cfg),
        "guesses_axis": lambda: "class_axis" not in cfg.task,
        "names": lambda: DataDescription.of(data).classes,
    }
    node = without(cfg.task, [key for key in cfg.task if key in objective.OF_A_TASK])
    built = make(node, **{name: value() for name, value in known.items() if name in taken and name not in node})
    if not isinstance(built, Task):
        raise ConfigError(
            f"task._target_={node['_target_']} is not a subclass of ddp_hydra.tasks.Task, but a {type(built).__name__}"
        )
    for name, part in attributes_of(built).items():
        if isinstance(part, nn.Module):
            refuse_lazy(part, f"task._target_={node['_target_']}: {name}")
    for module in modules_of(built):
        module.to(device)
    trained = set(loss.parameters()) if (loss := trained_loss(built)) is not None else set()
    for name, part in _parts_of(built):
        for parameter in part.parameters() if isinstance(part, nn.Module) else [part]:
            if parameter.requires_grad and parameter not in trained and not is_lazy(parameter):
                parameter.register_hook(partial(_refuse_gradient, type(built).__name__, name))
    return built


def _parts_of(task: Task) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    # Also in lists and dicts.
    for name, value in attributes_of(task).items():
        entries = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for path, one in ((name, value), *((f"{name}[{key!r}]", entry) for key, entry in entries)):
            if isinstance(one, nn.Module | nn.Parameter):
                yield path, one


def _refuse_gradient(task: str, name: str, gradient: torch.Tensor) -> None:
    raise ConfigError(
        f"{task}.{name} gets gradients, but no optimizer trains it: name it `criterion` if it is the loss, put it into "
        f"the module self.criterion or the model, or freeze it, as by self.{name}.requires_grad_(False)"
    )


def criterion(cfg: DictConfig) -> Any:
    # Weights of its classes, a list in the config, become a tensor. `loss._target_=` alone keeps the other keys of
    # `conf/loss/cross_entropy.yaml`. A smoothing of 0 asks for nothing, so it is left out for a loss that doesn't name
    # it.
    weights = {name: cfg.loss[name] for name in WEIGHTS if OmegaConf.is_list(cfg.loss.get(name))}
    is_idle = cfg.loss.get(SMOOTHING) == 0 and SMOOTHING not in parameters(str(cfg.loss.get("_target_")))
    node = without(cfg.loss, weights.keys() | ({SMOOTHING} if is_idle else set()))
    try:
        tensors = {name: torch.tensor(list(values), dtype=torch.float32) for name, values in weights.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss.{', loss.'.join(weights)}: give a list of numbers, one for each class") from error
    built = make_function(node, **tensors)
    if isinstance(built, nn.Module):
        refuse_lazy(built, f"loss._target_={node['_target_']}")
    return built


def callbacks(cfg: DictConfig) -> dict[str, Callback]:
    built = {str(name): make(node) for name, node in cfg.callbacks.items() if node is not None}
    for name, one in built.items():
        if not isinstance(one, Callback):
            raise ConfigError(
                f"callbacks.{name}: {type(one).__name__} is not a subclass of ddp_hydra.training.callbacks.Callback"
            )
        check_moments(one, f"callbacks.{name}: {type(one).__name__}")
    return built


def check_moments(callback: Callback, what: str) -> None:
    """Refuse methods that nothing would call, such as Lightning's `on_train_epoch_end`, or that do not take `run`."""
    known = [name for name, one in vars(Callback).items() if name.startswith("on_") and callable(one)]
    for name in dir(type(callback)):
        if not name.startswith("on_") or not callable(method := getattr(callback, name)):
            continue
        if name not in known:
            raise ConfigError(f"{what}.{name} would never be called: the methods are {', '.join(known)}")
        try:
            inspect.signature(method).bind(None)
        except TypeError:
            raise ConfigError(f"{what}.{name} can't be called: write def {name}(self, run)") from None


def mix(cfg: DictConfig, data: Any) -> Any:
    if cfg.mix.get("_target_") is None:
        return None
    return make_function(fill_num_classes(cfg.mix, data, "mix"))


def eval_metrics(cfg: DictConfig, data: Any, device: torch.device, world: World) -> EvalMetrics:
    nodes = {name: node for name, node in (cfg.metrics or {}).items() if node is not None}
    of_torchmetrics = [name for name, node in nodes.items() if node["_target_"].startswith("torchmetrics.")]
    if of_torchmetrics and importlib.util.find_spec("torchmetrics") is None:
        raise ConfigError(
            f"the metrics {', '.join(map(str, of_torchmetrics))} need torchmetrics, which is not on this worker: type "
            "`pip install 'ddp-hydra[metrics]'` there, or metrics=none"
        )
    metrics = {}
    for name, node in nodes.items():
        filled = fill_num_classes(node, data, f"metrics.{name}")
        if node.get("num_classes", 0) is None and filled.get("top_k", 0) > filled.num_classes:
            if world.rank == 0:
                results.warn(
                    f"metrics.{name} is left out: top_k={filled.top_k} of {filled.num_classes} classes; "
                    f"give metrics.{name}.top_k=<n>, or ~metrics.{name}"
                )
            continue
        built = make(filled)
        if lacking := [one for one in ("update", "compute", "reset") if not callable(getattr(built, one, None))]:
            what = f"metrics.{name}: {type(built).__name__} has no {', '.join(lacking)}"
            raise ConfigError(f"{what}: give a subclass of torchmetrics.Metric")
        metrics[str(name)] = built.to(device) if hasattr(built, "to") else built
    return EvalMetrics(metrics, DataDescription.of(data).classes, world)


def evaluation(cfg: DictConfig, data: Any, task: Task, device: torch.device, parallel: Parallel) -> Evaluation:
    batches = loader(cfg, data, device, parallel.channels_last, parallel.world)
    metrics = eval_metrics(cfg, data, device, parallel.world)
    return Evaluation(batches, cfg.data.batch_size, autocast(cfg, device, parallel), task, metrics, cfg.seed)


def device(cfg: DictConfig) -> torch.device:
    # Each rank sees its own GPU first, so that is always `cuda:0`.
    given = cfg.trainer.device
    if given == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch finds no GPU on this worker: give trainer.device=cpu or auto")
    return torch.device("cuda:0" if given != "cpu" and torch.cuda.is_available() else "cpu")


def set_float32(cfg: DictConfig) -> None:
    # Convolutions keep torch's default: TF32 if the GPU has it. To use all bits there, set
    # `torch.backends.cudnn.allow_tf32 = False` in the model's file.
    torch.set_float32_matmul_precision("high" if cfg.trainer.precision == "tf32" else "highest")


def autocast(cfg: DictConfig, device: torch.device, parallel: Parallel | None = None) -> torch.autocast:
    # For bf16 and fp16, it lowers operations that torch considers safe.
    low = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(cfg.trainer.precision)
    computes_low = parallel is not None and parallel.casts_to_bf16
    return torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None and not computes_low)


def with_float8(model: nn.Module, cfg: DictConfig, device: torch.device) -> nn.Module:
    # Products of linear layers are float8, all else is as with bf16. Parameters and their names stay.
    if cfg.trainer.precision != "fp8":
        return model
    instead = "give trainer.precision=bf16"
    needed = f"trainer.precision=fp8 needs a GPU of compute capability {FLOAT8[0]}.{FLOAT8[1]} or newer"
    if device.type != "cuda":
        raise ConfigError(f"{needed}, and this rank computes on the {device.type.upper()}: {instead}")
    if (found := torch.cuda.get_device_capability(device)) < FLOAT8:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{needed}, and {name} has {found[0]}.{found[1]}: {instead}")
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "trainer.precision=fp8 needs torchao, which is not on this worker: type `pip install torchao` there, or "
            f"{instead}"
        )

    def takes_float8(layer: Any, name: str) -> bool:
        return isinstance(layer, nn.Linear) and layer.in_features % 16 == 0 == layer.out_features % 16

    converted: nn.Module = get_object("torchao.float8.convert_to_float8_training")(model, module_filter_fn=takes_float8)
    return converted


def scaler(cfg: DictConfig, device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, enabled=cfg.trainer.precision == "fp16")
