"""Encodes return values of ranks for the client: plain data, arrays and tensors, never pickles.

The client decodes what a rank returns, so the format must not be able to run code. It is msgpack; tuples, sets, large
integers, complex numbers, arrays and tensors are extension types.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgpack

from ddp_hydra.errors import ConfigError, RecordError

_TUPLE, _SET, _INT, _COMPLEX, _ARRAY, _TENSOR, _PAIRS, _FROZENSET = range(1, 9)
_CONTAINERS: dict[int, type] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _PAIRS: dict}
MAX_DEPTH = 32
"""Allowed depth of nested extension types. Each takes about 40 KiB of the C stack, which msgpack does not check."""


def encode(value: Any) -> bytes:
    """Encode a value.

    Raises:
        RecordError: it contains something that is neither plain data nor an array or tensor.
    """
    try:
        return _encode(value, 0)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"a rank's return value cannot travel: {error}") from None


def decode(data: bytes) -> Any:
    """Decode a value. Tensors need torch, which is imported only then.

    Raises:
        RecordError: the data does not come from `encode`.
    """
    try:
        return _decode(data, 0)
    except Exception as error:  # the data comes from a rank, so it can be anything
        raise RecordError(f"what a rank returned cannot be read ({type(error).__name__}: {error})") from None


def _encode(value: Any, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise ValueError(f"it has tuples, sets or the like more than {MAX_DEPTH} deep inside one another")
    return msgpack.packb(value, default=partial(_pack, depth=depth + 1), strict_types=True)


def _decode(data: bytes, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} extension types inside one another")
    return msgpack.unpackb(data, ext_hook=partial(_unpack, depth=depth + 1), strict_map_key=False)


def _pack(value: Any, depth: int) -> Any:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _encode(list(value), depth))
    if isinstance(value, (set, frozenset)):
        return msgpack.ExtType(_SET if isinstance(value, set) else _FROZENSET, _encode(list(value), depth))
    if isinstance(value, dict):
        return msgpack.ExtType(_PAIRS, _encode([list(pair) for pair in value.items()], depth))
    if isinstance(value, int):
        return msgpack.ExtType(_INT, f"{int(value):x}".encode())  # decimal would stop at 4300 digits
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, _encode([value.real, value.imag], depth))
    if isinstance(value, (float, str, bytes, list)):  # subclasses, such as numpy.float64 or torch.Size
        base: Any = next(base for base in (float, str, bytes, list) if isinstance(value, base))
        return base(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return _pack_tensor(value, depth)
    if type(value).__module__ == "numpy":
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    raise TypeError(
        f"{kind} is neither plain data (None, bool, numbers, str, bytes, list, tuple, set, dict) nor an array "
        "or tensor; return those, such as model.state_dict(), or send a file with results.submit(path, data)"
    )


def _pack_tensor(tensor: Any, depth: int) -> Any:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        # A clone, because a view of one element counts as contiguous whatever its stride is.
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        raw = whole.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    except RuntimeError:
        raise TypeError(
            f"a tensor of layout {tensor.layout} on {tensor.device} has no plain content; return tensor.to_dense()"
        ) from None
    return msgpack.ExtType(_TENSOR, _encode([dtype, list(tensor.shape), raw], depth))


def _array_bytes(array: Any) -> bytes:
    import numpy as np

    if getattr(array, "dtype", np.dtype(object)).hasobject:
        raise TypeError("an array of Python objects is not plain data; return a list, or an array of one number type")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _unpack(code: int, data: bytes, depth: int) -> Any:
    if code in _CONTAINERS:
        return _CONTAINERS[code](_decode(data, depth))
    if code == _INT:
        return int(data, 16)
    if code == _COMPLEX:
        return complex(*_decode(data, depth))
    if code == _ARRAY:
        import numpy as np

        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return array if array.ndim else array[()]
    if code == _TENSOR:
        import torch

        name, shape, raw = _decode(data, depth)
        dtype = getattr(torch, name)
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    raise ValueError(f"unknown extension type {code}")


# -- rows of predictions ---------------------------------------------------------------------------------

ROWS_NAME = "parts/part-{:08d}.rows"
"""Path of the file of a part, by its number."""
_ROWS_LENGTH = 8


def write_rows(file: IO[bytes], columns: Mapping[str, Any]) -> None:
    """Append some rows to a file.

    Args:
        file: open for writing.
        columns: name -> array (rows, ...) or list of that length.
    """
    if unfit := [name for name in columns if not is_column_name(name)]:
        raise ConfigError(f"the task predicts {unfit[0]!r}: give a column a name without slashes")
    data = encode(dict(columns))
    file.write(len(data).to_bytes(_ROWS_LENGTH, "big") + data)


def is_column_name(name: Any) -> bool:
    """Tell whether a column can be called so: by a text that is not a path."""
    return isinstance(name, str) and bool(name) and name.isprintable() and not {"/", "\\"} & set(name)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, as many at a time as were written at a time.

    Raises:
        RecordError: the file holds something else. It comes from a rank, so it can be anything.
    """
    error = RecordError(f"{path.name} holds no rows of predictions")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while head := file.read(_ROWS_LENGTH):
            length = int.from_bytes(head, "big")
            if length > size - file.tell():
                raise error
            columns = decode(file.read(length))
            is_table = isinstance(columns, dict) and all(is_column_name(name) for name in columns)
            if not is_table or not all(hasattr(values, "__len__") for values in columns.values()):
                raise error
            yield columns
