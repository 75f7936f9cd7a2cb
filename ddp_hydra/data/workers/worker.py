"""What runs in a worker: makes batches of its copy of the data set, and says what the copy has learned."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tblib
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ddp_hydra import forked, heartbeat, results
from ddp_hydra.data import draws
from ddp_hydra.data.batch import make_batch, pin
from ddp_hydra.data.draws import EVALUATION, Indices
from ddp_hydra.data.workers.helper import Fd
from ddp_hydra.data.wrappers import unwrapped

ALIGNED = 64
"""Tensors begin at multiples of this number of bytes, as torch's own do."""


class SharedBatch:
    """A batch that travels to another process."""

    def __init__(self, batch: Any) -> None:
        placed: list[tuple[int, Tensor]] = []
        self.size, self.fd = 0, -1

        def place_if_plain(part: Any) -> tuple[Any, ...] | None:
            if type(part) is not Tensor or part.layout != torch.strided or part.is_quantized or part.requires_grad:
                return None
            if part.device.type != "cpu" or part.is_nested:
                return None
            dense = part if torch.empty_like(part).stride() == part.stride() else part.contiguous()
            begin = -(-self.size // ALIGNED) * ALIGNED
            self.size = begin + dense.nbytes
            placed.append((begin, dense))
            return begin, dense.dtype, tuple(dense.shape), dense.stride()

        structure = io.BytesIO()
        pickler = pickle.Pickler(structure, pickle.HIGHEST_PROTOCOL)
        if hasattr(os, "memfd_create"):  # else tensors are pickled, too
            pickler.persistent_id = place_if_plain  # type: ignore[method-assign]
        pickler.dump(batch)
        self.structure = structure.getvalue()
        if self.size:
            self.fd = os.memfd_create("ddp_hydra-batch")
            os.ftruncate(self.fd, self.size)
            memory = mmap.mmap(self.fd, self.size)
            for begin, tensor in placed:
                _view(memory, begin, tensor.dtype, tuple(tensor.shape), tensor.stride()).copy_(tensor)

    def __getstate__(self) -> tuple[bytes, int, Any]:
        return self.structure, self.size, Fd(self.fd) if self.size else -1

    def __setstate__(self, state: tuple[bytes, int, Any]) -> None:
        self.structure, self.size, self.fd = state

    def open(self) -> Any:
        memory = mmap.mmap(self.fd, self.size) if self.size else None
        self.__del__()
        unpickler = pickle.Unpickler(io.BytesIO(self.structure))  # noqa: S301  from a process that this one has started
        unpickler.persistent_load = lambda place: _view(memory, *place)  # type: ignore[method-assign]
        return unpickler.load()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)
            self.fd = -1


def _view(memory: Any, begin: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    # Return a dense tensor that lies in memory, `begin` bytes behind its start.
    n = math.prod(shape)
    flat = torch.frombuffer(memory, dtype=dtype, count=n, offset=begin) if n else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride)


class Request(NamedTuple):
    """A batch that a worker is to make."""

    indices: Indices
    expect: list[int] | None  # all samples that the worker will read in this pass, in order; None: as it was told


@dataclass
class Result:
    """What comes back."""

    batch: Any = None
    worker: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)  # what the worker's copy of the data set has learned
    error: bytes = b""  # pickled
    frames: Mapping[str, Any] | None = None  # the traceback of the error, as plain values
    refused: str = ""  # why the data set can't be unpickled

    def pin_memory(self) -> Result:
        if isinstance(self.batch, SharedBatch):
            self.batch = pin(self.batch.open())
        return self

    def opened(self) -> Any:
        if self.error:
            error: BaseException = pickle.loads(self.error)  # noqa: S301  from a process that this one has started
            raise error.with_traceback(tblib.Traceback.from_dict(self.frames).as_traceback())
        return self.batch.open() if isinstance(self.batch, SharedBatch) else self.batch


class WorkerSet:
    """The data set of the DataLoader, which makes whole batches."""

    def __init__(self, pickled: bytes, seeded: bool, workers: int) -> None:
        self.pickled, self.seeded, self.workers = pickled, seeded, workers
        self.dataset: Any = None
        self.epoch: int | None = None
        self.told = 0  # bad samples

    def __getitem__(self, request: Request) -> Result:
        info: Any = get_worker_info()
        if self.dataset is None:
            try:
                self.dataset = pickle.loads(self.pickled)  # noqa: S301  from the process that started this one
                self.pickled = b""
            except Exception as error:
                return Result(refused=f"{type(error).__name__}: {error}")
            object.__setattr__(info, "dataset", unwrapped(self.dataset))  # the user's code may ask it for the data set
            if hasattr(self.dataset, "share"):
                self.dataset.share(self.workers)
        try:
            return Result(SharedBatch(self._make(request)), info.id, self._report(request.indices))
        except BaseException as error:
            frames = tblib.Traceback(error.__traceback__).to_dict()
            return Result(worker=info.id, error=_packed(error), frames=frames)

    def _make(self, request: Request) -> Any:
        epoch = request.indices.epoch
        if epoch not in (self.epoch, EVALUATION):
            self.epoch = epoch
            draws.tell_epoch(self.dataset, epoch, request.indices.seed)
        if request.expect is not None:
            self.dataset.expect(request.expect)
        return make_batch(self.dataset, request.indices, self.seeded, heartbeat.progress)

    def _report(self, indices: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if logged := results.take_means():
            found["logged"] = {name: (float(total), n) for name, (total, n) in logged.items()}
        if hasattr(self.dataset, "stats"):
            found["stats"] = self.dataset.stats()
        bad = getattr(self.dataset, "bad", None) or {}
        if len(bad) > self.told:
            self.told = len(bad)
            found |= {"bad": dict(bad), "bad_counts": dict(getattr(self.dataset, "bad_counts", {}))}
        if bad and hasattr(self.dataset, "error_of"):
            found["errors"] = {index: error for index in indices if (error := self.dataset.error_of(index))}
        return found


def begin(number: int) -> None:
    # Prepare a worker: what signals a whole rank asks of it is the rank's to decide.
    forked.ignore_signals()


def _packed(error: BaseException) -> bytes:
    error.add_note("in a worker of the DataLoader (data.workers)")
    try:
        packed = pickle.dumps(error.with_traceback(None))
        pickle.loads(packed)  # noqa: S301  some can be pickled, and not unpickled
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.add_note(error.__notes__[-1])
        return pickle.dumps(substitute)
    return packed
