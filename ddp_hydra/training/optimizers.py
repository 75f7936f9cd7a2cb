"""Builds what updates the weights: optimizers with their groups and learning rates, schedules, and their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_hydra.config.targets import make, needed_arguments, parameters, without
from ddp_hydra.console.text import listed
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training import builders
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.lr_schedules import FactorLR, ScheduleProgress, constant, first_rate, keep_first_rates, own_rate
from ddp_hydra.training.parallel import Parallel, parameter_groups, weights
from ddp_hydra.training.train_step import sparse_weights, trained_loss
from ddp_hydra.training.update import Update, Weighing, check_sparse, check_updates

FUSED = {f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW")}
"""Optimizers whose `fused` computes on GPUs."""
FUSED_SHARDS = FUSED - {"torch.optim.SGD"}
"""Optimizers whose `fused` torch has for shares of parameters."""
FUSED_OR_NOT = {"fused", "foreach", "differentiable"}
"""Arguments that choose how an optimizer computes; only one of them can be true."""
UPDATES_REPEAT = 1000
"""Number of first steps in whose updates the names that a task updates are looked for."""

Stage = dict[str, Any]
"""Patterns and learning rate of parameters that are unfrozen together."""


class UpdateBuilder:
    """Builds the updates of a run."""

    def __init__(
        self,
        cfg: DictConfig,
        parallel: Parallel,
        task: Task,
        consensus: StepConsensus,
        global_batch: int,
        device: torch.device,
    ) -> None:
        self.cfg, self.parallel, self.task, self.consensus = cfg, parallel, task, consensus
        self.global_batch, self.device = global_batch, device
        self.names = updates_of(task)

    def first(self, progress: ScheduleProgress, unfrozen: Sequence[Stage]) -> dict[str, Update]:
        # A collective.
        cfg, model = self.cfg, self.parallel.model
        parts = {name: self.task.part(model, name) if name else model for name in self.names}
        loss = trained_loss(self.task)
        optimizers = {name: optimizer(cfg, part, self.global_batch, name, loss) for name, part in parts.items()}
        for stage in unfrozen:
            self.unfreeze({name: (part, optimizers[name]) for name, part in parts.items()}, stage)
        samples = self.global_batch // self.parallel.world.size
        with_schedules = {
            name: (
                one,
                schedule(cfg, one, progress.total, progress.epoch_steps or 1, name),
                builders.scaler(cfg, self.device),
                Weighing(samples, self.consensus),
            )
            for name, one in optimizers.items()
        }
        updates = self._updates(with_schedules)
        self.parallel.broadcast_rest(self.task)
        return updates

    def _updates(self, given: Mapping[str, tuple[Optimizer, Any, torch.amp.GradScaler, Weighing]]) -> dict[str, Update]:
        trainer = self.cfg.trainer
        parts = {name: self.parallel.build_part(trainer, self.task, name) for name in given}
        trained = {name: {one: None for _, one in part.trained(given[name][0])} for name, part in parts.items()}
        keys = {name: of_update(self.cfg.optimizer, name, "optimizer")._get_full_key(None) for name in given}
        for name, part in parts.items():
            check_sparse(part.part, given[name][0], keys[name])
        may_be_late = self.device.type == "cuda" and trainer.on_nonfinite != "skip" and len(parts) == 1
        return {
            name: Update(
                name,
                part,
                *given[name],
                clip_norm=trainer.clip_norm,
                others=[one for several in trained.values() for one in several if one not in trained[name]],
                late=may_be_late and part.same_gradients,
                in_place=trainer.gradient_accumulation_steps > 1 and builders.makes_cuda_graphs(self.cfg, self.device),
                key=keys[name],
            )
            for name, part in parts.items()
        }

    def unfrozen(self, updates: Mapping[str, Update], stage: Stage) -> dict[str, Update]:
        # A collective. The updates that train more have the optimizers, schedules and weighings of those before.
        self.unfreeze({name: (update.part.part, update.optimizer) for name, update in updates.items()}, stage)
        for update in updates.values():
            extend(update.scheduler)
        return self._updates(
            {name: (old.optimizer, old.scheduler, old.scaler, old.weighing) for name, old in updates.items()}
        )

    def unfreeze(self, parts: Mapping[str, tuple[nn.Module, Optimizer]], stage: Stage) -> None:
        cfg, loss = self.cfg, trained_loss(self.task)
        fresh = parameter_groups.unfreeze(self.parallel.model, cfg.trainer.freeze, stage["patterns"])
        for name, (part, old) in parts.items():
            groups = list[dict[str, Any]]()
            if stage.get("by_function") and makes_groups(of_update(cfg.optimizer, name, "optimizer")["_target_"]):
                # The function is called again: it may leave out what is frozen.
                groups = optimizer(cfg, part, self.global_batch, name, loss, is_first=False).param_groups
            known = {parameter for group in groups for parameter in group["params"]}
            rest = [one for one in part.parameters() if one in fresh - known]
            rate = first_rate(old.param_groups[0])
            groups += [
                ({} if rate is None else {"lr": rate}) | group
                for group in parameter_groups.grouped(rest, cfg.trainer.decay_all)
            ]
            for group in groups:
                rate = stage["lr"] if stage["lr"] is not None else group.get("lr")
                if params := [one for one in group["params"] if one in fresh]:
                    before = len(old.param_groups)
                    old.add_param_group(group | ({} if rate is None else {"lr": own_rate(rate)}) | {"params": params})
                    if len(old.param_groups) == before:  # one that joins several optimizers may have dropped it
                        raise ConfigError(f"{type(old).__name__}.add_param_group adds nothing: it can't unfreeze")
            to_train(old)


def updates_of(task: Task) -> list[str]:
    of_steps = {step: listed(task.updates(step)) for step in range(1, UPDATES_REPEAT + 1)}
    names = list(dict.fromkeys(name for of_step in of_steps.values() for name in of_step))
    for step, of_step in of_steps.items():
        check_updates(task, step, of_step)
    if not names or ("" in names and len(names) > 1):
        raise ConfigError(f"{type(task).__name__}.updates(step) returned {names}: return names of parts, or ('',)")
    return names


def extend(scheduler: Any) -> None:
    if not isinstance(scheduler, FactorLR):
        own = "take scheduler=cosine, linear, step or none"
        raise ConfigError(f"parameters can't be unfrozen with {type(scheduler).__name__}: {own}")
    scheduler.extend()


def optimizer(
    cfg: DictConfig,
    model: nn.Module,
    global_batch: int = 0,
    update: str = "",
    loss: nn.Module | None = None,
    is_first: bool = True,
) -> torch.optim.Optimizer:
    # A function that has an argument `model`, and `loss` for a loss with parameters, makes parameter groups of its own.
    node = of_update(cfg.optimizer, update, "optimizer")
    node = without(node, [key for key in RATE_KEYS if key in node])
    names = weights.names(model, loss)
    if makes_groups(node["_target_"]):
        own = {"model": model, **({"loss": loss} if "loss" in parameters(node["_target_"]) else {})}
        built: torch.optim.Optimizer = make(node, **own)
        if is_first:
            check_groups(built, str(node["_target_"]), names, None if "loss" in own else loss)
    else:
        groups = parameter_groups.parameters(names, decay_all=cfg.trainer.decay_all)
        built = make(node, groups, **fused(node, [one for one in names if one.requires_grad], sparse_weights(model)))
    for group in built.param_groups:  # torch gives all of them one tensor
        rate = group.get("lr")
        rate = own_rate(scaled_rate(cfg, rate, global_batch) if global_batch else rate)
        group.update({} if rate is None else {"lr": rate})
    to_train(built)
    if needed := needed_arguments(built.step):
        wanted = f"its step() needs {', '.join(needed)}, and gets nothing"
        raise ConfigError(f"optimizer._target_={node['_target_']}: {wanted}: give optimizer=adamw or optimizer=sgd")
    return built


def has_eval_weights(optimizer: torch.optim.Optimizer) -> bool:
    # It evaluates other weights than it trains, as schedule-free ones do.
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def to_train(optimizer: Any) -> None:
    if has_eval_weights(optimizer):
        optimizer.train()


@contextmanager
def eval_weights(optimizers: Sequence[Any]) -> Iterator[None]:
    # The parameters are kept: computed back, they would be rounded.
    switched = [one for one in optimizers if has_eval_weights(one)]
    trained = [parameter for one in switched for group in one.param_groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in trained]
    for one in switched:
        one.eval()
    yield
    for one in switched:
        one.train()
    with torch.no_grad():
        for parameter, value in zip(trained, kept, strict=True):
            parameter.copy_(value)


RATE_KEYS = ("lr_rule", "lr_reference_batch")
"""Keys of the group `optimizer` that are no arguments of a `_target_`."""


def scaled_rate(cfg: DictConfig, rate: Any, global_batch: int) -> Any:
    rule, reference = (cfg.optimizer.get(key) for key in RATE_KEYS)
    if rate is None and reference is not None:
        raise ConfigError(
            f"optimizer.lr_rule={rule} multiplies optimizer.lr, and there is none: give optimizer.lr=<rate>"
        )
    if rule == "linear":
        return rate * global_batch / reference
    return rate * math.sqrt(global_batch / reference) if rule == "sqrt" else rate


def makes_groups(target: str) -> bool:
    taken = parameters(target)
    return "model" in taken and "params" not in taken


def check_groups(
    optimizer: torch.optim.Optimizer, target: str, names: Mapping[nn.Parameter, str], loss: nn.Module | None = None
) -> None:
    # `loss`: one with parameters, which the function was not given.
    given = {one for group in optimizer.param_groups for one in group["params"]}
    left_out = [name for one, name in names.items() if one.requires_grad and one not in given]
    if left_out or given - names.keys():
        what = f"leaves out {shown(left_out, 6)}" if left_out else "has parameters of something else than the model"
        of_loss = loss is not None and any(one.requires_grad and one not in given for one in loss.parameters())
        remedy = "give it an argument `loss`" if of_loss else "to train a part only, give trainer.freeze"
        raise ConfigError(
            f"optimizer._target_={target}: its groups must have all parameters of the model that it is given, each "
            f"once, but it {what}: {remedy}"
        )
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one.requires_grad]


def fused(node: DictConfig, given: Sequence[nn.Parameter], sparse: Collection[Tensor] = ()) -> dict[str, bool]:
    # Torch's own default there, `foreach`, is slower (docs/gpu.md). Parameters of other types or devices than `fused`
    # takes are left to it, and so is what the config says itself.
    key = node._get_full_key(None)
    if node.get("fused") is True and (others := {one.dtype for one in given if not one.is_floating_point()}):
        raise ConfigError(
            f"{key}.fused=true takes parameters of floating-point types, and the model has some of "
            f"{others.pop()}: give {key}.fused=false"
        )
    if weights.are_sharded(given) and node.get("fused") is True and node["_target_"] not in FUSED_SHARDS:
        return {"fused": False}
    chosen = [name for name in sorted(FUSED_OR_NOT) if node.get(name) is True]
    if "fused" in chosen and len(chosen) > 1 and node["_target_"].startswith("torch.optim."):
        raise ConfigError(f"{key}.{chosen[0]}=true: torch takes no fused=true with it: give {key}.fused=false, too")
    can_be = all(one.is_cuda and one.is_floating_point() for one in given) and node["_target_"] in FUSED and not sparse
    return {"fused": True} if can_be and not FUSED_OR_NOT & set(node) else {}


def of_update(node: DictConfig, update: str, key: str) -> DictConfig:
    if "_target_" in node:
        return node
    if update not in node:
        there = ", ".join(str(key) for key in node if key not in RATE_KEYS)
        what = f"has no {update}" if update else "has no _target_, and this task has one update of the whole model"
        raise ConfigError(
            f"{key} {what}: give {key}={{_target_: …}}, or one for each update of the task; it has {there}"
        )
    return node[update]


def schedule(
    cfg: DictConfig, optimizer: torch.optim.Optimizer, total_steps: int, epoch_steps: int = 1, update: str = ""
) -> Any:
    node = of_update(cfg.scheduler, update, "scheduler")
    check_rates(optimizer, node)
    known = {"optimizer": optimizer, "total_steps": total_steps, "epoch_steps": epoch_steps}
    if str(node.get("_target_")).endswith(".ReduceLROnPlateau") and "mode" not in node:  # its value is the objective
        known["mode"] = {"maximize": "max"}.get(cfg.objective.direction, "min")
    built = _with_optimizer(node, known)
    if isinstance(built, ReduceLROnPlateau):  # as all others do: a resume tells the first rate from a reduced one
        keep_first_rates(optimizer.param_groups)
    check_schedule(built, str(node["_target_"]))
    return built


def check_rates(optimizer: torch.optim.Optimizer, node: DictConfig) -> None:
    # An optimizer without a rate finds it itself. A schedule of a library may know that.
    target, warmups = str(node.get("_target_")), [node.get(key) for key in ("warmup_steps", "warmup_epochs")]
    sets_rates = target.startswith(("torch.optim.lr_scheduler.", f"{FactorLR.__module__}."))
    keeps_rates = target == f"{FactorLR.__module__}.{constant.__name__}" and not any(warmups)
    if sets_rates and not keeps_rates and any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigError(
            f"scheduler._target_={target} sets the learning rate, and {type(optimizer).__name__} has none "
            "(optimizer.lr=null): give scheduler=none scheduler.warmup_steps=0, or optimizer.lr=<rate>"
        )


def _with_optimizer(node: DictConfig, known: dict[str, Any]) -> Any:
    taken = parameters(node["_target_"])
    built = {
        str(key): [_with_optimizer(one, known) for one in value]
        if isinstance(value, ListConfig)
        else _with_optimizer(value, known)
        for key, value in node.items()
        if any(_schedules_in(value))
    }
    rest = without(node, built)
    given = {name: value for name, value in known.items() if name in taken and name not in node}
    if "optimizer" in taken:
        return make(rest, **given, **built)
    return make(rest, known["optimizer"], **(given if taken else {"total_steps": known["total_steps"]}), **built)


def _schedules_in(value: Any) -> Iterator[DictConfig]:
    for one in value if isinstance(value, ListConfig) else [value]:
        if isinstance(one, DictConfig) and "_target_" in one and "optimizer" in parameters(one["_target_"]):
            yield one


def check_schedule(scheduler: Any, target: str, nested: bool = False) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) and not nested:
        return
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
        raise ConfigError(
            f"scheduler._target_={target} returned a {type(scheduler).__name__}: return a schedule of "
            "torch.optim.lr_scheduler, or an object with its step(), state_dict() and load_state_dict()"
        )
    if needed := needed_arguments(scheduler.step):
        raise ConfigError(
            f"scheduler._target_={target}: {type(scheduler).__name__}.step() needs {', '.join(needed)}, but a schedule "
            "is stepped without an argument; only ReduceLROnPlateau, by itself, is given the objective's value"
        )
    for one in getattr(scheduler, "_schedulers", ()):
        check_schedule(one, target, nested=True)


def depends_on_length(node: Any) -> bool:
    if isinstance(node, (ListConfig, list)):
        return any(depends_on_length(one) for one in node)
    if not isinstance(node, (DictConfig, dict)):
        return False
    if "_target_" in node:
        taken = parameters(str(node["_target_"]))
        if not taken or ({"total_steps", "epoch_steps"} & set(taken)) - set(node):
            return True
    return any(depends_on_length(value) for value in node.values())
