"""What checkpoints keep of a task: what it says itself, and what its own modules have become while training."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_hydra import results
from ddp_hydra.errors import CheckpointError
from ddp_hydra.rank.world import dense
from ddp_hydra.tasks import Task
from ddp_hydra.training.builders import loss_state
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.plain_state import is_wrapped

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size: the types as which the numbers of any type are added up."""
_AT_ONCE = 2**18
"""The most numbers that are weighed at once: the products stay in a CPU's cache."""
_OF_PARTS = 0x5851F42D4C957F2D
"""Odd factor that tells the parts of a tensor apart."""


class TaskState:
    """The state of a task: its own, of each module that has changed since it was built, of other parts with a state.

    A module that has not changed, as a frozen teacher, is neither saved nor copied.

    Args:
        make: builds the task, with the same values each time.
    """

    def __init__(self, make: Callable[[], Task]) -> None:
        self.make, self.task = make, make()
        loss = loss_state(self.task)
        own = {name: part for name, part in vars(self.task).items() if has_state(part) and part is not loss}
        modules = {name: part for name, part in own.items() if isinstance(part, nn.Module)}
        tensors = {name: found for name, part in modules.items() if (found := weights.tensors_of(part))}
        self.built = {name: checksum(found) for name, found in tensors.items()}
        self.parts = {name: part for name, part in own.items() if name in tensors or name not in modules}
        self.tells_own = type(self.task).state_dict is not Task.state_dict
        self.values: dict[str, Any] = {}
        self.told: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        own = self.task.state_dict()
        parts = {name: part.state_dict() if self._is_saved(name) else None for name, part in self.parts.items()}
        return {"own": own, "parts": parts}

    def _is_saved(self, name: str) -> bool:
        # Not by `Tensor._version`, which does not count what is written through `.data`.
        return name not in self.built or checksum(weights.tensors_of(self.parts[name])) != self.built[name]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            saved = state["parts"].get(name)
            if saved is None and name in self.built and self._is_saved(name):  # it has changed since that checkpoint
                saved = vars(self.make())[name].state_dict()
            if saved is not None:
                self._load(part, f".{name}", saved)
        if state["own"]:
            self._load(self.task, "", state["own"])

    def _load(self, part: Any, name: str, saved: Any) -> None:
        try:
            part.load_state_dict(saved)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(
                f"{type(self.task).__name__}{name} does not take its state of the checkpoint ({reason}): resume with "
                "the task that the run was made with"
            ) from error

    def tell_unsaved(self) -> None:
        # The first call is after a step: what the first steps set for good, as a mask, begins alike in a resumed run.
        for name, value, advice in self._unsaved():
            is_new_module = value is None
            if (is_new_module or self.values.setdefault(name, value) != value) and name not in self.told:
                self.told.add(name)
                what = "is made" if is_new_module else "changes"
                results.warn(f"{name} {what} while training, and a resumed run would begin it anew: {advice}")

    def _unsaved(self) -> Iterator[tuple[str, Any, str]]:
        # Names of what no checkpoint has, their fingerprints (None: a module that a step has made), and what to do.
        task, criterion = self.task, getattr(self.task, "criterion", None)
        pair, kind = "state_dict() and load_state_dict(state)", type(task).__name__
        for name, value in vars(task).items() if not self.tells_own else ():
            if name in self.parts or value is criterion:
                continue
            if isinstance(value, nn.Module) and weights.tensors_of(value):
                yield f"{kind}.{name}", None, f"make it in __init__ or in the model, or define {kind}.{pair}"
            elif (found := fingerprint(value)) is not None:
                yield f"{kind}.{name}", found, f"define {kind}.{pair}"
        kind, is_saved = type(criterion).__name__, has_state(criterion)
        if isinstance(criterion, nn.Module):
            pair = "get_extra_state() and set_extra_state(state), or make it a buffer"
            is_saved = type(criterion).get_extra_state is not nn.Module.get_extra_state
        for name, value in getattr(criterion, "__dict__", {}).items() if not is_saved else ():
            if name not in _OF_MODULES and (found := fingerprint(value)) is not None:
                yield f"{kind}.{name}", found, f"define {kind}.{pair}"


_OF_MODULES = vars(nn.Module()).keys()


def has_state(part: Any) -> bool:
    methods = (getattr(part, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(part, type) and all(map(callable, methods))


def fingerprint(value: Any) -> Any:
    # Of a value that a resumed task may need; None for others.
    if isinstance(value, Tensor):
        return checksum([value])
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if isinstance(value, list | dict | set | deque):
        return len(value)
    return repr(value) if isinstance(value, int | float | complex | str | np.generic) else None


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> list[Any]:
    # Another one when a number has changed, or its position. The tensors are neither copied nor sent from a GPU.
    sums: list[Tensor] = []
    layouts: list[Any] = []
    for tensor in tensors:
        is_strided = tensor.layout is torch.strided and not (is_wrapped(tensor) or tensor.is_quantized)
        if tensor.is_meta or not is_strided:
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
