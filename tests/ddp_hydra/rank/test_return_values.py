from __future__ import annotations

import contextlib
import datetime
import io
import pickle
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddp_hydra.errors import RecordError
from ddp_hydra.rank import spec

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
plain = st.recursive(
    scalars | st.sets(keys, max_size=3) | st.frozensets(keys, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def again(value):
    return spec.decode(spec.encode(value))


def typed(value):
    """The value with the type of each part, so that 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(part) for part in value]
    if isinstance(value, dict):
        return dict, {typed_key(key): typed(part) for key, part in value.items()}
    return typed_key(value)


def typed_key(value):
    if isinstance(value, tuple):
        return tuple, tuple(typed_key(part) for part in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(typed_key(part) for part in value)
    return type(value), value


@given(plain)
def test_plain_data_comes_back_with_its_types(value):
    assert typed(again(value)) == typed(value)


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**63) - 1,
        10**5000,
        {(1, 2): {3}},
        {None: 1, True: 2, 1.5: 3, b"x": 4},
        {frozenset({1}): {frozenset()}},
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_json_and_msgpack_have_no_word_for(value):
    assert typed(again(value)) == typed(value)


@pytest.mark.parametrize(
    ("value", "arrives_as"),
    [
        (namedtuple("Point", "x y")(1, 2), (1, 2)),
        (torch.Size([2, 3]), (2, 3)),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (IntEnum("Colour", "RED")(1), 1),
        (np.float64(0.5), 0.5),
        (np.str_("x"), "x"),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_subclasses_arrive_as_what_they_stand_for(value, arrives_as):
    found = again(value)
    assert typed(found) == typed(arrives_as)
    assert not isinstance(found, dict) or list(found) == list(arrives_as)


@given(hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_side=0, max_side=3)))
def test_arrays_come_back_bit_for_bit(array):
    found = again(array)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(hnp.arrays(hnp.scalar_dtypes(), ()))
def test_arrays_without_dimensions_arrive_as_scalars_of_this_machine(array):
    found = again(array)
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.tobytes() == array.astype(found.dtype).tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.asfortranarray(np.ones((2, 3), np.float32)),
        np.arange(10)[::-3],
        np.array(["a", "bcd"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["transposed", "fortran", "strided", "strings", "records"],
)
def test_arrays_of_every_layout(array):
    found = again(array)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype, shape):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 3).abs().to(dtype)
    found = again(tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.arange(8.0)[::8],
        torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(3).expand(2, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "one of many", "channels_last", "expanded", "conjugate", "negative", "parameter", "grad"],
)
def test_tensors_of_every_layout(tensor):
    found = again(tensor)
    assert torch.equal(found, tensor)
    assert not found.requires_grad


def test_what_arrives_is_ours_to_change():
    array, tensor = again([np.zeros(2), torch.zeros(2)])
    array += 1
    tensor += 1
    assert array.tolist() == tensor.tolist() == [1, 1]


class Anything:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Anything(), r"Anything is neither plain data .* return those, such as model\.state_dict\(\)"),
        ([{"deep": (Anything(),)}], "Anything is neither plain data"),
        (torch.nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear is neither .* results\.submit\(path, data\)"),
        (lambda: 1, "function is neither"),
        (datetime.datetime(2024, 1, 1), r"datetime\.datetime is neither"),
        (Path("x"), "is neither plain data"),
        (torch.float32, r"torch\.dtype is neither"),
        (np.ma.masked_array([1, 2], [0, 1]), r"MaskedArray is neither"),
        (np.array([object()]), "an array of Python objects is not plain data; return a list"),
        (torch.eye(2).to_sparse(), r"layout torch\.sparse_coo on cpu .* tensor\.to_dense\(\)"),
        (torch.empty(1, device="meta"), "on meta has no plain content"),
        ("\ud800", "surrogates not allowed"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_travel_is_named_with_what_can(value, words):
    with pytest.raises(RecordError, match=f"^a rank's return value cannot travel: .*{words}"):
        spec.encode(value)


def nested(kind, depth):
    value = kind()
    for _ in range(depth):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [tuple, list, frozenset])
@pytest.mark.parametrize("depth", [spec.MAX_DEPTH + 1, 5000])
def test_nesting_without_end_is_refused_and_some_is_fine(kind, depth):
    assert again(nested(kind, 20)) == nested(kind, 20)
    loop = []
    loop.append(loop)
    with pytest.raises(RecordError, match="cannot travel"):
        spec.encode(loop)
    if kind is not list or depth > 1000:
        with pytest.raises(RecordError, match="cannot travel"):
            spec.encode(nested(kind, depth))


def extension(code, content):
    return msgpack.packb(msgpack.ExtType(code, content if isinstance(content, bytes) else msgpack.packb(content)))


def deep(levels):
    data = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(1, data))
    return data


def file_of(save, *args, **kwargs):
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


class Bomb:
    def __reduce__(self):
        return Path("exploded").touch, ()


HOSTILE = {
    "empty": b"",
    "no msgpack": b"\xc1",
    "more than one": b"\x01\x02",
    "truncated": spec.encode(["some text"])[:-1],
    "bare pickle": pickle.dumps(Bomb()),
    "unknown extension": extension(99, b""),
    "deep enough to break the C stack": deep(3000),
    "list in set": extension(2, [[1]]),
    "no pairs": extension(7, [1]),
    "no digits": extension(3, b"zz"),
    "no complex": extension(4, [1, 2, 3]),
    "pickle as array": extension(5, pickle.dumps(Bomb())),
    "npy with a pickle": extension(5, file_of(np.save, np.array([Bomb()]), allow_pickle=True)),
    "npz with a pickle": extension(5, file_of(np.savez, np.array([Bomb()]), allow_pickle=True)),
    "npy larger than memory": extension(
        5,
        b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (2**50,), }".ljust(117) + b"\n",
    ),
    "function as dtype": extension(6, ["load", [1], b"1234"]),
    "attribute as dtype": extension(6, ["__class__", [0], b""]),
    "no such dtype": extension(6, ["float7", [1], b"1234"]),
    "bytes too few": extension(6, ["float32", [2], b"1234"]),
    "empty but huge": extension(6, ["float32", [2**40], b""]),
    "torch file as tensor": extension(6, file_of(lambda file: torch.save(Bomb(), file))),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_and_never_run(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the bomb would leave a file
    with pytest.raises(RecordError, match="what a rank returned cannot be read"):
        spec.decode(data)
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_refused_as_a_record_error(data):
    with contextlib.suppress(RecordError):
        spec.decode(data)
