"""Batches of any structure."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_hydra.data.batch import (
    alike,
    described,
    laid_out,
    make_batch,
    mapped,
    n_bytes,
    pin,
    summary,
    to_device,
    unlike,
)
from ddp_hydra.data.draws import Indices
from ddp_hydra.errors import DataError

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Sample:
    pixels: Tensor
    name: str


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, with its own `to`."""

    moved_to: Any = None

    def to(self, device: torch.device) -> Encoding:
        self.moved_to = device
        return self


class Loose:
    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[Any, bool]:
        return device, non_blocking


X = torch.ones(3, 2)
NESTED = {
    "a": [X, (X, "text")],
    "b": Pair(X, 5),
    "c": OrderedDict(x=X),
    "d": Sample(X, "cat"),
    "e": UserDict(x=X),
    "f": None,
}


def test_every_tensor_is_changed_and_all_else_stays():
    doubled = mapped(lambda tensor: tensor * 2, NESTED)
    assert torch.equal(doubled["a"][0], 2 * X)
    assert (doubled["a"][1][1], doubled["b"].right, doubled["d"].name, doubled["f"]) == ("text", 5, "cat", None)
    assert [type(doubled[name]) for name in "bcde"] == [Pair, OrderedDict, Sample, UserDict]
    assert torch.equal(doubled["e"]["x"], 2 * X)
    assert torch.equal(NESTED["d"].pixels, X)  # the given one is left as it was


def test_an_object_moves_itself():
    elsewhere = torch.device("meta")
    assert to_device(Encoding(x=X), elsewhere).moved_to == elsewhere
    assert to_device(Loose(), elsewhere) == (elsewhere, True)
    assert to_device(NESTED, elsewhere)["b"].left.device == elsewhere
    assert to_device(NESTED, CPU) is NESTED


def test_images_get_the_layout_of_the_model_and_subclasses_are_left_alone():
    class Mine(Tensor):
        pass

    images = torch.zeros(2, 3, 4, 5)
    own = images.clone().as_subclass(Mine)
    last = laid_out({"x": images, "own": own, "y": X}, channels_last=True)
    assert last["x"].is_contiguous(memory_format=torch.channels_last)
    assert last["own"] is own
    assert last["y"] is X
    assert laid_out(last, channels_last=False)["x"].is_contiguous()


def test_bytes_and_descriptions():
    assert n_bytes(NESTED) == 6 * X.nbytes
    assert n_bytes({"dense": X, "sparse": torch.eye(3).to_sparse()}) == X.nbytes
    assert described((X, X.long())) == "x (3, 2) float32, y (3, 2) int64"
    assert described({"ids": X.long(), "more": [X, "a"]}) == "ids (3, 2) int64, more [(3, 2) float32, str]"
    assert described(Sample(X, "cat")) == "pixels (3, 2) float32, name str"
    assert described([X] * 6) == "[" + ", ".join(["(3, 2) float32"] * 4) + ", …]"


class Two(list[Any]):
    """A list with a constructor of its own."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__([x, y])
        self.note = "kept"


class TwoFixed(tuple[Any, ...]):
    note = ""

    def __new__(cls, x: Any, y: Any = None) -> TwoFixed:
        made = super().__new__(cls, (x, y))
        made.note = "kept"
        return made


class TwoNamed(dict[str, Any]):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x=x, y=y)
        self.note = "kept"


class Refusing(Two):
    def __setitem__(self, *_: Any) -> None:
        raise NotImplementedError("it is fixed")


class RefusingNamed(TwoNamed):
    def __setitem__(self, *_: Any) -> None:
        raise NotImplementedError("it is fixed")


@dataclass(slots=True)
class Slots:
    x: Tensor
    y: Any = field(default=None, init=False)
    later: Any = field(init=False)


@pytest.mark.parametrize("kind", [Two, TwoFixed, TwoNamed])
def test_a_container_with_its_own_constructor_is_changed_and_keeps_its_type(kind):
    batch = kind(X, 5)
    doubled = mapped(lambda tensor: tensor * 2, batch)
    keys = "xy" if kind is TwoNamed else range(2)
    assert (type(doubled), doubled.note, doubled[keys[1]]) == (kind, "kept", 5)
    assert doubled[keys[0]].equal(2 * X)
    assert batch[keys[0]] is X


@pytest.mark.parametrize(
    "batch", [deque([X, 5]), UserList([X, 5]), torch.max(X, 0)], ids=lambda one: type(one).__name__
)
def test_other_sequences_are_changed(batch):
    doubled = mapped(lambda tensor: tensor * 2, batch)
    assert type(doubled) is type(batch)
    assert doubled[0].equal(2 * batch[0])


@pytest.mark.parametrize(
    ("batch", "plain"),
    [(Refusing(X, 5), list), (RefusingNamed(X, 5), dict), (MappingProxyType({"x": X, "y": 5}), MappingProxyType)],
    ids=["list", "dict", "mapping"],
)
def test_a_container_that_refuses_becomes_a_plain_one(batch, plain):
    doubled = mapped(lambda tensor: tensor * 2, batch)
    assert type(doubled) is plain
    first, second = doubled.values() if isinstance(doubled, Mapping) else doubled
    assert (first.tolist(), second) == ((2 * X).tolist(), 5)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": X, "y": 5}, OrderedDict(x=X, y=5), UserDict(x=X, y=5), TwoNamed(X, 5), Slots(X), [X, 5], Two(X, 5),
        Refusing(X, 5), UserList([X, 5]), deque([X, 5]),
    ],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
def test_a_task_may_write_into_its_batch_as_the_data_set_keeps_its_own(batch):
    before = described(batch)
    laid = laid_out(batch, channels_last=True)
    assert (type(laid), getattr(laid, "note", "kept")) == (type(batch), "kept")
    if isinstance(laid, Slots):
        laid.x = None
    else:
        laid.pop("x") if isinstance(laid, (dict, UserDict)) else laid.pop()
    assert described(batch) == before
    assert described(laid) != before


def test_what_cannot_be_written_into_or_copied_stays():
    for batch in (TwoFixed(X, 5), Pair(X, 5), MappingProxyType({"x": X}), RefusingNamed(X, 5)):
        assert laid_out(batch, channels_last=True) is batch


def test_fields_that_are_not_set_and_slots():
    doubled = mapped(lambda tensor: tensor * 2, Slots(X))
    assert doubled.x.equal(2 * X)
    assert not hasattr(doubled, "later")
    assert described(Slots(X)) == "x (3, 2) float32, y NoneType"


def test_parts_of_a_batch_move_and_pin_themselves():
    packed = torch.nn.utils.rnn.pack_sequence([X, X[:1]])
    moved, label = to_device((packed, X), torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type, label.device.type) == ("meta", "cpu", "meta")
    assert to_device({"x": Encoding(x=X)}, torch.device("meta"))["x"].moved_to == torch.device("meta")

    class Pins:
        def pin_memory(self) -> str:
            return "pinned"

    assert pin([Pins(), 5]) == ["pinned", 5]


class Quantity:
    def __init__(self, unit: str) -> None:
        self.unit = unit

    def to(self, unit: str) -> Quantity:
        if not isinstance(unit, str):
            raise TypeError("a unit is a str")
        return Quantity(unit)

    def pin_memory(self) -> Quantity:
        return self


class Keyed(dict):
    """Its keys are its attributes, and another one is a KeyError."""

    __getattr__ = dict.__getitem__


def test_a_dict_whose_keys_are_attributes_is_a_dict():
    for method in ("to", "pin_memory"):
        found = mapped(lambda one: one + 1, [Keyed(x=torch.zeros(2))], method)
        assert (type(found[0]), found[0].x.tolist()) == (Keyed, [1, 1])


def test_what_is_no_tensor_and_knows_no_device_stays():
    when = Quantity("s")
    batch = {"x": X, "when": [when], "kind": Tensor, "type": Quantity}
    moved = to_device(batch, torch.device("meta"))
    assert (moved["x"].device.type, moved["when"], moved["kind"], moved["type"]) == ("meta", [when], Tensor, Quantity)
    assert pin({"kind": Tensor, "type": Quantity}) == {"kind": Tensor, "type": Quantity}
    with pytest.raises(TypeError, match="a unit is a str"):
        to_device(when, torch.device("meta"))


class Raises:
    """Whatever describes it raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __len__(self) -> int:
        raise RuntimeError("no length")


class RaisesList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("no parts")


class RaisesDict(UserDict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no parts")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_no_description_raises():
    nested = torch.nested.nested_tensor([X, X[:1]])
    assert described((nested, X)) == "x nested float32, y (3, 2) float32"
    assert described([RaisesList(), Raises(), RaisesDict()]) == "[RaisesList, Raises, RaisesDict]"
    assert described({Raises(): X}) == "dict"


@pytest.mark.parametrize("sample", [{Raises(): object()}, RaisesList([1])], ids=["name", "parts"])
def test_what_describes_samples_hides_no_error(sample):
    assert unlike([sample, sample]) == ""


class Kind(IntEnum):
    ONE = 1


class Samples:
    """A map-style data set of given samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (
            [(torch.ones(1, 2), 0), (torch.ones(2, 2), 1)],
            r"part 1 of a sample has the shape \(1, 2\) in one and",
        ),
        ([(1.0, 0), None], "a sample is a tuple in one and a NoneType in another"),
        ([(1.0, 0), (1.0,)], "a sample has 2 parts in one and 1 in another"),
        ([{"x": 1}, {"y": 1}], "'x' is missing in one"),
        ([{"x": [1, 2]}, {"x": [1]}], "'x' has 2 parts in one and 1 in another"),
        ([(object(), 0)] * 2, "part 1 of a sample is a object"),
        ([np.array(["a"])] * 2, "a sample is an array of <U1"),
        ([np.array(["2026"], "M8[D]")] * 2, r"a sample is an array of datetime64\[D\]"),
        ([{"y": np.int64(1), "p": Path("a")}] * 2, "'p' is a PosixPath"),
        ([{"y": np.bool_(1), "name": np.str_("a"), "raw": b"a", "p": None}] * 2, "'p' is a NoneType"),
        ([{"y": Kind.ONE, "when": datetime(2026, 1, 1)}] * 2, "'when' is a datetime"),
        ([{"y": 1, "d": np.datetime64("2026")}, {"y": np.int64(1), "d": np.datetime64("2026")}], "'d' is a datetime64"),
        ([{"y": 1, "at": [1, 2], "of": {"p": Decimal(1)}}, {"y": 1.5, "at": (1, 2), "of": {"p": Decimal(2)}}],
         "'p' of 'of' is a Decimal"),
        ([(np.int64(1), Fraction(1, 2))] * 2, "part 2 of a sample is a Fraction"),
        ([[1, X], (1, X[:2])], r"part 2 of a sample has the shape \(3, 2\) in one and \(2, 2\)"),
        ([{"y": 1}, {"y": np.int64(1)}, {"y": None}], "'y' is a int in one and a NoneType in another"),
        ([{"y": 1}, {"y": 2**70}], "'y' has a number beyond 64 bits"),
    ],
)  # fmt: skip
def test_samples_that_make_no_batch_are_named_with_what_to_write(samples, said):
    with pytest.raises(DataError, match=rf"the samples of Samples make no batch, as {said}.*collate\(self, samples\)"):
        make_batch(Samples(*samples), Indices(range(len(samples))))


@pytest.mark.parametrize(
    "sample",
    [
        10**400, np.array(["a"]), np.array([None]), np.array(["2026-01-01"], dtype="datetime64[D]"), np.complex64(1j),
        torch.eye(3).to_sparse(), {"x": [np.array(["a"]), 1.0]}, object(),
    ],
    ids=["large", "texts", "objects", "dates", "complex", "sparse", "nested", "object"],
)  # fmt: skip
def test_what_has_no_numbers_can_be_compared_with_all(sample):
    assert alike(summary(sample), summary(sample))


def test_an_array_is_compared_by_its_numbers_whatever_its_strides():
    mirrored = np.arange(6.0).reshape(2, 3)[:, ::-1]
    assert alike(summary(mirrored), summary(torch.tensor([[2.0, 1.0, 0.0], [5.0, 4.0, 3.0]])))
    assert not alike(summary(mirrored), summary(mirrored.copy() + 1))
