"""Tensors that are read from files of torch's DCP, whole and in pieces."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from ddp_hydra import results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.errors import CheckpointError
from ddp_hydra.record import METADATA
from ddp_hydra.training import plain_state, sharded_checkpoint
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.sharded_checkpoint import offset_of, read_into

GENERATOR = torch.Generator().manual_seed(0)
WHOLE = {
    "vector": torch.randn(7, generator=GENERATOR),
    "matrix": torch.randn(6, 5, generator=GENERATOR),
    "half": torch.randn(3, 4, generator=GENERATOR).bfloat16(),
    "flags": torch.rand(9, generator=GENERATOR) > 0.5,
    "numbers": torch.arange(6).reshape(2, 3),
    "empty": torch.empty(0, 3),
    "view": torch.randn(4, 6, generator=GENERATOR)[1:3],
    "turned": torch.randn(4, 6, generator=GENERATOR).T,
    "last": torch.randn(2, 3, 4, 4, generator=GENERATOR).to(memory_format=torch.channels_last),
}
BY_TORCH = {"turned", "last"}
"""Their bytes are in another order than in memory."""


@pytest.fixture
def folder(tmp_path, group) -> Path:
    """A folder in which these tensors are saved."""
    saved = tmp_path / "saved"
    saved.mkdir()
    results.connect(DirectSender(print, tmp_path))
    owners, files = sharded_checkpoint.write(WHOLE, saved, dist.group.WORLD, 1)
    (name,) = owners.keys() & files.keys()
    assert files[name].sha256.digest() == hashlib.sha256((saved / name).read_bytes()).digest()
    return saved


def read(folder: Path) -> dict[str, torch.Tensor]:
    content = {"model": {name: {sharded_checkpoint.KIND: sharded_checkpoint.PART, "value": name} for name in WHOLE}}
    return sharded_checkpoint.read(content, folder)["model"]


def test_what_is_in_one_piece_is_read_once_and_the_rest_by_torch(folder, monkeypatch):
    left: list[str] = []
    by_torch = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        left.extend(item.dest_index.fqn for item in plan.items)
        return by_torch(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    found = read(folder)
    assert set(left) == BY_TORCH
    plain = {name: torch.empty_like(tensor) for name, tensor in WHOLE.items()}
    dcp.load(plain, checkpoint_id=folder)
    for name, tensor in WHOLE.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(plain[name], tensor), name
        assert found[name].dtype == tensor.dtype


def test_tensors_in_dicts_lists_and_tuples_are_parts_and_the_rest_is_as_it_was():
    one, last = torch.ones(2), deque([torch.zeros(3)], 2)
    slots = {"dict": {"a": one, 0: "text"}, "list": [one * 2, (one * 3, None)], "deque": last, "scalar": torch.ones(())}
    content = plain_state.encode({"optimizer": {"state": {"weight": slots}}, "position": [one]})
    apart, tensors = sharded_checkpoint.taken_apart(content)
    names = ["dict.a", "list.0", "list.1.0", "deque.value.0.0"]
    assert list(tensors) == [f"optimizer.state.weight.{name}" for name in names]
    assert list(sharded_checkpoint.names_in(apart)) == list(tensors)
    together = plain_state.decode(sharded_checkpoint.put_together(apart, tensors))
    found = together["optimizer"]["state"]["weight"]
    assert str(found) == str(slots)
    assert found["deque"].maxlen == 2
    assert torch.is_tensor(together["position"][0])


def test_a_tensor_that_lies_at_several_places_is_written_once_and_is_one_tensor_again():
    shared, other = torch.ones(2), torch.ones(2)
    content = {"optimizer": {"state": {"a": {"sum": shared}, "b": {"sum": [shared, other]}}}}
    apart, tensors = sharded_checkpoint.taken_apart(content)
    assert list(tensors) == ["optimizer.state.a.sum", "optimizer.state.b.sum.1"]
    found = sharded_checkpoint.put_together(apart, {name: one.clone() for name, one in tensors.items()})
    a, b = found["optimizer"]["state"].values()
    assert a["sum"] is b["sum"][0] is not b["sum"][1]


def test_a_tensor_in_a_slot_is_read_as_a_share_of_the_slots_parameter(monkeypatch):
    parallel = Parallel().adopt(nn.Sequential(nn.Linear(2, 3)))
    monkeypatch.setattr(parallel, "empty_shard", lambda parameter, *_: parameter)
    like = parallel.read_targets()
    for name in ("state.0.weight.mean", "adam.state.0.weight.more.mean", "state.0.weight.last.value.0.1"):
        assert like(f"optimizer.{name}", torch.Size([3, 2]), torch.float32) is parallel.model[0].weight
    for name in ("others.0.weight.mean", "state.0.more"):
        assert like(f"optimizer.{name}", torch.Size([3, 2]), torch.float32) is None


@pytest.mark.parametrize("name", ["matrix", "half", "view", "numbers"])
def test_rows_are_in_one_piece_and_columns_are_not(name, tmp_path):
    tensor = WHOLE[name].clone()
    torch.save(tensor, tmp_path / "saved")
    rows, columns = tensor[1:], tensor[:, 1:]
    with (tmp_path / "saved").open("rb", buffering=0) as file:

        def place(begin: tuple[int, int], target: torch.Tensor) -> int | None:
            file.seek(0)
            return offset_of(file, SimpleNamespace(storage_offsets=begin, lengths=tuple(target.shape)), target)

        target = torch.empty_like(rows)
        read_into(target, file, place((1, 0), target))
        assert torch.equal(target, rows)
        assert place((0, 1), torch.empty(columns.shape, dtype=tensor.dtype)) is None
        assert place((0, 0), tensor.to(torch.float64)) is None  # it is converted


def test_a_file_that_is_cut_off_is_no_checkpoint(folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match="can't be read as a checkpoint"):
        read(folder)


def test_a_description_that_names_a_file_outside_of_the_folder_is_refused(folder, tmp_path):
    (file,) = folder.glob("*.distcp")
    shutil.copy(file, tmp_path / "outside")
    description = folder / METADATA
    content = pickle.loads(description.read_bytes())
    for info in content.storage_data.values():
        info.relative_path = "../outside"
    description.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"names \.\./outside, which is outside of its folder"):
        read(folder)
