"""Holds the state of a training run, captures a copy of it, and restores it.

A captured state is a dict of tensors and plain values that `torch.load(weights_only=True)` can read. It holds no state
of random generators: the order of samples, their augmentation and the seed of each step follow from the position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_hydra.config.objective import is_of_machine
from ddp_hydra.errors import CheckpointError
from ddp_hydra.rank.world import World
from ddp_hydra.training import plain_state, sharded_checkpoint
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.parallel import OF_LOSS, Parallel, weights
from ddp_hydra.training.task_state import load_part

FORMAT = 4


@dataclass
class Position:
    """The place that a run has reached.

    Args:
        step: optimizer steps done.
        epoch: epochs completed.
        samples: samples that all ranks together have seen.
        offset: those among them that belong to the epoch under way.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    offset: int = 0

    def advance(self, samples: int) -> None:
        self.step += 1
        self.samples += samples
        self.offset += samples

    def end_epoch(self) -> None:
        self.epoch += 1
        self.offset = 0


@dataclass
class TrainingState:
    """Everything that a checkpoint saves.

    Args:
        optimizer, scheduler: the model's, or several by name; see `together`.
        config: the part of the config that is saved, see `checkpoint_config.stored_config`.
        extras: name -> another object with a state_dict, or None.
        data: describes the training data, see `DataDescription`.
        best: the objective's best value so far.
        validations: validations of the run so far; without a validation set, how many were due.
        validation_due: an epoch has ended, but its validation is still to come.
        batch: the batch that the run has begun with, see `rank_batch.settle`.
        ranks: number of ranks.
        unfrozen: parameters that are trained though they were frozen when the run began; see `setup.Stage`.
        nonfinite: the steps whose loss or gradient was not finite.
        metrics: the last value of each metric. Those of the machine, which differ in equal runs, are not saved.
    """

    parallel: Parallel
    optimizer: Any
    scheduler: Any
    position: Position
    config: dict[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    best: float | None = None
    validations: int = 0
    validation_due: bool = False
    batch: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 1
    unfrozen: list[dict[str, Any]] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checked = -1
        self.infinite = self.parallel.nonfinite_names()

    @property
    def model(self) -> nn.Module:
        return self.parallel.model

    def modules(self) -> list[nn.Module]:
        # All that `restore` loads: the model, its average, a loss, and the task's own.
        ema, loss, task = (self.extras.get(name) for name in ("ema", "loss", "task"))
        own = [*([ema.model] if ema is not None else []), *([loss] if loss is not None else [])]
        return [self.model, *own, *(task.modules.values() if task is not None else ())]

    def gather(self, world: World) -> None:
        # A collective. Rank 0 gets what only the other ranks know.
        for name in ("stream", "callbacks"):
            if (part := self.extras.get(name)) is not None:
                part.gather(world.gather_objects)

    def begin_capture(self, whole: bool = False) -> Callable[[], dict[str, Any]]:
        # If `whole`, a collective where the model is sharded: only rank 0 gets the state.
        return plain_state.begin_copy(self._content(), partial(self.parallel.copy_of, whole=whole))

    def names_of_rank_0(self) -> set[str]:
        # Tensors of which ranks have no shares, but values of their own: buffers between two steps; with local SGD, the
        # optimizer's moments.
        if not all(part.same_gradients for part in self.parallel.parts.values()):
            return set(self._tensors())
        names = self.parallel.buffer_names()
        return {f"{part}.{name}" for part in ("model", "ema.model") for name in names}

    def n_bytes(self) -> int:
        # On all ranks together, each tensor once.
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        ema = self.extras.get("ema")
        content = {"model": self.parallel.state(), "optimizer": self.optimizer_state()}
        content |= {"ema": ema.state_dict()} if ema is not None else {}
        return sharded_checkpoint.taken_apart(plain_state.encode(content, copy=lambda tensor, _: tensor))[1]

    def with_parts(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        # A collective. Get what this rank needs of the tensors that are in other files, or with rank 0.
        targets = self.parallel.read_targets(self.extras.get("loss"))
        return sharded_checkpoint.with_parts(content, self.parallel.world, targets)

    def check(self) -> None:
        plain_state.encode(
            self._content(), copy=lambda tensor, name: plain_state.plain_tensor(plain_state.local(tensor), name)
        )

    def check_new(self) -> bool:
        # Optimizers make their states in their first steps. It returns whether there was something new.
        made = sum(len(optimizer.state) for _, optimizer in each(self.optimizer))
        is_new, self.checked = made != self.checked, made
        if is_new:
            self.check()
        return is_new

    def _content(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.extras.items() if part is not None}
        parts = {name: state for name, state in parts.items() if state or name not in ("loss", "task")}
        return {
            "format": FORMAT,
            "model": self.parallel.state(),
            "optimizer": self.optimizer_state(),
            "scheduler": self.scheduler.state_dict(),
            **parts,
            "position": asdict(self.position),
            "best": self.best,
            "validations": self.validations,
            "validation_due": self.validation_due,
            "metrics": {name: value for name, value in self.metrics.items() if not is_of_machine(name)},
            **({"unfrozen": self.unfrozen} if self.unfrozen else {}),
            **({"nonfinite": list(self.nonfinite)} if self.nonfinite else {}),
            **({"base": base} if (base := weights.base_of(self.model)) else {}),
            "config": self.config,
            "data": dict(self.data),
            "batch": dict(self.batch),
            "world_size": self.ranks,
            "torch": str(torch.__version__),
        }

    def optimizer_state(self) -> dict[str, Any]:
        names, by_update = self.parallel.names(self.extras.get("loss")), isinstance(self.optimizer, ByName)
        found = {name: by_names(optimizer, names) for name, optimizer in each(self.optimizer)}
        return found if by_update else found[""]

    def restore(self, content: dict[str, Any], is_own: bool = False) -> None:
        # `is_own`: nothing else uses its tensors.
        self.parallel.load(content)
        averaged, weights_then = content.get("ema"), content["model"]
        # A copy: an optimizer changes the tensors that it is given, and these may lie in a file.
        others = {name: part for name, part in content.items() if name not in ("model", "ema")}
        if not is_own:
            others = plain_state.begin_copy(others, lambda tensor, _: tensor.detach().clone())()
        if averaged:
            averaged = {**averaged, "model": self.parallel.shard_state(averaged["model"])}
        content = plain_state.decode({**others, "ema": averaged})
        try:
            names, saved = self.parallel.names(self.extras.get("loss")), content["optimizer"]
            retyped = {
                one for one, name in names.items() if getattr(weights_then.get(name), "dtype", one.dtype) != one.dtype
            }
            for name, optimizer in each(self.optimizer):
                needed = needed_settings(optimizer)
                numbered = by_numbers(optimizer, names, saved[name] if name else saved)
                numbered = with_unsaved(optimizer, numbered, defaults(optimizer).keys() - needed)
                load_slots(optimizer, self.parallel.shard_slots(optimizer, numbered), retyped)
                for group in optimizer.param_groups:
                    if missing := needed - group.keys():
                        raise ValueError(f"it has no {', '.join(sorted(missing))}")
            self.scheduler.load_state_dict(content["scheduler"])
            for name, part in self.extras.items():
                if part is not None and content.get(name):
                    if name == "loss":
                        load_part(part, name, type(part).__name__, content[name])
                    else:
                        part.load_state_dict(content[name])
            vars(self.position).update(content["position"])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            what = f"the checkpoint does not fit this optimizer and schedule ({reason})"
            raise CheckpointError(f"{what}: resume with the config it was made with") from error
        self.best, self.validations = content["best"], content["validations"]
        self.validation_due, self.unfrozen = content["validation_due"], content.get("unfrozen") or []
        self.nonfinite = content.get("nonfinite") or []
        of_machine = {name: value for name, value in self.metrics.items() if is_of_machine(name)}
        self.metrics = of_machine | content.get("metrics", {})

    def improves_best(self, value: float | None, direction: str) -> bool:
        sign = 1 if direction == "maximize" else -1
        if value is None or value != value or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        return True


class ByName(dict[str, Any]):
    """The optimizers or schedules of several updates, which are saved together."""

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.items():
            if state[name]:  # a scaler that was off has none
                part.load_state_dict(state[name])


def together(parts: dict[str, Any]) -> Any:
    return parts[""] if list(parts) == [""] else ByName(parts)


def each(part: Any) -> Iterable[tuple[str, Any]]:
    return part.items() if isinstance(part, ByName) else [("", part)]


def by_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    # The state as torch's, with names of parameters in place of their numbers, which depend on the order of the groups.
    state, own = optimizer.state_dict(), _own_names(optimizer, names)
    if not _is_by_numbers(state, len(own)):
        return state
    of_parameters = {key for key in state["state"] if type(key) is int and key in range(len(own))}
    slots = {own[key]: slots for key, slots in state["state"].items() if key in of_parameters}
    others = {key: slots for key, slots in state["state"].items() if key not in of_parameters}
    return {
        **state,
        "state": slots,
        **({"others": others} if others else {}),  # under keys of the optimizer's own
        "param_groups": [
            {**group, "params": [own[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def without_loss(state: dict[str, Any]) -> dict[str, Any]:
    # Without what an optimizer has kept of a loss's parameters.
    slots = state.get("state")
    if not isinstance(slots, dict):
        return state
    return {**state, "state": {key: one for key, one in slots.items() if not str(key).startswith(OF_LOSS)}}


def by_numbers(optimizer: Optimizer, names: Mapping[nn.Parameter, str], state: dict[str, Any]) -> dict[str, Any]:
    # The state of `by_names` as this optimizer numbers its parameters. ValueError: it is of others, or of other groups.
    if not _is_by_numbers(optimizer.state_dict(), len(own := _own_names(optimizer, names))):
        return state
    groups = state["param_groups"]
    saved = frozenset[str]().union(*(group["params"] for group in groups))
    if lacking := [name for name in own if name not in saved]:
        raise ValueError(f"it has nothing of {shown(lacking, 6)}")
    if unknown := sorted(saved.difference(own)):
        raise ValueError(f"it trains {shown(unknown, 6)}, too")
    numbers = {name: number for number, name in enumerate(own)}
    left = iter(own)
    here = [list(islice(left, len(group["params"]))) for group in optimizer.param_groups]
    if [frozenset(params) for params in here] != [frozenset(group["params"]) for group in groups]:
        # A schedule knows the groups by their order.
        there = _first(group["params"] for group in groups)
        raise ValueError(f"its groups of parameters begin with {there}, and those here with {_first(here)}")
    fitted = [
        # How an optimizer computes depends on where its parameters are now.
        group
        | {key: own_group[key] for key in ("fused", "foreach") if key in own_group}
        | {"params": [numbers[name] for name in params]}
        for group, own_group, params in zip(groups, optimizer.param_groups, here, strict=True)
    ]
    slots = {numbers[name]: slots for name, slots in state["state"].items()} | state.get("others", {})
    return {key: part for key, part in state.items() if key != "others"} | {"state": slots, "param_groups": fitted}


def needed_settings(optimizer: Optimizer) -> set[str]:
    # Torch adds to the defaults, and an optimizer may save some of its settings only.
    state, own = optimizer.state_dict(), optimizer.param_groups
    groups = state["param_groups"] if _is_by_numbers(state, sum(len(group["params"]) for group in own)) else own
    return defaults(optimizer).keys() & own[0].keys() & groups[0].keys()


def with_unsaved(optimizer: Optimizer, state: dict[str, Any], keys: Set[str]) -> dict[str, Any]:
    # With the settings that the optimizer does not save, as it was built with them.
    own, groups = optimizer.param_groups, state.get("param_groups")
    if not keys or not isinstance(groups, list) or len(groups) != len(own):
        return state
    found = [{key: group[key] for key in keys & group.keys()} | then for group, then in zip(own, groups, strict=True)]
    return {**state, "param_groups": found}


def defaults(optimizer: Optimizer) -> dict[str, Any]:
    # One that wraps another, as schedulefree's, may have none.
    return getattr(optimizer, "defaults", {})


def load_slots(optimizer: Optimizer, state: dict[str, Any], retyped: Container[nn.Parameter]) -> None:
    # torch gives what it loads the type of its parameter. What the optimizer kept in another one, as moments of 32 bits
    # of parameters of 16, gets that again. Torch makes something else of texts and deques, too, and refuses arrays.
    # retyped: parameters that have another type than in the checkpoint.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict or not _is_by_numbers(state, len(parameters)):
        optimizer.load_state_dict(state)
        return
    saved: dict[int, dict[str, Any]] = {}

    def hide(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        slots_of = {number: given["state"].get(number) for number in range(len(parameters))}
        saved.update({number: slots for number, slots in slots_of.items() if isinstance(slots, dict)})
        taken = {number: {name: _for_torch(slot) for name, slot in slots.items()} for number, slots in saved.items()}
        return {**given, "state": given["state"] | taken}

    def repair(made: dict[str, Any]) -> None:
        _repair(made["state"], {parameters[number]: slots for number, slots in saved.items()}, retyped)
        type(optimizer).__setstate__(optimizer, made)

    # The optimizer's own hooks and __setstate__ see what was saved: those before this one, these after the repair.
    hook = optimizer.register_load_state_dict_pre_hook(hide)
    vars(optimizer)["__setstate__"] = repair
    try:
        optimizer.load_state_dict(state)
    finally:
        vars(optimizer).pop("__setstate__", None)
        hook.remove()


def _repair(
    state: dict[Any, Any], saved: Mapping[nn.Parameter, dict[str, Any]], retyped: Container[nn.Parameter]
) -> None:
    made: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
    for parameter, slots in saved.items():
        if isinstance(loaded := state.get(parameter), dict):
            repair = _Repair(parameter, parameter in retyped, made)
            for name, slot in slots.items():
                # `step` has the type that this optimizer needs now.
                is_count = name == "step" and isinstance(slot, Tensor)
                loaded[name] = (repair.one if is_count else repair.value)(loaded[name], slot)
            if type(slots) is not dict:
                state[parameter] = _of_type(slots, loaded)


class _AsSaved:
    """Stands for a value that torch would take for a sequence of tensors, whatever it is."""


def _for_torch(value: Any) -> Any:
    if type(value) is dict:
        return {name: _for_torch(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_for_torch, value))
    return _AsSaved() if isinstance(value, Iterable) and not isinstance(value, Tensor) else value


@dataclass
class _Repair:
    """Makes of what torch has loaded for a parameter what was saved.

    Args:
        made: saved tensors, and what they are now: one that lies at several places is one tensor again.
    """

    parameter: nn.Parameter
    is_retyped: bool
    made: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]]

    def value(self, loaded: Any, saved: Any) -> Any:
        if isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype:
            loaded = loaded if self.is_retyped else saved.to(loaded.device)
        if isinstance(loaded, dict) and isinstance(saved, dict):
            return {name: self.value(value, saved.get(name)) for name, value in loaded.items()}
        if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
            return type(loaded)(map(self.value, loaded, saved))
        return self.one(loaded, saved)

    def one(self, loaded: Any, saved: Any) -> Any:
        if isinstance(loaded, _AsSaved):
            return plain_state.decode(plain_state.encode(saved, copy=self._placed))
        if not isinstance(loaded, Tensor) or not isinstance(saved, Tensor):
            return loaded
        return self.made.setdefault((id(saved), loaded.dtype, loaded.device), (saved, loaded))[1]

    def _placed(self, saved: Tensor, _: str) -> Tensor:
        of_parameter = self.is_retyped and self.parameter.is_floating_point()
        dtype = self.parameter.dtype if of_parameter else saved.dtype
        moved: Tensor = self.one(saved.to(self.parameter.device, dtype), saved)
        return moved


def _of_type(saved: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    # Torch makes plain dicts of others, such as defaultdicts.
    found = copy.copy(saved)
    found.clear()
    found.update(loaded)
    return found


def _first(groups: Iterable[Sequence[str]]) -> str:
    return shown([params[0] if params else "nothing" for params in groups], 6)


def _own_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [names.get(parameter, f"parameter {number}") for number, parameter in enumerate(parameters)]


def _is_by_numbers(state: Mapping[str, Any], n_parameters: int) -> bool:
    # An optimizer of another library may have a layout of its own.
    if not {"state", "param_groups"} <= state.keys():
        return False
    numbers = [number for group in state["param_groups"] for number in group.get("params", ())]
    return numbers == list(range(n_parameters))
