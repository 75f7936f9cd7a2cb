"""Handles batches of any structure: tensors in tuples, lists, dicts, dataclasses, and objects of other libraries.

Samples can be compared by a few of their values.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import traceback
from collections import UserList, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ddp_hydra.data.draws import Indices
from ddp_hydra.data.wrappers import name_of, own_getitems
from ddp_hydra.errors import DataError

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_SEQUENCES = (list, tuple, deque, UserList)


def make_batch(
    dataset: Any, indices: Indices, seeded: bool = False, progress: Callable[[], None] = lambda: None
) -> Any:
    # progress: called before each sample that is read alone, and when all are read.
    index: int | None = None
    try:
        if own_getitems(dataset):
            if seeded:
                indices.seed_batch()
            samples = dataset.__getitems__(indices)
        else:
            samples = []
            for place, index in enumerate(indices):
                progress()
                if seeded:
                    indices.seed_sample(place)
                samples.append(dataset[index])
    except (StopIteration, SystemExit) as error:  # a loop or a process would end by it, as if all were done
        raise no_sample(
            dataset, f"the samples {list(indices)}" if index is None else f"sample {index}", error
        ) from error
    if seeded and hasattr(dataset, "collate"):
        indices.seed_batch()
    return collated(dataset, samples, progress)


def collated(dataset: Any, samples: Any, progress: Callable[[], None] = lambda: None) -> Any:
    if own := getattr(dataset, "collate", None):
        try:
            batch = own(samples)
        except (StopIteration, SystemExit) as error:
            raise no_sample(dataset, "a batch", error) from error
    else:
        batch = stacked(dataset, samples)
    progress()
    return batch


def stacked(dataset: Any, samples: Any, advice: str = "give it a method collate(self, samples)") -> Any:
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        reason = unlike(samples) or f"torch says: {error}"
        raise DataError(f"the samples of {name_of(dataset)} make no batch, as {reason}: {advice}") from error


def no_sample(dataset: Any, what: str, error: BaseException) -> DataError:
    how = "calls sys.exit()" if isinstance(error, SystemExit) else "raises StopIteration"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return DataError(f"{name_of(dataset)} {how} where it is asked for {what} ({place}): return it, or raise an error")


def unlike(samples: Any, what: str = "a sample") -> str:
    # Return what keeps samples from being stacked, for a person; "" if nothing is found. It raises nothing, as
    # `described`.
    try:
        return "" if _stacks(samples) else _unlike(samples, what)
    except Exception:
        return ""


def _unlike(samples: Any, what: str) -> str:
    first, kind = samples[0], type(samples[0]).__name__
    if _are(samples, Tensor) or _are(samples, np.ndarray):
        shapes = list(dict.fromkeys(tuple(sample.shape) for sample in samples))
        if len(shapes) > 1:
            return f"{what} has the shape {shapes[0]} in one and {shapes[1]} in another"
        return f"{what} is an array of {first.dtype}" if isinstance(first, np.ndarray) else ""
    if _are(samples, Mapping):
        for name in first:
            if any(name not in sample for sample in samples):
                return f"{name!r} is missing in one"
            inner = repr(name) if what == "a sample" else f"{name!r} of {what}"
            if reason := unlike([sample[name] for sample in samples], inner):
                return reason
        return ""
    if _are(samples, (tuple, list)):
        lengths = list(dict.fromkeys(map(len, samples)))
        if len(lengths) > 1:
            return f"{what} has {lengths[0]} parts in one and {lengths[1]} in another"
        parts = (unlike(part, f"part {number} of {what}") for number, part in enumerate(zip(*samples, strict=True), 1))
        return next(filter(None, parts), "")
    if _are(samples, int):
        return f"{what} has a number beyond 64 bits"
    if other := next((type(one).__name__ for one in samples if not _stacks([first, one])), ""):
        return f"{what} is a {kind}" + (f" in one and a {other} in another" if other != kind else "")
    return ""


def _are(samples: Any, kind: Any) -> bool:
    return all(isinstance(sample, kind) for sample in samples)


def _stacks(samples: Any) -> bool:
    try:
        default_collate(list(samples))
    except (RuntimeError, TypeError, KeyError, ValueError):
        return False
    return True


def mapped(change: Callable[[Any], Any], batch: Any, method: str = "") -> Any:
    # Change each tensor, and each object with this method. A task may write into its batch, which a data set may keep,
    # so what can be written into is always new.
    kind = type(batch)
    if kind in _PLAIN:
        return batch
    if kind is list or kind is tuple:
        return kind([mapped(change, part, method) for part in batch])
    if kind is dict:
        return {key: mapped(change, part, method) for key, part in batch.items()}
    # A dict of the user's, whose keys are its attributes, raises KeyError for another one.
    if isinstance(batch, Tensor) or (method and callable(getattr(kind, method, None))):
        return change(batch)
    if (parts := _parts(batch)) is None:
        return batch
    changed = {key: mapped(change, part, method) for key, part in parts.items()}
    is_same = all(changed[key] is part for key, part in parts.items())
    return _copied(batch) if is_same else _with_parts(batch, changed)


def _copied(batch: Any) -> Any:
    if isinstance(batch, tuple) or (isinstance(batch, Mapping) and not isinstance(batch, MutableMapping)):
        return batch
    try:
        return copy.copy(batch)
    except Exception:
        return batch


def _parts(batch: Any) -> dict[Any, Any] | None:
    # None for what is no container.
    if isinstance(batch, _SEQUENCES):
        return dict(enumerate(batch))
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        return {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return None


def _with_parts(batch: Any, parts: dict[Any, Any]) -> Any:
    # Its constructor may take anything, so a container is copied. One that refuses becomes a list or a dict, as in
    # torch's DataLoader.
    if isinstance(batch, tuple):
        try:
            made = tuple.__new__(type(batch), parts.values())
        except TypeError:  # one of torch.return_types
            return type(batch)(list(parts.values()))
        getattr(made, "__dict__", {}).update(getattr(batch, "__dict__", {}))
        return made
    if not isinstance(batch, (Mapping, *_SEQUENCES)):
        copied = copy.copy(batch)
        for name, part in parts.items():  # also of a frozen one
            object.__setattr__(copied, name, part)
        return copied
    try:
        if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
            return type(batch)(parts)  # type: ignore[call-arg]
        container: Any = copy.copy(batch)
        for key, part in parts.items():
            container[key] = part
        return container
    except Exception:
        return parts if isinstance(batch, Mapping) else list(parts.values())


def to_device(batch: Any, device: torch.device) -> Any:
    # An object that has its own `to`, as batches of some libraries and torch's PackedSequence, is asked to do it. A
    # part of a batch that refuses a device, as a quantity with a unit does, stays.
    if device.type == "cpu":  # where data sets make their batches
        return batch

    def move(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.to(device, non_blocking=True)
        try:
            knows = "non_blocking" in inspect.signature(one.to).parameters
            return one.to(device, **({"non_blocking": True} if knows else {}))
        except (AttributeError, TypeError, ValueError):
            if one is batch or _parts(one) is not None:
                raise
            return one

    return mapped(move, batch, "to")


def laid_out(batch: Any, channels_last: bool) -> Any:
    # Tensors of a subclass are left alone.
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def change(tensor: Tensor) -> Tensor:
        is_image = tensor.ndim == 4 and type(tensor) is Tensor and tensor.layout == torch.strided
        return tensor.contiguous(memory_format=layout) if is_image else tensor

    return mapped(change, batch)


def n_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(batch) if tensor.layout is not torch.sparse_coo)  # torch has none


def tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(note, batch)
    return found


def n_tokens(batch: Any) -> int:
    # 0 for what is no text. A batch has them under `input_ids`, or is (batch, time) itself, or its first part is.
    found = (
        batch["input_ids"] if isinstance(batch, Mapping) and "input_ids" in batch else next(iter(tensors(batch)), None)
    )
    if not isinstance(found, Tensor) or found.ndim != 2 or found.dtype not in (torch.int32, torch.int64):
        return 0
    return found.numel()


def described(batch: Any) -> str:
    # It may be for the message of another error, so it raises none, whatever a user's object does.
    try:
        return _described(batch)
    except Exception:
        return type(batch).__name__


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        has_shape = not batch.is_nested or batch.layout is not torch.strided  # torch has none then
        return f"{tuple(batch.shape) if has_shape else 'nested'} {str(batch.dtype).removeprefix('torch.')}"
    if (parts := _parts(batch)) is None:
        return type(batch).__name__
    if not isinstance(batch, _SEQUENCES):
        return ", ".join(f"{name} {described(part)}" for name, part in parts.items())
    if isinstance(batch, tuple) and len(parts) == 2 and not hasattr(batch, "_fields"):
        return f"x {described(parts[0])}, y {described(parts[1])}"
    shown = ", ".join(described(parts[number]) for number in range(min(4, len(parts))))
    return f"[{shown}{', …' if len(parts) > 4 else ''}]"


def pin(batch: Any) -> Any:
    # Copy a batch to pinned memory, so that its copy to the GPU runs during the computation.
    return mapped(lambda one: one if isinstance(one, Tensor) and one.is_cuda else one.pin_memory(), batch, "pin_memory")


VALUES = 32
"""Values of a tensor that are compared."""
PARTS = 1024
"""Parts of a list that are compared, at least; of one that has fewer, all."""


def summary(sample: Any) -> Any:
    # Return a sample as plain values: a few numbers of each tensor; None for what has no numbers.
    try:
        return _summary(sample)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of texts, a sparse tensor, 10**400
        return None


def _summary(sample: Any) -> Any:
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        flat = torch.as_tensor(np.ascontiguousarray(sample) if isinstance(sample, np.ndarray) else sample).detach()
        flat = flat.reshape(-1)
        chosen = flat[:: max(1, len(flat) // VALUES)][:VALUES]
        numbers = torch.view_as_real(chosen) if chosen.is_complex() else chosen
        return [tuple(sample.shape), numbers.reshape(-1).double().tolist()]
    if isinstance(sample, Mapping):
        return [[str(name), summary(part)] for name, part in sample.items()]
    if isinstance(sample, (list, tuple)):
        return [str(len(sample)), [summary(part) for part in sample[:: max(1, len(sample) // PARTS)]]]
    if isinstance(sample, (bool, int, float, np.number)) and not isinstance(sample, np.complexfloating):
        return float(sample)
    return str(sample) if isinstance(sample, (str, bytes)) else None


def alike(a: Any, b: Any) -> bool:
    # Return whether two summaries are equal but for rounding; None stands for what can't be compared.
    if a is None or b is None:
        return True
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(alike(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)
