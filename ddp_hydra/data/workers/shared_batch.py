"""A batch in memory that two processes share. Only its structure is pickled.

The memory belongs to no file system, so it needs no room in /dev/shm, which containers often have little of.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from ddp_hydra.data.batch import pin

ALIGNED = 64
"""Tensors begin at multiples of so many bytes, as torch's own do."""


class SharedBatch:
    """A batch that travels to another process.

    Args:
        batch: of any structure.
    """

    def __init__(self, batch: Any) -> None:
        placed: list[tuple[int, Tensor]] = []
        self.size, self.fd = 0, -1

        def place(tensor: Tensor) -> tuple[Any, ...]:
            dense = tensor if torch.empty_like(tensor).stride() == tensor.stride() else tensor.contiguous()
            begin = -(-self.size // ALIGNED) * ALIGNED
            self.size = begin + dense.nbytes
            placed.append((begin, dense))
            return begin, dense.dtype, tuple(dense.shape), dense.stride()

        structure = io.BytesIO()
        _Pickler(structure, place if hasattr(os, "memfd_create") else None).dump(batch)
        self.structure = structure.getvalue()
        if self.size:
            self.fd = os.memfd_create("ddp_hydra-batch")
            os.ftruncate(self.fd, self.size)
            memory = mmap.mmap(self.fd, self.size)
            for begin, tensor in placed:
                _view(memory, begin, tensor.dtype, tuple(tensor.shape), tensor.stride()).copy_(tensor)

    def __getstate__(self) -> tuple[bytes, int, Any]:
        return self.structure, self.size, reduction.DupFd(self.fd) if self.size else None

    def __setstate__(self, state: tuple[bytes, int, Any]) -> None:
        self.structure, self.size, fd = state
        self.fd = fd.detach() if self.size else -1

    def open(self) -> Any:
        """Return the batch; its tensors lie in the shared memory."""
        memory = mmap.mmap(self.fd, self.size) if self.size else None
        self.__del__()
        return _Unpickler(io.BytesIO(self.structure), lambda place: _view(memory, *place)).load()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)
            self.fd = -1


def pinned(batch: SharedBatch) -> Any:
    """Return a batch in pinned memory."""
    return pin(batch.open())


def _view(memory: Any, begin: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
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
