"""What lies in a mapped file is mapped in workers, too; all else is copied."""

from __future__ import annotations

import io
import pickle
import sys

import numpy as np
import pytest
import torch

from ddp_hydra.data.workers import mapped
from ddp_hydra.data.workers.mapped import pickled, regions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the files of addresses")
SIZE = 1 << 20


def arrived(value):
    """Return a value as a worker gets it."""
    return pickle.loads(pickled(value))


def travels(value) -> bool:
    """Return whether the content of a value is copied to a worker."""
    return len(pickled(value)) > SIZE


def is_mapped(address: int) -> bool:
    return any(region.begin <= address < region.end for region in regions())


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "a file.npy"
    np.save(file, np.arange(SIZE, dtype=np.int32).reshape(1024, 1024))
    return file


VIEWS = {
    "whole": lambda a: a,
    "rows": lambda a: a[3:900],
    "columns": lambda a: a[:, 5:],
    "backwards": lambda a: a[::-2, ::-1],
    "turned": lambda a: a.T,
    "one": lambda a: a[7, 9:10],
    "bytes": lambda a: a.view(np.uint8)[:, 1:],
    "plain": np.asarray,
    "repeated": lambda a: np.broadcast_to(a[5], (2048, 1024)),
}


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_memmap_lie_in_the_same_file(path, mode, view):
    array = VIEWS[view](np.load(path, mmap_mode=mode))
    found = arrived({"data": [array]})["data"][0]
    assert not travels(array)
    assert is_mapped(found.__array_interface__["data"][0])
    assert np.array_equal(found, array)
    assert type(found) is type(array)
    assert (found.dtype, found.strides) == (array.dtype, array.strides)
    assert found.flags.writeable == array.flags.writeable
    if isinstance(array, np.memmap):
        assert (found.filename, found.mode, found.offset) == (array.filename, mode, array.offset)
        assert found[:1].filename == array.filename


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_what_a_worker_writes_stays_there_as_in_a_copy(path, mode):
    array = np.load(path, mmap_mode=mode)
    found = arrived([array, torch.from_numpy(array)])
    found[0][1, 1] = -1
    found[1][1, 2] = -2
    assert (array[1, 1], array[1, 2]) == (1025, 1026)
    assert np.array_equal(np.load(path), array)


def test_a_file_that_was_replaced_since_is_refused(path):
    content = pickled(np.load(path, mmap_mode="r"))
    replaced(path)
    with pytest.raises(OSError, match=r"a file\.npy is another file than when the data set was made"):
        pickle.loads(content)


def test_what_lies_in_very_many_files_is_copied(path, monkeypatch, tmp_path):
    monkeypatch.setattr(mapped, "MOST_FILES", 1)
    np.save(tmp_path / "second.npy", np.ones(SIZE, np.int32))
    both = [np.load(path, mmap_mode="r"), np.load(tmp_path / "second.npy", mmap_mode="r")]
    assert [is_mapped(one.__array_interface__["data"][0]) for one in arrived(both)] == [True, False]
    assert all(map(np.array_equal, arrived(both), both))


def test_files_that_are_no_more_take_no_place(path, monkeypatch, tmp_path):
    monkeypatch.setattr(mapped, "MOST_FILES", 1)
    np.save(tmp_path / "gone.npy", np.ones(8, np.int32))
    both = [np.load(tmp_path / "gone.npy", mmap_mode="r"), np.load(path, mmap_mode="r")]
    (tmp_path / "gone.npy").unlink()
    assert [is_mapped(one.__array_interface__["data"][0]) for one in arrived(both)] == [False, True]


def test_a_new_file_is_not_made_anew(tmp_path):
    array = np.memmap(tmp_path / "new", np.float32, "w+", shape=(SIZE,))
    array[:] = 3
    found = arrived(array)
    assert (found == 3).all()
    assert found.mode == "r+"


def test_one_mapping_serves_all_that_lies_in_a_file(path):
    array = np.load(path, mmap_mode="r")
    before = len(regions())
    found = arrived(list(array))
    assert len(regions()) == before + 1
    assert np.array_equal(np.stack(found), array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
def test_tensors_of_a_mapped_checkpoint_lie_in_it(tmp_path, dtype):
    values = torch.arange(SIZE).to(dtype).reshape(1024, -1)
    torch.save({"one": torch.zeros(3), "two": values, "part": values[:, 3:]}, tmp_path / "data.pt")
    content = torch.load(tmp_path / "data.pt", mmap=True)
    given = {**content, "turned": content["two"].T, "row": content["two"][5]}
    assert not travels(given)
    found = arrived(given)
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()
    assert is_mapped(found["two"].data_ptr())
    found["two"][0, 0] = 7  # as in the process itself, the file stays
    assert torch.load(tmp_path / "data.pt")["two"][0, 0] == 0


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_tensor_over_an_array_lies_in_its_file(path, mode):
    tensor = torch.from_numpy(np.load(path, mmap_mode=mode))
    assert not travels(tensor)
    assert torch.equal(arrived(tensor), tensor)


def changed(path):
    array = np.load(path, mmap_mode="c")
    array[5, 5] = -1
    return array


def deleted(path):
    array = np.load(path, mmap_mode="r")
    path.unlink()
    return array


def replaced(path):
    array = np.load(path, mmap_mode="r")
    np.save(path.with_name("other.npy"), np.zeros_like(array))
    path.with_name("other.npy").replace(path)
    return array


class Own(np.ndarray):
    """An array of a class of its own."""


@pytest.mark.parametrize(
    "make",
    [
        changed,
        deleted,
        replaced,
        lambda path: np.load(path),
        lambda path: np.load(path, mmap_mode="r") + 0,
        lambda path: torch.from_numpy(changed(path)),
        lambda path: np.load(path, mmap_mode="r").view(Own),
        lambda path: torch.from_numpy(np.load(path, mmap_mode="r+")).float().requires_grad_(),
        lambda path: torch.from_numpy(np.load(path)).share_memory_(),
    ],
    ids=["changed", "deleted", "replaced", "read", "computed", "a tensor", "a class", "trained", "shared"],
)
def test_all_else_is_copied(path, make):
    value = make(path)
    assert travels(value)
    assert (
        np.array_equal(arrived(value), value) if isinstance(value, np.ndarray) else torch.equal(arrived(value), value)
    )


class Unmaps:
    """Lets go of a file while it is pickled."""

    def __init__(self, path, monkeypatch) -> None:
        self.array, self.monkeypatch = np.load(path, mmap_mode="r"), monkeypatch

    def __getstate__(self):
        self.monkeypatch.setattr(mapped, "regions", list)
        return {"array": self.array}


def test_what_is_no_more_mapped_when_all_is_pickled_is_copied(path, monkeypatch):
    assert travels(Unmaps(path, monkeypatch))


def test_a_system_that_tells_no_files_copies(path, monkeypatch, tmp_path):
    monkeypatch.setattr(mapped, "SMAPS", tmp_path / "none")
    assert travels(np.load(path, mmap_mode="r"))


def test_what_cloudpickle_takes_is_taken():
    n = 3
    assert arrived(lambda x: x + n)(4) == 7
    assert arrived(io.StringIO).__name__ == "StringIO"


def test_an_open_text_file_is_refused_as_by_pickle(tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("ä\nb\n", encoding="utf-8")
    refused = pytest.raises(TypeError, match=r"cannot pickle '_io\.TextIOWrapper' object")
    with (tmp_path / "lines.txt").open(encoding="utf-8") as file, refused:
        pickled({"file": file})
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert arrived([sys.stdout]) == [sys.stdout]
