"""Holds the state of a training run, captures a copy of it, and restores it.

A captured state is a dict of tensors and plain values that `torch.load(weights_only=True)` can read. It holds no state
of random generators: the order of samples, their augmentation and the seed of each step follow from the position.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank.world import World
from ddp_hydra.training import plain_state
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.finite import STATISTICS, is_finite

FORMAT = 4
SHOWN = 6
"""The most parameters in a message."""
_OWN_KEYS = ("state", "param_groups", "others")


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
        model: the model, not wrapped in DDP.
        optimizer: its optimizer, or several by name; see `together`.
        scheduler: its learning-rate schedule, or several by name.
        position: the place that the run has reached.
        config: the part of the config that is saved, see `checkpoint_config.stored_config`.
        extras: name -> another object with a state_dict, or None.
        data: describes the training data, see `DataDescription`.
        best: the objective's best value so far.
        validations: validations of the run so far; without a validation set, how many were due.
        validation_due: an epoch has ended, but its validation is still to come.
        ranks: number of ranks.
        unfrozen: parameters that are trained though they were frozen when the run began; see `setup.Stage`.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    position: Position
    config: dict[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    best: float | None = None
    validations: int = 0
    validation_due: bool = False
    ranks: int = 1
    unfrozen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = self.model.named_parameters(remove_duplicate=False)
        self.infinite = [name for name, parameter in named if not is_finite(parameter)]

    def gather(self, world: World) -> None:
        # A collective. Rank 0 gets what only the other ranks know.
        for name in ("stream", "callbacks"):
            if (part := self.extras.get(name)) is not None:
                part.gather(world.gather_objects)

    def begin_capture(self) -> Callable[[], dict[str, Any]]:
        return plain_state.begin_copy(self._content())

    def check(self) -> None:
        plain_state.encode(self._content())

    def _content(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.extras.items() if part is not None}
        return {
            "format": FORMAT,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer_state(),
            "scheduler": self.scheduler.state_dict(),
            **parts,
            "position": asdict(self.position),
            "best": self.best,
            "validations": self.validations,
            "validation_due": self.validation_due,
            **({"unfrozen": self.unfrozen} if self.unfrozen else {}),
            "config": self.config,
            "data": dict(self.data),
            "world_size": self.ranks,
            "torch": str(torch.__version__),
        }

    def optimizer_state(self) -> dict[str, Any]:
        names, by_update = self._names(), isinstance(self.optimizer, ByName)
        found = {name: by_names(optimizer, names) for name, optimizer in each(self.optimizer)}
        return found if by_update else found[""]

    def _names(self) -> dict[nn.Parameter, str]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        if (loss := self.extras.get("loss")) is not None:
            for name, parameter in loss.named_parameters():
                names.setdefault(parameter, f"loss: {name}")  # no name of a model's
        return names

    def restore(self, content: dict[str, Any]) -> None:
        load_weights(self.model, content)
        averaged = content.get("ema")
        # A copy: an optimizer changes the tensors that it is given, and these may lie in a file.
        copied = plain_state.begin_copy({name: part for name, part in content.items() if name not in ("model", "ema")})
        content = plain_state.decode({**copied(), "ema": averaged})
        # What each group has to have: torch adds options to the defaults when it loads a state.
        needed = {
            name: optimizer.defaults.keys() & optimizer.param_groups[0].keys()
            for name, optimizer in each(self.optimizer)
        }
        try:
            names, saved = self._names(), content["optimizer"]
            for name, optimizer in each(self.optimizer):
                optimizer.load_state_dict(by_numbers(optimizer, names, saved[name] if name else saved))
            self.scheduler.load_state_dict(content["scheduler"])
            for name, part in self.extras.items():
                if part is not None and content.get(name):
                    part.load_state_dict(content[name])
            vars(self.position).update(asdict(Position(**content["position"])))
            for name, optimizer in each(self.optimizer):
                for group in optimizer.param_groups:
                    if missing := needed[name] - group.keys():
                        raise ValueError(f"it has no {', '.join(sorted(missing))}")
        except (KeyError, TypeError, ValueError) as error:
            what = f"the checkpoint does not fit this optimizer and schedule ({error})"
            raise CheckpointError(f"{what}: resume with the config it was made with") from error
        self.best = content.get("best")
        self.validations = int(content.get("validations") or 0)
        self.validation_due = bool(content.get("validation_due"))
        self.unfrozen = list(content.get("unfrozen") or [])

    def improves_best(self, value: float | None, direction: str) -> bool:
        if value is None or value != value:
            return False
        sign = 1 if direction == "maximize" else -1
        if self.best is not None and sign * value <= sign * self.best:
            return False
        self.best = value
        return True


class ByName(dict[str, Any]):
    """The optimizers or schedules of several updates, which are saved together."""

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.items():
            part.load_state_dict(state[name])


def together(parts: dict[str, Any]) -> Any:
    return parts[""] if list(parts) == [""] else ByName(parts)


def each(part: Any) -> Iterable[tuple[str, Any]]:
    return part.items() if isinstance(part, ByName) else [("", part)]


def by_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """Return an optimizer's state as torch's, with names of parameters in place of their numbers.

    Numbers depend on the order of the groups, and say nothing of the model.
    """
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


def by_numbers(optimizer: Optimizer, names: Mapping[nn.Parameter, str], state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of `by_names` as this optimizer numbers its parameters.

    Raises:
        ValueError: it is of other parameters, or its groups are others.
    """
    if not _is_by_numbers(optimizer.state_dict(), len(own := _own_names(optimizer, names))):
        return state
    groups = state["param_groups"]
    saved = frozenset[str]().union(*(group["params"] for group in groups))
    if lacking := [name for name in own if name not in saved]:
        raise ValueError(f"it has nothing of {shown(lacking, SHOWN)}")
    if unknown := sorted(saved.difference(own)):
        raise ValueError(f"it trains {shown(unknown, SHOWN)}, too")
    numbers = {name: number for number, name in enumerate(own)}
    left = iter(own)
    here = [list(islice(left, len(group["params"]))) for group in optimizer.param_groups]
    if [frozenset(params) for params in here] != [frozenset(group["params"]) for group in groups]:
        # A schedule knows the groups by their order.
        there = _first(group["params"] for group in groups)
        raise ValueError(f"its groups of parameters begin with {there}, and those here with {_first(here)}")
    fitted = [
        {**group, "params": [numbers[name] for name in params]} for group, params in zip(groups, here, strict=True)
    ]
    slots = {numbers[name]: slots for name, slots in state["state"].items()} | state.get("others", {})
    return {"state": slots, "param_groups": fitted, **{key: state[key] for key in state if key not in _OWN_KEYS}}


def _first(groups: Iterable[Sequence[str]]) -> str:
    return shown([params[0] if params else "nothing" for params in groups], SHOWN)


def _own_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [names.get(parameter, f"parameter {number}") for number, parameter in enumerate(parameters)]


def _is_by_numbers(state: Mapping[str, Any], n_parameters: int) -> bool:
    # An optimizer of another library may have a layout of its own.
    if not {"state", "param_groups"} <= state.keys():
        return False
    numbers = [number for group in state["param_groups"] for number in group.get("params", ())]
    return numbers == list(range(n_parameters))


def load_weights(model: nn.Module, content: dict[str, Any]) -> None:
    try:
        load_copied(model, content["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        lines = str(error).splitlines()
        raise CheckpointError(
            f"the checkpoint is not of this model: {' '.join(line.strip() for line in lines[:3])[:300]}"
        ) from None


def load_copied(model: nn.Module, state: Mapping[str, Any]) -> None:
    # Parameters and buffers are copied by torch; what `set_extra_state` gets may be kept, so it is a copy, too.
    copied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    copied |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if not isinstance(state, Mapping):
        raise TypeError(f"it has a {type(state).__name__} in place of a model's state")
    decoded = plain_state.decode(state)
    for name, value in state.items():
        if name not in copied:
            decoded[name] = plain_state.decode(plain_state.begin_copy(value)())
    model.load_state_dict(decoded)


class Ema:
    """An exponential moving average, which warms up (Polyak and Juditsky, 1992).

    Args:
        model: its weights and buffers are averaged.
        decay: the share of the average that a step keeps, at most; at first it is (1 + steps) / (10 + steps).

    Attributes:
        model: the average, a copy of the model.
        steps: number of updates. It is not a tensor as in `torch.optim.swa_utils.AveragedModel`, because reading one
            from a GPU waits for the GPU.
        with_extra_state: modules of the average, by name, whose `get_extra_state` is taken from the model at each step.
        infinite: names of parameters that held infinite values from the beginning, as masks do.

    Raises:
        ConfigError: the model can't be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model: nn.Module = _copied(model).requires_grad_(False)
        self.steps = 0
        self.with_extra_state = [
            (name, module)
            for name, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        self.infinite = {name for name, value in model.named_parameters() if not is_finite(value)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for (_, kind), (averaged, current) in self._by_type(model).items():
            if not self.steps or kind == "copied":
                torch._foreach_copy_(averaged, current)
            elif kind == "averaged":
                torch._foreach_lerp_(averaged, current, weight)
            else:
                for old, new in zip(averaged, current, strict=True):  # an infinite value has no average
                    old.copy_(torch.where(old.isfinite(), torch.lerp(old, new, weight), new))
        for name, module in self.with_extra_state:
            module.set_extra_state(copy.deepcopy(model.get_submodule(name).get_extra_state()))
        self.steps += 1

    def _by_type(
        self, model: nn.Module
    ) -> dict[tuple[torch.dtype, str], tuple[list[torch.Tensor], list[torch.Tensor]]]:
        groups: dict[tuple[torch.dtype, str], tuple[list[torch.Tensor], list[torch.Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for averaged, (name, current, is_buffer) in zip(_tensors(self.model), _tensors(model), strict=True):
            group = groups[current.dtype, self._kind(name, current, is_buffer)]
            group[0].append(averaged[1])
            group[1].append(current)
        return groups

    def _kind(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> str:
        is_number = (tensor.is_floating_point() and tensor.itemsize > 1) or tensor.is_complex()
        if not is_number or tensor.layout != torch.strided:
            return "copied"
        may_be_infinite = name in self.infinite or (is_buffer and name.rpartition(".")[2] not in STATISTICS)
        return "watched" if may_be_infinite else "averaged"

    def state_dict(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        load_copied(self.model, state["model"])  # type: ignore[arg-type]
        self.steps = int(state["steps"])  # type: ignore[call-overload]


def _copied(model: nn.Module) -> nn.Module:
    # A tensor that a layer has computed is no leaf, as in torch's first `weight_norm`, and can't copy itself.
    values = (value for module in model.modules() for value in vars(module).values())
    computed = {id(one): one.detach().clone() for one in values if isinstance(one, torch.Tensor) and not one.is_leaf}
    try:
        return copy.deepcopy(model, computed)
    except Exception as error:  # a lock, an open file
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"trainer.ema_decay needs a copy of the model, and {type(model).__name__} can't be copied "
            f"({type(error).__name__}: {reason:.160}): give trainer.ema_decay=null"
        ) from error


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    yield from ((name, parameter, False) for name, parameter in model.named_parameters())
    yield from ((name, buffer, True) for name, buffer in model.named_buffers())
