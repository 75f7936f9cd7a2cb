from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from ddp_hydra.data.processes import shared_batch
from ddp_hydra.data.processes.shared_batch import Slot, mapped, read

Pair = namedtuple("Pair", "x y")


@dataclass
class Named:
    tensor: torch.Tensor
    name: str


@pytest.fixture
def slot():
    one = Slot()
    yield one
    one.close()


def through(slot: Slot, batch):
    structure = slot.write(batch)
    return read(structure, mapped(slot.path) if slot.path else None, torch.Tensor.clone)


def test_a_batch_of_any_structure_comes_back(slot):
    x = torch.arange(24.0).reshape(2, 3, 4)
    batch = {"pair": Pair(x, [torch.tensor(3), "text"]), "named": Named(torch.zeros(0, 5), "a"), "none": None}
    found = through(slot, batch)
    assert type(found["pair"]) is Pair
    assert torch.equal(found["pair"].x, x)
    assert found["pair"].y == [torch.tensor(3), "text"]
    assert found["named"].tensor.shape == (0, 5)
    assert found["none"] is None


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_kinds_of_numbers(slot, dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    found = through(slot, (tensor, torch.ones(1)))
    assert found[0].dtype == dtype
    assert torch.equal(found[0], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(120).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.ones(1).expand(4, 3),
        torch.tensor(7),
    ],
    ids=["channels last", "transposed", "gaps", "expanded", "scalar"],
)
def test_a_dense_tensor_keeps_its_layout(slot, tensor):
    found = through(slot, [tensor])[0]
    assert torch.equal(found, tensor)
    assert found.stride() == torch.empty_like(tensor).stride()


def test_other_tensors_are_pickled(slot):
    sparse = torch.eye(3).to_sparse()
    parameter = torch.nn.Parameter(torch.ones(2))
    found = through(slot, [sparse, parameter, torch.ones(2, requires_grad=True)])
    assert torch.equal(found[0].to_dense(), torch.eye(3))
    assert isinstance(found[1], torch.nn.Parameter)
    assert found[2].requires_grad


def test_the_memory_grows_and_is_used_again(slot):
    through(slot, torch.ones(10))
    first = slot.path
    through(slot, torch.ones(5))
    assert slot.path == first
    memory = mapped(slot.path)
    large = torch.arange(10_000)
    assert torch.equal(through(slot, large), large)
    assert len(memory) == 40  # who maps the old memory still has it


def test_where_there_is_no_such_memory_tensors_are_pickled(slot, monkeypatch):
    monkeypatch.delattr(shared_batch.os, "memfd_create")
    assert torch.equal(through(slot, torch.ones(3)), torch.ones(3))
    assert slot.path == ""
