"""Decodes the fields of samples by their extensions, and says what is wrong with them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS, decode

_PICKLES = (".pickle", ".pkl", ".pyd")
_TAKE_BYTES = "read its bytes yourself, WidsShards(...).fields(index)"


def decode_field(extension: str, content: memoryview) -> Any:
    """Decode one field.

    Images become uint8 (3, height, width); .cls, .cls2, .id, .index and .inx become whole numbers; .txt, .text and
    .transcript become text; .json, .npy, .mp and .msgpack become what they hold; .pt and .pth become what `torch.load`
    accepts with weights_only; .safetensors becomes a dict of tensors. A last .gz is decompressed first. A field with
    another extension stays bytes.

    Args:
        extension: of the field, e.g. ".jpg", ".seg.png" or ".txt.gz".
        content: its bytes.

    Raises:
        ValueError: it is damaged, or holds pickled objects.
        ModuleNotFoundError: it needs a package that is not installed.
    """
    *_, kind = extension.lower().rpartition(".")
    packed = kind == "gz"
    if packed:
        *_, kind = extension[:-3].lower().rpartition(".")
    kind = f".{kind}"
    if kind in _PICKLES:
        raise ValueError(
            f"{extension} holds pickled objects, which could run any program: store .npy or .json, or {_TAKE_BYTES}"
        )
    decoder = decode if kind in IMAGE_EXTENSIONS else _DECODERS.get(kind)
    try:
        plain = gzip.decompress(content) if packed else content
        return bytes(plain) if decoder is None else decoder(plain)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the readers of the many formats raise almost anything on damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = f"it holds more than tensors and could run any program ({reason}): {_TAKE_BYTES}"
        raise ValueError(f"{extension} can't be decoded: {reason}") from None


def missing_field(field: str, found: Iterable[str]) -> str:
    """Return what is wrong with a sample that lacks a field.

    Args:
        field: what was asked for.
        found: extensions of the fields that it has.
    """
    found = list(found)
    why = "the files of a sample have one name and follow each other, as tar --sort=name writes them"
    if any("." in extension.lstrip(".") for extension in found):
        why = "an extension begins at the first dot of a file's name: 000.1.jpg is the field .1.jpg of the sample 000"
    return f"it has no field {field}, only {', '.join(found) or 'none'} ({why})"


def not_a_class(extension: str, content: bytes | memoryview) -> str:
    """Return what is wrong with a field that should hold a class number."""
    text = bytes(content[:40]).decode("utf-8", "replace")
    return f"its field {extension} holds {text!r}, and must hold the number of its class: 0, 1, 2, ..."


def _msgpack(content: Any) -> Any:
    import msgpack

    return msgpack.unpackb(content)


def _safetensors(content: Any) -> dict[str, Any]:
    try:
        from safetensors.torch import load
    except ImportError:
        raise ModuleNotFoundError(".safetensors needs safetensors: type `pip install safetensors`") from None
    return load(bytes(content))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((".cls", ".cls2", ".id", ".index", ".inx"), lambda content: int(bytes(content))),
    **dict.fromkeys((".text", ".transcript", ".txt"), lambda content: str(content, "utf-8")),
    **dict.fromkeys((".mp", ".msgpack"), _msgpack),
    **dict.fromkeys(
        (".pt", ".pth"), lambda content: torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    ),
    ".safetensors": _safetensors,
    ".json": lambda content: json.loads(bytes(content)),
    ".npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
}
