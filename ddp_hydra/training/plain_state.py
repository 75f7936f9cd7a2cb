"""Turns the values of a state into those that `torch.load(weights_only=True)` reads, and back; copies a state.

A value of another type is saved as a dict with the key `KIND`. A type that is not known here is refused by its name.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from ddp_hydra.errors import CheckpointError

KIND = "ddp_hydra_kind"
"""Key of the dict that stands for a value of another type."""

Plain = Callable[[torch.Tensor, str], torch.Tensor]
"""Makes the tensor that a state holds of a value's, which is called by its name in messages."""

_AS_THEY_ARE = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.Size)
_DICTS = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_FACTORIES = {kind.__name__: kind for kind in (int, float, complex, bool, str, list, dict, set, tuple)}
_PATHS = {kind.__name__: kind for kind in (pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


class Kind(NamedTuple):
    """A type whose values are saved as values of other types."""

    matches: Callable[[Any], bool]
    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]


def _exactly(of: type, take_apart: Callable[[Any], Any], put_together: Callable[[Any], Any]) -> Kind:
    return Kind(lambda value: type(value) is of, take_apart, put_together)


_KINDS = {
    "numpy": Kind(
        lambda v: isinstance(v, np.generic) and v.dtype.kind in "biufcUS",
        lambda v: [str(v.dtype), v.item()],
        lambda v: np.dtype(v[0]).type(v[1]),
    ),
    "array": Kind(
        lambda v: type(v) is np.ndarray and v.dtype.kind in "biufcUS",
        lambda v: [v.dtype.str, list(v.shape), np.ascontiguousarray(v).tobytes()],
        lambda v: np.frombuffer(v[2], np.dtype(v[0])).reshape(v[1]).copy(),
    ),
    # Classes of enums and named tuples have to be imported already: a checkpoint imports nothing.
    "enum": Kind(
        lambda v: isinstance(v, enum.Enum),
        lambda v: [_class_name(v), v.name or "", v.value],
        lambda v: (_imported(v[0], enum.Enum) or (lambda value: value))(v[2]),
    ),
    "namedtuple": Kind(
        lambda v: isinstance(v, tuple) and hasattr(v, "_fields"),
        lambda v: [_class_name(v), list(v)],
        lambda v: getattr(_imported(v[0], tuple), "_make", tuple)(v[1]),
    ),
    "tuple": Kind(lambda v: isinstance(v, tuple) and type(v).__module__ == "torch.return_types", tuple, tuple),
    "defaultdict": Kind(
        lambda v: type(v) is collections.defaultdict and v.default_factory in (None, *_FACTORIES.values()),
        lambda v: [getattr(v.default_factory, "__name__", None), dict(v)],
        lambda v: collections.defaultdict(_FACTORIES.get(v[0]), v[1]),
    ),
    "path": Kind(
        lambda v: isinstance(v, pathlib.PurePath),
        lambda v: [type(v).__name__ if type(v).__name__ in _PATHS else "Path", str(v)],
        lambda v: _PATHS[v[0]](v[1]),
    ),
    "generator": Kind(
        lambda v: isinstance(v, torch.Generator),
        lambda v: [str(v.device), v.get_state()],
        lambda v: torch.Generator(v[0]).set_state(v[1]),
    ),
    # As the moments of torchao's optimizers: numbers lie in other tensors.
    "wrapped": Kind(
        lambda v: isinstance(v, torch.Tensor) and is_wrapped(v), lambda v: _flattened(v), lambda v: _unflattened(*v)
    ),
    # The ones whose keys or members are saved as dicts, which are no keys. `encode` takes the former apart itself.
    "items": Kind(lambda v: False, lambda v: v, lambda v: _DICTS[v[0]](dict(v[1]))),
    "set": _exactly(set, list, set),
    "frozenset": _exactly(frozenset, list, frozenset),
    # `weights_only` reads no empty bytes.
    "bytes": _exactly(bytes, lambda v: v.decode("latin-1"), lambda v: v.encode("latin-1")),
    "bytearray": _exactly(bytearray, bytes, bytearray),
    "range": _exactly(range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "slice": _exactly(slice, lambda v: [v.start, v.stop, v.step], lambda v: slice(*v)),
    "deque": _exactly(collections.deque, lambda v: [list(v), v.maxlen], lambda v: collections.deque(*v)),
    **{
        one.__name__: _exactly(one, str, one.fromisoformat) for one in (datetime.datetime, datetime.date, datetime.time)
    },
    "timedelta": _exactly(
        datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v)
    ),
    **{one.__name__.lower(): _exactly(one, str, one) for one in (decimal.Decimal, fractions.Fraction, uuid.UUID)},
}


def encode(value: Any, name: str = "", copy: Plain | None = None) -> Any:
    copy = copy or plain_tensor
    if isinstance(value, torch.Tensor) and not is_wrapped(value):
        return copy(value, name)
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) in _DICTS.values():
        items = [(encode(key, f"{name}, a key"), encode(part, _inside(name, key), copy)) for key, part in value.items()]
        if not _are_hashable(key for key, _ in items):
            return {KIND: "items", "value": [type(value).__name__, list(map(list, items))]}
        encoded = iter(items)
        return rebuilt(value, lambda *_: next(encoded), lambda metadata: encode(metadata, name))
    if type(value) in _SEQUENCES:
        parts = [encode(part, f"{name}[{number}]", copy) for number, part in enumerate(value)]
        if type(value) is not set or _are_hashable(parts):
            return type(value)(parts)
    if isinstance(value, (np.float64, np.int64, np.bool_)) and name.startswith(("optimizer", "scheduler")):
        return value.item()  # a number that other programs read, and that torch computes with alike
    if isinstance(value, (DictConfig, ListConfig)):
        return encode(OmegaConf.to_container(value, resolve=True), name, copy)
    kind = next((kind for kind, known in _KINDS.items() if known.matches(value)), None)
    if kind is None:
        of = type(value)
        raise CheckpointError(
            f"{name} is a {of.__module__}.{of.__qualname__}, which a checkpoint can't hold: save numbers, texts, "
            "lists, dicts, tensors or numpy arrays (a state_dict of your own chooses them)"
        )
    return {KIND: kind, "value": encode(_KINDS[kind].take_apart(value), name, copy)}


def _are_hashable(values: Iterable[Any]) -> bool:
    found = tuple(values)
    try:
        hash(found)
    except TypeError:
        return False
    return True


def rebuilt(
    value: Any, change: Callable[[Any, Any], tuple[Any, Any]], of_metadata: Callable[[Any], Any] = lambda one: one
) -> Any:
    found: Any = type(value)()
    for key, part in itertools.starmap(change, value.items()):
        found[key] = part
    if metadata := getattr(value, "_metadata", None):  # the versions of a model's layers
        found._metadata = of_metadata(metadata)
    return found


def _inside(name: str, key: Any) -> str:
    return f"{name}: {key}" if name and ":" not in name else f"{name}.{key}" if name else str(key)


def is_wrapped(tensor: torch.Tensor) -> bool:
    # Torch's own ones, as shards and nested tensors, have an owner that makes plain tensors of them.
    is_of_torch = type(tensor).__module__.partition(".")[0] == "torch"
    return not is_of_torch and torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def _flattened(tensor: Any) -> list[Any]:
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return [_class_name(tensor), parts, context, list(tensor.shape), list(tensor.stride())]


def _unflattened(name: str, parts: Any, context: Any, shape: list[int], stride: list[int]) -> Any:
    if (kind := _imported(name, torch.Tensor)) is None:
        raise CheckpointError(f"the checkpoint has tensors of {name}, which this run does not use")
    return kind.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(stride))


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def plain_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
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
    if isinstance(value, dict):
        if (kind := value.get(KIND)) is not None:
            if kind not in _KINDS:
                raise CheckpointError(f"the checkpoint has a value of the kind {kind!r}, which is not known")
            return _KINDS[kind].put_together(decode(value["value"]))
        return rebuilt(value, lambda key, part: (decode(key), decode(part)))
    if type(value) in _SEQUENCES:
        return type(value)(decode(part) for part in value)
    return value


def _imported(name: str, base: type) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def tensors(state: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    # This rank's share of a sharded tensor.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def begin_copy(value: Any, copy: Plain | None = None) -> Callable[[], Any]:
    # Copies from a GPU go to pinned memory while the loop continues: work that it launches later runs after them.
    copied = encode(value, copy=once(copy or plain_copy, {}))
    if not torch.cuda.is_initialized():
        return lambda: copied
    done = torch.cuda.Event()
    done.record()

    def wait() -> Any:
        done.synchronize()
        return copied

    return wait


def once(copy: Plain, made: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Plain:
    # A tensor that lies at several places, as a sum over all parameters, has one copy. `made` has tensors with their
    # copies, by the ids of the tensors: while it holds one, no other has its id.
    def copied(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, copy(tensor, name)
        return made[id(tensor)][1]

    return copied


def plain_copy(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    tensor = plain_tensor(tensor, name)
    if not tensor.is_cuda:
        return tensor.clone()
    if tensor.layout != torch.strided:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
