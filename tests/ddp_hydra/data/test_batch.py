"""Batches of any structure."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.data.batch import described, laid_out, mapped, n_bytes, to_device

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
    assert described((X, X.long())) == "x (3, 2) float32, y (3, 2) int64"
    assert described({"ids": X.long(), "more": [X, "a"]}) == "ids (3, 2) int64, more [(3, 2) float32, str]"
    assert described(Sample(X, "cat")) == "pixels (3, 2) float32, name str"
    assert described([X] * 6) == "[" + ", ".join(["(3, 2) float32"] * 4) + ", …]"
