"""Values of ranks, on their way to the client: plain data, arrays and tensors, never pickles.

What a rank returns is decoded by the client, so a format that can run code is out. msgpack carries plain
data; tuples, sets, large integers, complex numbers, arrays and tensors ride as extension types.
"""

from __future__ import annotations

import io
from typing import Any

import msgpack

from ddp_hydra.errors import RecordError

_TUPLE, _SET, _INT, _COMPLEX, _ARRAY, _TENSOR, _PAIRS = range(1, 8)


def encode(value: Any) -> bytes:
    """Encode a value.

    Raises:
        RecordError: it holds something that is neither plain data nor an array or tensor.
    """
    try:
        return msgpack.packb(value, default=_pack, strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"a rank's return value cannot travel: {error}") from None


def decode(data: bytes) -> Any:
    """Decode what `encode` made. Tensors need torch, which is imported only then."""
    return msgpack.unpackb(data, ext_hook=_unpack, strict_map_key=False)


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if isinstance(value, (set, frozenset)):
        return msgpack.ExtType(_SET, encode(list(value)))
    if isinstance(value, dict):
        return msgpack.ExtType(_PAIRS, encode([list(pair) for pair in value.items()]))
    if isinstance(value, int):
        return msgpack.ExtType(_INT, str(int(value)).encode())
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, encode([value.real, value.imag]))
    if isinstance(value, (float, str, bytes, list)):  # subclasses, such as numpy.float64 or torch.Size
        base: Any = next(base for base in (float, str, bytes, list) if isinstance(value, base))
        return base(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return _pack_tensor(value)
    if type(value).__module__ == "numpy":
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    raise TypeError(
        f"{kind} is neither plain data (None, bool, numbers, str, bytes, list, tuple, set, dict) nor an array "
        "or tensor; return those, such as model.state_dict(), or send a file with results.submit(path, data)"
    )


def _pack_tensor(tensor: Any) -> Any:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    raw = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return msgpack.ExtType(_TENSOR, encode([dtype, list(tensor.shape), raw]))


def _array_bytes(array: Any) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _unpack(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _SET:
        return set(decode(data))
    if code == _PAIRS:
        return dict(decode(data))
    if code == _INT:
        return int(data)
    if code == _COMPLEX:
        return complex(*decode(data))
    if code == _ARRAY:
        import numpy as np

        array = np.load(io.BytesIO(data), allow_pickle=False)
        return array if array.ndim else array[()]
    if code == _TENSOR:
        import torch

        dtype, shape, raw = decode(data)
        return (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
            if raw
            else (torch.empty(shape, dtype=getattr(torch, dtype)))
        )
    raise RecordError(f"unknown extension type {code} in a rank's value")
