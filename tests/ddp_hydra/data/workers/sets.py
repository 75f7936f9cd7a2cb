"""Data sets for workers, in a module that a worker imports in no time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import get_worker_info

Row = namedtuple("Row", "row pid epoch told text")


class Rows:
    """Sample i is a row of i, and who made it."""

    def __init__(self, n: int = 100, bad: int = -1, dies: int = -1) -> None:
        self.n, self.bad_index, self.dies = n, bad, dies
        self.epoch, self.told = 0, ()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Row:
        if index == self.bad_index:
            raise KeyError(f"row {index} is not there")
        if index == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        row = torch.full((3, 2), index, dtype=torch.int16)
        return Row(row, os.getpid(), self.epoch, len(self.told), f"row {index}")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Ending(Rows):
    """Starts a program and a fork for each sample, and ends them; it tells their exit codes."""

    def __getitem__(self, index: int) -> Row:
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
        fork.start()
        for process in (program, fork):
            process.terminate()
        fork.join()
        return super().__getitem__(index)._replace(told=(program.wait(), fork.exitcode))


class Unpicklable(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Unreadable(Rows):
    def __setstate__(self, state: dict) -> None:
        raise OSError("not here")


class Announced(Rows):
    def expect(self, indices: list[int]) -> None:
        self.told = tuple(indices)


class Noisy:
    """A transform of a user, which draws from the global generators."""

    def __call__(self, image):
        pixels = np.array(image.resize((8, 8)), dtype=np.float32).transpose(2, 0, 1)
        return torch.from_numpy(pixels) + torch.rand(3, 8, 8) + float(np.random.rand())


class Drawing(Rows):
    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item() + float(np.random.rand())


class Permuted(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(96).tolist() if epoch % 2 else np.random.permutation(96).tolist()

    def __getitem__(self, index: int) -> int:
        return self.order[index]


class Ends(Rows):
    """Ends the reading at its fifth sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Row:
        if index == 4 and self.how == "exits":
            sys.exit(0)
        return super().__getitem__(next(iter([]) if index == 4 else iter([index])))


class RawFile(Rows):
    """Reads a file by the number of its descriptor."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(bytes(range(100)))
        self.files = [os.open(path, os.O_RDONLY) for _ in range(12)]

    def __getitem__(self, index: int) -> tuple[int, bool]:
        (read,) = os.pread(self.files[index % 12], 1, index)
        info = get_worker_info()
        return read, info is not None and isinstance(info.dataset, RawFile)


class Wordy(Rows):
    """Samples whose text needs more room than a socket has."""

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        return row._replace(text=row.text * 200_000)


class Leaving(Rows):
    def __getitem__(self, index: int) -> Row:
        return os._exit(0) if index == 9 else super().__getitem__(index)


class Mapped(Rows):
    """Tells of each sample whether the array that it is in is mapped."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        np.save(path, np.arange(self.n))
        self.array = np.load(path, mmap_mode="r")

    def __getitem__(self, index: int) -> tuple[int, str, int]:
        assert isinstance(self.array, np.memmap)
        return int(self.array[index]), str(self.array.filename), os.getpid()
