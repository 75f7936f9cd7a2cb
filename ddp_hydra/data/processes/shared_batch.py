"""Writes a batch into memory that two processes share, and reads it there. Only its structure is pickled."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64
"""Tensors begin at multiples of so many bytes, as torch's own do."""


class Slot:
    """Memory for one batch at a time, in no file system. It grows with the batches.

    Attributes:
        path: by which another process of this user can map it; "" where there is none. It may stay the same when the
            slot grows.
        size: bytes.
    """

    def __init__(self) -> None:
        self.path = ""
        self._fd = -1
        self._memory: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Return how many bytes it has."""
        return 0 if self._memory is None else len(self._memory)

    def write(self, batch: Any) -> bytes:
        """Copy the tensors of a batch to this memory; return the rest of the batch for `read`."""
        placed: list[tuple[int, Tensor]] = []
        end = 0

        def place(tensor: Tensor) -> tuple[Any, ...]:
            nonlocal end
            dense = tensor if torch.empty_like(tensor).stride() == tensor.stride() else tensor.contiguous()
            begin = -(-end // ALIGNED) * ALIGNED
            end = begin + dense.nbytes
            placed.append((begin, dense))
            return begin, dense.dtype, tuple(dense.shape), dense.stride()

        structure = io.BytesIO()
        _Pickler(structure, place if hasattr(os, "memfd_create") else None).dump(batch)
        if end:
            memory = self._of_size(end)
            for begin, tensor in placed:
                view(memory, begin, tensor.dtype, tuple(tensor.shape), tensor.stride()).copy_(tensor)
        return structure.getvalue()

    def _of_size(self, n_bytes: int) -> mmap.mmap:
        """Return memory of at least this size."""
        if self._memory is None or self.size < n_bytes:
            self.close()
            self._fd = os.memfd_create("ddp_hydra-batch")
            os.ftruncate(self._fd, n_bytes)
            self._memory = mmap.mmap(self._fd, n_bytes)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return self._memory

    def close(self) -> None:
        """Give the memory back, once no other process maps it."""
        if self._fd >= 0:
            os.close(self._fd)
        self.path, self._fd, self._memory = "", -1, None


def mapped(path: str) -> mmap.mmap:
    """Map the memory of another process's slot."""
    with Path(path).open("r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), 0)


def read(structure: bytes, memory: mmap.mmap | None, own: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch that a slot holds.

    Args:
        structure: what `Slot.write` returned.
        memory: the slot's; None if the batch has no tensors.
        own: returns a copy of a tensor, as the slot's memory is used again.
    """
    return _Unpickler(io.BytesIO(structure), lambda place: own(view(memory, *place))).load()


def view(memory: Any, begin: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a dense tensor that lies in memory, `begin` bytes behind its start."""
    n = math.prod(shape)
    flat = torch.frombuffer(memory, dtype=dtype, count=n, offset=begin) if n else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride)


class _Pickler(pickle.Pickler):
    """Pickles a batch; of plain tensors only the place.

    Args:
        file: gets the result.
        place: returns the place of a tensor; None: tensors are pickled, too.
    """

    def __init__(self, file: io.BytesIO, place: Callable[[Tensor], tuple[Any, ...]] | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.place = place

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the place of a plain tensor, and None for all else."""
        if self.place is None or type(obj) is not Tensor or obj.layout != torch.strided:
            return None
        return None if obj.is_quantized or obj.requires_grad or obj.device.type != "cpu" else self.place(obj)


class _Unpickler(pickle.Unpickler):
    """Unpickles a batch, and puts its tensors where they were.

    Args:
        file: has the pickled batch.
        tensor_at: returns the tensor of a place.
    """

    def __init__(self, file: io.BytesIO, tensor_at: Callable[[tuple[Any, ...]], Tensor]) -> None:
        super().__init__(file)
        self.tensor_at = tensor_at

    def persistent_load(self, pid: tuple[Any, ...]) -> Tensor:
        """Return the tensor of a place."""
        return self.tensor_at(pid)
