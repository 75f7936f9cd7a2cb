"""Pickles a data set for workers: what lies in a mapped file is mapped there, too, in place of a copy in each worker.

As in a copy, what a worker writes there stays in the worker.

Arrays and tensors of np.memmap, np.load(mmap_mode=…) and torch.load(mmap=True) lie in such files, and so do their
views. Linux tells the file of an address; elsewhere, and of files that are gone, all is copied.
"""

from __future__ import annotations

import contextlib
import io
import re
import stat
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from ddp_hydra.pickler import Pickler

SMAPS = Path("/proc/self/smaps")
_BEGIN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r..(.) ([0-9a-f]+) \S+ (\d+) +(/.*)")
_CHANGED = re.compile(r"(?:Anonymous|Swap): +[1-9]")
MOST_FILES = 100
"""How many files a worker maps, each of which stays open; what lies in others is copied."""


class Region(NamedTuple):
    """Addresses, from `begin` to before `end`, at which a file is mapped from its byte `offset` on."""

    begin: int
    end: int
    offset: int
    inode: int
    path: str


def regions() -> list[Region]:
    # Those that hold what their files hold: a process may have written to a private one.
    found: list[Region] = []
    is_private = False
    with contextlib.suppress(OSError), SMAPS.open(errors="surrogateescape") as lines:  # not on every system
        for line in lines:
            if line[0] in "0123456789abcdef":
                is_private = False
                if (match := _BEGIN.match(line)) is not None:
                    begin, end, kind, offset, inode, path = match.groups()
                    is_private = kind == "p"
                    found.append(Region(int(begin, 16), int(end, 16), int(offset, 16), int(inode), path))
            elif is_private and _CHANGED.match(line):
                is_private = False
                found.pop()
    return found


class MappedFile:
    """A file that a worker maps once for all that lies in it."""

    def __init__(self, path: str, inode: int) -> None:
        self.path, self.inode, self.n_bytes = path, inode, 0  # 0: the file is no more
        with contextlib.suppress(OSError):
            found = Path(path).stat()
            if stat.S_ISREG(found.st_mode) and found.st_ino == inode:
                self.n_bytes = found.st_size

    def __reduce__(self) -> Any:
        return file_mapped, (self.path, self.inode, self.n_bytes)


def file_mapped(path: str, inode: int, n_bytes: int) -> np.memmap:
    found = np.memmap(path, np.uint8, "c")
    if Path(path).stat().st_ino != inode or found.nbytes < n_bytes:
        raise OSError(f"{path} is another file than when the data set was made")
    return found


class _DataPickler(Pickler):
    """Pickles arrays and tensors that lie in mapped files by their places there."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.regions = regions()
        self.begins = [region.begin for region in self.regions]
        self.files: dict[tuple[str, int], MappedFile] = {}
        self.used: set[Region] = set()

    def reducer_override(self, obj: Any) -> Any:
        made = None
        if type(obj) in (np.ndarray, np.memmap):
            made = self._array(obj)
        elif type(obj) is Tensor:
            made = self._tensor(obj)
        return made or super().reducer_override(obj)

    def _array(self, array: Any) -> Any:
        if not array.nbytes or array.dtype.hasobject:
            return None
        first = array.__array_interface__["data"][0]
        steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
        low, high = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + array.itemsize
        if (found := self._found(first + low, first + high)) is None:
            return None
        file, place = found
        known = None
        if type(array) is np.memmap:  # to open a file by w+ would empty it
            known = array.filename, array.offset, "r+" if array.mode == "w+" else array.mode
        writeable = array.flags.writeable
        return array_in, (file, array.shape, array.dtype, place - low, array.strides, writeable, known)

    def _tensor(self, tensor: Tensor) -> Any:
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            return None
        if not tensor.nbytes:
            return None
        n = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        if (found := self._found(begin, begin + n * tensor.itemsize)) is None:
            return None
        file, place = found
        return tensor_in, (file, n, tuple(tensor.shape), tensor.dtype, place, tensor.stride())

    def _found(self, begin: int, end: int) -> tuple[MappedFile, int] | None:
        number = bisect_right(self.begins, begin) - 1
        if number < 0 or begin >= self.regions[number].end:
            return None
        region = self.regions[number]
        key, place = (region.path, region.inode), begin - region.begin + region.offset
        if key not in self.files:
            if sum(file.n_bytes > 0 for file in self.files.values()) == MOST_FILES:
                return None
            self.files[key] = MappedFile(*key)
        if end > region.end or place + end - begin > self.files[key].n_bytes:
            return None
        self.used.add(region)
        return self.files[key], place


def pickled(data: Any) -> bytes:
    with io.BytesIO() as file:
        pickler = _DataPickler(file)
        pickler.dump(data)
        # What pickling itself has made may lie where a file was mapped before.
        is_right = not pickler.used or pickler.used <= set(regions())
        return file.getvalue() if is_right else cloudpickle.dumps(data)


def array_in(
    file: Any, shape: Any, dtype: Any, place: int, strides: Any, writeable: bool, known: tuple[Any, ...] | None
) -> Any:
    # known: file name, offset and mode of an np.memmap; None: it is a plain array.
    found: Any = np.ndarray.__new__(np.ndarray if known is None else np.memmap, shape, dtype, file, place, strides)
    found.flags.writeable = writeable and file.flags.writeable
    if known is not None:
        found.__array_finalize__(file)  # so that its views are np.memmap, too
        found.filename, found.offset, found.mode = known
    return found


def tensor_in(file: Any, n: int, shape: Any, dtype: torch.dtype, place: int, stride: Any) -> Tensor:
    return torch.frombuffer(file, dtype=dtype, count=n, offset=place).as_strided(shape, stride)
