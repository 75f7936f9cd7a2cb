"""Turns what a task predicts for a batch into columns that can travel: arrays, texts and PNGs."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ddp_hydra.errors import ConfigError

KINDS = ("table", "arrays", "pictures")
"""Kinds of results: rows of numbers and texts; arrays of any shape; PNGs with a table."""


def columns(prediction: Any, size: int, kind: str) -> dict[str, Any]:
    named = prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
    found: dict[str, Any] = {}
    for name, values in named.items():
        values = plain(str(name), values)
        is_number = isinstance(values, np.ndarray) and values.ndim == 0
        if is_number or len(values) != size:
            rows = "a number in place of rows" if is_number else f"{len(values)} rows"
            raise ConfigError(
                f"the task predicted {rows} of {name!r} for {size} samples: predict(model, batch) must "
                "return one for each sample"
            )
        found |= fitted(str(name), values, kind)
    if kind == "pictures" and not any(isinstance(part, list) and isinstance(part[0], bytes) for part in found.values()):
        raise ConfigError(
            f"a folder takes pictures, and the task predicts {', '.join(found)}, which are none: give "
            "out=predictions.csv, .parquet or .npz"
        )
    return found


_TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a batch that is a dict, one of which may hold its targets."""


def targets(batch: Any, size: int, classes: Sequence[str]) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in _TARGETS if key in batch), None)
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if not isinstance(found, Tensor) or not found.ndim or len(found) != size:
        return {}
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim > 2 or (found.ndim == 2 and not found.is_floating_point()):
        return {}
    if not classes or found.ndim > 1 or found.is_floating_point():
        return {"target": found}
    numbers = found.tolist()
    names = [str(classes[number]) if 0 <= number < len(classes) else "" for number in numbers]
    return {"target": found, "target_name": names}


def plain(name: str, values: Any) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.is_floating_point() and values.itemsize < 4 else values).numpy()
    if isinstance(values, np.ndarray) and not values.dtype.hasobject:
        return values
    if not isinstance(values, (list, tuple)):
        raise ConfigError(
            f"the task predicted {name!r} as {type(values).__name__}: predict(model, batch) must return tensors or "
            "lists, alone or in a dict"
        )
    if all(isinstance(value, str) for value in values):
        return list(values)
    if all(isinstance(value, (bool, int, float)) for value in values):
        return np.asarray(values)
    return [json.dumps(_jsonable(value), separators=(",", ":")) for value in values]


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def fitted(name: str, values: Any, kind: str) -> dict[str, Any]:
    if isinstance(values, list) or values.ndim == 1 or kind == "arrays":
        return {name: values}
    if values.ndim == 2:
        if values.shape[1] == 1:
            return {name: values[:, 0]}
        return {f"{name}_{number}": values[:, number] for number in range(values.shape[1])}
    if kind == "pictures":
        return {name: [png(picture) for picture in values]}
    raise ConfigError(
        f"the task predicts {name!r} of shape {values.shape[1:]} for each sample, which is not a row of a table: give "
        "out=<folder>/ for PNGs, or out=predictions.npz"
    )


def png(picture: np.ndarray) -> bytes:
    from PIL import Image

    if picture.ndim == 3 and picture.shape[0] in (1, 3, 4):
        picture = picture[0] if picture.shape[0] == 1 else np.moveaxis(picture, 0, -1)
    elif picture.ndim != 2:
        raise ConfigError(
            f"a picture must be (height, width) or (channels, height, width) with 1, 3 or 4 channels, and the task "
            f"predicts {picture.shape}: give out=predictions.npz"
        )
    if picture.dtype == bool or picture.dtype.kind == "f":
        picture = (np.nan_to_num(picture.astype(np.float32)).clip(0, 1) * 255).round()
    deep = picture.max(initial=0) > 255
    if picture.min(initial=0) < 0 or picture.max(initial=0) > 65535 or (deep and picture.ndim == 3):
        raise ConfigError(
            f"the task predicts numbers from {picture.min()} to {picture.max()}, which no PNG holds: give "
            "out=predictions.npz"
        )
    buffer = io.BytesIO()
    Image.fromarray(picture.astype(np.uint16 if deep else np.uint8)).save(buffer, "png")
    return buffer.getvalue()
