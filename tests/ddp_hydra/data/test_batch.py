"""Batches of any structure."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_hydra.data.batch import alike, described, laid_out, make_batch, mapped, n_bytes, summary, to_device
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
