"""Turns the values of a state into those that `torch.load(weights_only=True)` reads, and back; copies a state.

A value of another type is saved as a dict with the key `KIND`. A type that is not known here is refused by its name.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from ddp_hydra.errors import CheckpointError

KIND = "ddp_hydra_kind"
"""Key of the dict that stands for a value of another type."""

_AS_THEY_ARE = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.Size)
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_FACTORIES = {kind.__name__: kind for kind in (int, float, complex, bool, str, list, dict, set, tuple)}
_BY_ARGUMENTS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, lambda v: v.decode("latin-1"), lambda v: v.encode("latin-1")),  # weights_only reads no empty ones
    "bytearray": (bytearray, bytes, bytearray),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], lambda v: slice(*v)),
    "deque": (collections.deque, lambda v: [list(v), v.maxlen], lambda v: collections.deque(v[0], v[1])),
    "datetime": (datetime.datetime, lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda v: v.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: v.isoformat(), datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: datetime.timedelta(*v),
    ),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "uuid": (uuid.UUID, str, uuid.UUID),
}
_PATHS = {kind.__name__: kind for kind in (pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def encode(value: Any, name: str = "", copy: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return copy(_plain_tensor(value, name))
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        return _encoded_dict(value, name, copy)
    if type(value) in _SEQUENCES:
        return type(value)(encode(part, f"{name}[{number}]", copy) for number, part in enumerate(value))
    if isinstance(value, (np.float64, np.int64, np.bool_)) and name.startswith(("optimizer", "scheduler")):
        return value.item()  # a number that other programs read, and that torch computes with alike
    if isinstance(value, (DictConfig, ListConfig)):
        return encode(OmegaConf.to_container(value, resolve=True), name, copy)
    kind, inner = _described(value, name)
    return {KIND: kind, "value": encode(inner, name, copy)}


def _encoded_dict(value: Any, name: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    items = ((encode(key, f"{name}, a key"), encode(part, _inside(name, key), copy)) for key, part in value.items())
    if type(value) is dict:
        return dict(items)
    encoded = type(value)()
    for key, part in items:
        encoded[key] = part
    if metadata := getattr(value, "_metadata", None):  # the versions of a model's layers
        encoded._metadata = encode(metadata, name)
    return encoded


def _inside(name: str, key: Any) -> str:
    return f"{name}: {key}" if name and ":" not in name else f"{name}.{key}" if name else str(key)


def _described(value: Any, name: str) -> tuple[Any, Any]:
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return "numpy", [str(value.dtype), value.item()]
    if isinstance(value, np.generic) and value.dtype.kind in "US":
        return "numpy", [str(value.dtype), value.item()]
    if isinstance(value, np.ndarray) and type(value) is np.ndarray and value.dtype.kind in "biufcUS":
        return "array", [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, enum.Enum):
        return "enum", [_class_name(value), value.name or "", value.value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", [_class_name(value), list(value)]
    if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
        return "tuple", tuple(value)
    if type(value) is collections.defaultdict and (factory := value.default_factory) in (None, *_FACTORIES.values()):
        return "defaultdict", [getattr(factory, "__name__", None), dict(value)]
    if isinstance(value, pathlib.PurePath):
        kind = type(value).__name__ if type(value).__name__ in _PATHS else "Path"
        return "path", [kind, str(value)]
    if isinstance(value, torch.Generator):
        return "generator", [str(value.device), value.get_state()]
    for kind, (of_type, take_apart, _) in _BY_ARGUMENTS.items():
        if type(value) is of_type:
            return kind, take_apart(value)
    of = type(value)
    raise CheckpointError(
        f"{name} is a {of.__module__}.{of.__qualname__}, which a checkpoint can't hold, because nothing in one is "
        "unpickled: save numbers, texts, lists, dicts, tensors or numpy arrays (a state_dict of your own chooses them)"
    )


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _plain_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.detach()
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}, whose numbers lie in tensors of its own: a checkpoint holds plain "
            "tensors; save what it is made of"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def decode(value: Any) -> Any:
    # Classes of enums and namedtuples have to be imported already.
    if isinstance(value, dict):
        if KIND in value:
            return _made(value[KIND], decode(value["value"]))
        decoded: Any = type(value)()
        for key, part in value.items():
            decoded[decode(key)] = decode(part)
        if metadata := getattr(value, "_metadata", None):
            decoded._metadata = metadata
        return decoded
    if type(value) in _SEQUENCES:
        return type(value)(decode(part) for part in value)
    return value


def _made(kind: str, value: Any) -> Any:
    if kind == "numpy":
        return np.dtype(value[0]).type(value[1])
    if kind == "array":
        return np.frombuffer(value[2], np.dtype(value[0])).reshape(value[1]).copy()
    if kind == "enum":
        known = _imported(value[0], enum.Enum)
        return value[2] if known is None else known(value[2])
    if kind == "namedtuple":
        known = _imported(value[0], tuple)
        return tuple(value[1]) if known is None else known._make(value[1])
    if kind == "tuple":
        return value
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(value[0]), value[1])
    if kind == "path":
        return _PATHS[value[0]](value[1])
    if kind == "generator":
        return torch.Generator(value[0]).set_state(value[1])
    if kind in _BY_ARGUMENTS:
        return _BY_ARGUMENTS[kind][2](value)
    raise CheckpointError(f"the checkpoint has a value of the kind {kind!r}, which this version does not know")


def _imported(name: str, base: type) -> Any:
    # A checkpoint imports nothing.
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def tensors(state: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))


def begin_copy(value: Any) -> Callable[[], Any]:
    # Copies from a GPU go to pinned memory while the loop continues: work that it launches later runs after them.
    copied = encode(value, copy=_copy)
    if not torch.cuda.is_initialized():
        return lambda: copied
    done = torch.cuda.Event()
    done.record()

    def wait() -> Any:
        done.synchronize()
        return copied

    return wait


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    if tensor.layout != torch.strided:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
