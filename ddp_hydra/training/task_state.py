"""What checkpoints keep of a task: what it says itself, and what its own modules have become while training."""

from __future__ import annotations

import contextlib
import functools
import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_hydra import results
from ddp_hydra.errors import CheckpointError
from ddp_hydra.rank.world import dense
from ddp_hydra.tasks import Task
from ddp_hydra.training import plain_state
from ddp_hydra.training.finite import STATISTICS, is_finite
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.plain_state import is_wrapped
from ddp_hydra.training.train_step import OF_MODULES, attributes_of, loss_module

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size: the types as which the numbers of any type are added up."""
_OF_AN_END = 32
"""Entries of a long collection that are looked at, at each end."""
_DEPTH = 3
"""Collections in each other that are looked into."""
_GENERATORS: dict[type, Callable[[Any], bytes]] = {
    torch.Generator: lambda one: one.get_state().numpy().tobytes(),
    np.random.Generator: lambda one: repr(one.bit_generator.state).encode(),
    np.random.RandomState: lambda one: repr(one.get_state(legacy=False)).encode(),
    random.Random: lambda one: repr(one.getstate()).encode(),
}
"""Random generators, with their states as bytes."""
_AT_ONCE = 2**18
"""The most numbers that are weighed at once: the products stay in a CPU's cache."""
_OF_PARTS = 0x5851F42D4C957F2D
"""Odd factor that tells the parts of a tensor apart."""


class TaskState:
    """The state of a task: its own, of each module that has changed since it was built, of other parts with a state.

    A module that has not changed, as a frozen teacher, is neither saved nor copied.

    Args:
        make: builds the task, with the same values each time.

    Attributes:
        built: checksums of the modules as they were built.
        built_loss: a checksum of the loss's parameters that no optimizer trains.
        infinite: names of tensors that held infinite values then, as masks do.
    """

    def __init__(self, make: Callable[[], Task]) -> None:
        self.make, self.task = make, make()
        loss = loss_module(self.task)
        own = attributes_of(self.task).items()
        self.parts = {name: part for name, part in own if has_state(part) and part is not loss}
        self.built = {name: checksum_of(part) for name, part in self.modules.items()}
        self.built_loss = checksum(frozen_of_loss(self.task).values())
        self.infinite = {name for name, one in self.named_weights() if not is_finite(one)}
        self.tells_own = getattr(self.task.state_dict, "__func__", None) is not Task.state_dict
        self.values: dict[str, Any] = {}
        self.told: set[str] = set()

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: part for name, part in self.parts.items() if isinstance(part, nn.Module)}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        # Parameters and statistics of the modules. Other buffers may be infinite on purpose.
        for name, part in self.modules.items():
            named = (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False))
            parameters = set(part.parameters())
            for key, one in named:
                if one in parameters or key.rpartition(".")[2] in STATISTICS:
                    yield f"task.{name}.{key}", one

    def checked_names(self) -> set[str]:
        return {name for name, _ in self.named_weights()} - self.infinite

    def state_dict(self) -> dict[str, Any]:
        # Empty, where the task has nothing to save.
        own = self.task.state_dict() if self.tells_own else None
        found = {name: part.state_dict() for name, part in self.parts.items()}
        parts = {
            name: state if self._is_saved(name) else None
            for name, state in found.items()
            if state or name not in self.built
        }
        return {"own": own, "parts": parts} if self.tells_own or parts else {}

    def _is_saved(self, name: str) -> bool:
        # Not by `Tensor._version`, which does not count what is written through `.data`.
        return name not in self.built or checksum_of(self.parts[name]) != self.built[name]

    def changed(self) -> set[str]:
        # Names of the modules that steps write, as a teacher.
        return {name for name in self.built if self._is_saved(name)}

    def parameters_of(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [one for name in names for one in self.modules[name].parameters()]

    def moved_of_loss(self) -> list[nn.Parameter]:
        # What steps write in a loss and no optimizer trains, as a center: none of a frozen network.
        frozen = list(frozen_of_loss(self.task).values())
        return frozen if checksum(frozen) != self.built_loss else []

    def build_loss_again(self) -> None:
        made = frozen_of_loss(self.make())
        for name, one in frozen_of_loss(self.task).items():
            one.copy_(made[name])

    def build_again(self, names: Collection[str]) -> None:
        made = attributes_of(self.make()) if names else {}
        for name in names:
            load_part(self.parts[name], "task", f"{type(self.task).__name__}.{name}", made[name].state_dict())

    def copy_rest(self, moving: Collection[str]) -> Callable[[], dict[str, str]]:
        # Copy what the task and its loss keep outside of their modules' tensors. The function puts it back, and returns
        # `refusals`. Of modules that steps do not write, nothing is copied.
        kind = type(self.task).__name__
        owners: dict[str, Any] = {kind: self.task} if self.tells_own else {}
        owners |= {f"{kind}.{name}": part for name, part in self.parts.items() if name not in self.built}
        clone = plain_state.once(lambda tensor, _: tensor.detach().clone(), {})
        copied = plain_state.encode({name: one.state_dict() for name, one in owners.items()}, "task", clone)
        extra: dict[nn.Module, Any] = {}
        loss = loss_module(self.task)
        for part in (*([loss] if loss is not None else []), *(self.modules[name] for name in moving)):
            for module in with_extra_state(part):
                with contextlib.suppress(CheckpointError):  # a checkpoint can't hold it either, and says so
                    extra[module] = plain_state.encode(module.get_extra_state(), copy=clone)

        def put_back() -> dict[str, str]:
            states = plain_state.decode(copied)
            for name, state in states.items():
                if state:
                    owners[name].load_state_dict(state)
            for module, state in extra.items():
                module.set_extra_state(plain_state.decode(state))
            return refusals({name: owners[name] for name, state in states.items() if not state})

        return put_back

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        given = {name: saved for name, saved in state["parts"].items() if saved is not None and name in self.parts}
        given = {name: saved for name, saved in given.items() if saved or name in self.built}
        self.build_again(self.changed() - given.keys())  # they have changed since that checkpoint
        for name, saved in given.items():
            load_part(self.parts[name], "task", f"{type(self.task).__name__}.{name}", saved)
        if own := state["own"]:
            load_part(self.task, "task", type(self.task).__name__, own)

    def empty(self, state: Mapping[str, Any]) -> dict[str, str]:
        # Go back to the empty states of the task's own, and of its parts that are no modules.
        kind = type(self.task).__name__
        owners = {kind: self.task} if self.tells_own and not state["own"] else {}
        empty = [name for name, saved in state["parts"].items() if not saved and name not in self.built]
        return refusals(owners | {f"{kind}.{name}": self.parts[name] for name in empty})

    def tell_unsaved(self, *modules: nn.Module) -> None:
        # Checkpoints have the modules, as the trained model, also where the task holds them. The first call is after a
        # step: what the first steps set for good, as a mask, begins alike in a resumed run.
        for name, value, advice in self._unsaved({one for module in modules for one in module.parameters()}):
            is_new_module = value is None
            if (is_new_module or self.values.setdefault(name, value) != value) and name not in self.told:
                self.told.add(name)
                what = "is made" if is_new_module else "changes"
                results.warn(f"{name} {what} while training, and a resumed run would begin it anew: {advice}")

    def _unsaved(self, saved: Collection[Tensor]) -> Iterator[tuple[str, Any, str]]:
        # Names of what no checkpoint has, their fingerprints (None: a module that a step has made), and what to do.
        task, criterion = self.task, getattr(self.task, "criterion", None)
        pair, kind = "state_dict() and load_state_dict(state)", type(task).__name__
        for name, value in attributes_of(task).items() if not self.tells_own else ():
            if name in self.parts or value is criterion or is_saved_in(saved, value):
                continue
            if isinstance(value, nn.Module) and weights.tensors_of(value):
                yield f"{kind}.{name}", None, f"make it in __init__ or in the model, or define {kind}.{pair}"
            elif (found := noticed(value, saved)) is not None:
                entries = value.values() if isinstance(value, dict) else value
                holds_modules = isinstance(value, list | tuple | dict) and any(
                    isinstance(one, nn.Module) and not is_saved_in(saved, one) for one in entries
                )
                instead = f"make it an nn.Module{'Dict' if isinstance(value, dict) else 'List'}, or "
                yield f"{kind}.{name}", found, f"{instead if holds_modules else ''}define {kind}.{pair}"
        kind, is_saved = type(criterion).__name__, has_state(criterion)
        if isinstance(criterion, nn.Module):
            pair = "get_extra_state() and set_extra_state(state), or make it a buffer"
            is_saved = type(criterion).get_extra_state is not nn.Module.get_extra_state
        for name, value in getattr(criterion, "__dict__", {}).items() if not is_saved else ():
            if name not in OF_MODULES and (found := noticed(value, saved)) is not None:
                yield f"{kind}.{name}", found, f"define {kind}.{pair}"


def frozen_of_loss(task: Task) -> dict[str, nn.Parameter]:
    loss = loss_module(task)
    named = loss.named_parameters() if loss is not None else ()
    return {name: one for name, one in named if not one.requires_grad}


def has_state(part: Any) -> bool:
    methods = (getattr(part, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(part, type) and all(map(callable, methods))


def is_saved_in(saved: Collection[Tensor], value: Any) -> bool:
    # Whether it is one of these parameters, or a module of them.
    own = list(value.parameters()) if isinstance(value, nn.Module) else [value]
    return bool(own) and all(isinstance(one, Tensor) and one in saved for one in own)


def noticed(value: Any, saved: Collection[Tensor]) -> Any:
    # A fingerprint for a warning, which ends no run: None for a value that has none, as an array without memory.
    try:
        return fingerprint(value, saved)
    except Exception:
        return None


def fingerprint(value: Any, saved: Collection[Tensor] = (), depth: int = 0) -> Any:
    # Of a value that a resumed task may need; None for others. Of long collections, it looks at both ends.
    if saved and is_saved_in(saved, value):
        return None
    if isinstance(value, Tensor):
        return checksum([value])
    if isinstance(value, nn.Module):
        return checksum_of(value)
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if isinstance(value, list | tuple | dict | set | deque):
        entries = list(value.items() if isinstance(value, dict) else value)
        ends = entries if len(entries) <= 2 * _OF_AN_END else entries[:_OF_AN_END] + entries[-_OF_AN_END:]
        return [len(entries), *(fingerprint(one, saved, depth + 1) for one in ends if depth < _DEPTH)]
    for kind, state_of in _GENERATORS.items():
        if isinstance(value, kind):
            return zlib.crc32(state_of(value))
    return repr(value) if isinstance(value, int | float | complex | str | bytes | np.generic) else None


def load_part(part: Any, group: str, name: str, saved: Any) -> None:
    # Raise CheckpointError, if a loss or a part of a task does not take what was saved of it.
    try:
        part.load_state_dict(saved)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"{name} does not take its state of the checkpoint"
        if isinstance(part, nn.Module) and (late := weights.late_buffer(part, saved)):
            raise CheckpointError(f"{what}: {late}") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"{what} ({reason}): resume with the {group} that the run was made with") from error


def refusals(parts: Mapping[str, Any]) -> dict[str, str]:
    # Give these parts an empty state. Return why a part does not take it, by its name.
    found: dict[str, str] = {}
    for name, part in parts.items():
        if part.state_dict():
            try:
                part.load_state_dict({})
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                found[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return found


def with_extra_state(part: nn.Module) -> list[nn.Module]:
    return [module for _, module in weights.with_extra_state(part)]


def checksum_of(part: nn.Module) -> list[Any]:
    extra = [fingerprint(one.get_extra_state()) for one in with_extra_state(part)]
    return [*checksum(weights.tensors_of(part)), extra]


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> list[Any]:
    # Another one when a number has changed, or its position. The tensors are neither copied nor sent from a GPU.
    sums: list[Tensor] = []
    layouts: list[Any] = []
    for tensor in tensors:
        is_strided = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
        if is_lazy(tensor) or is_wrapped(tensor) or tensor.is_meta or not is_strided:
            layouts.append(tensor._version)
            continue
        found = dense(tensor.detach())
        layouts.append((tuple(found.shape), found.stride()))
        flat = found.as_strided((found.numel(),), (1,))
        sums.append(_weighed_sum(flat.view(_INTEGERS.get(flat.itemsize, torch.uint8))))
    devices = dict.fromkeys(one.device for one in sums)
    return [layouts, *(torch.stack([one for one in sums if one.device == device]).tolist() for device in devices)]


def _weighed_sum(numbers: Tensor) -> Tensor:
    # Modulo 2^64: an odd weight loses no bit of a number. Random weights tell positions apart.
    weights_of, total = _odd_weights(numbers.device), torch.zeros((), dtype=torch.int64, device=numbers.device)
    for part in numbers.split(_AT_ONCE):
        total = total * _OF_PARTS + (part * weights_of[: len(part)]).sum()
    return total


@functools.cache
def _odd_weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_AT_ONCE,), generator=generator).bitwise_or(1).to(device)
