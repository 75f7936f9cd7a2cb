"""Notes which files of ddp_hydra a value passes in a running job: `python -m tests.support.walks FILE -- <words>`.

A file is passed where a function of it holds the value when the value moves on (to another process or thread, to the
optimizer, into the event file), or returns the value. FILE gets a line for each: walk, how it was noticed, file.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.utils import get_object

FILE = "DDP_HYDRA_WALKS"
"""Environment variable that names the file for a rank."""
RATE, METRIC = 0.012345, "train/loss"
OURS = f"{Path(__file__).resolve().parents[2]}/ddp_hydra/"
RATE_TEXTS = (str(RATE).encode(), struct.pack(">d", RATE))


def is_rate(value: Any) -> bool:
    if isinstance(value, bytes):
        return any(text in value for text in RATE_TEXTS)
    return value == RATE if isinstance(value, float) else isinstance(value, str) and str(RATE) in value


def is_metric(value: Any) -> bool:
    return (
        f'"{METRIC}":'.encode() in value if isinstance(value, bytes) else isinstance(value, Mapping) and METRIC in value
    )


@dataclass
class Walk:
    """How a value is known, and how it moves on.

    Args:
        is_it: whether something is the value.
        module: beginnings of the modules of objects that are looked into.
        moves: name of a function -> end of the name of its file, for a function of C of its caller's.
        objects: how deep in objects of ours a function's result is searched for it.
        ends: the functions after which the value has left a process, or is where it should be.
    """

    is_it: Callable[[Any], bool]
    module: str | tuple[str, ...]
    moves: Mapping[str, str]
    ends: tuple[str, ...]
    objects: int
    is_over: bool = False


WALKS = {
    "optimizer.lr": Walk(
        is_rate,
        "ddp_hydra",
        {"submit": "distributed/client.py", "send_fds": "socket.py", "__init__": "optim/optimizer.py"},
        ("send_fds", "__init__"),
        1,
    ),
    METRIC: Walk(
        is_metric,
        ("ddp_hydra.record", "ddp_hydra.rank.record_relay"),
        {
            "sendall": "results.py",
            "log_event": "distributed/worker.py",
            "put": "attempt.py",
            "_append": "writers/tensorboard.py",
        },
        ("sendall", "_append"),
        2,
    ),
}


def parts(value: Any, module: str | tuple[str, ...]) -> Iterator[Any]:
    """Yield what a value holds directly."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif type(value).__module__.startswith("omegaconf"):
        yield vars(value).get("_content", vars(value).get("_val"))
    elif type(value).__module__.startswith(module):
        names = getattr(value, "__struct_fields__", None) or vars(value)
        yield from (getattr(value, name) for name in names)


def holds(walk: Walk, value: Any, objects: int, depth: int = 7) -> bool:
    """Whether something is the value, or holds it, in at most some objects of ours in each other."""
    with contextlib.suppress(Exception):  # an object that is only half built
        if walk.is_it(value):
            return True
        objects -= type(value).__module__.startswith("ddp_hydra")
        return depth > 0 <= objects and any(holds(walk, one, objects, depth - 1) for one in parts(value, walk.module))
    return False


class Notes:
    """Notes files, each once, as the functions of a process are called.

    Args:
        file: gets them.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.noted, self.tried = file, set[tuple[str, ...]](), Counter[Any]()

    def watch(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event == "c_call":
            name = getattr(arg, "__name__", "")
        for key, walk in WALKS.items():
            if walk.is_over:
                continue
            if event in ("call", "c_call") and file.endswith(walk.moves.get(name, "/")):
                if self.moves(key, frame) and name in walk.ends:
                    walk.is_over = True
            elif event == "return" and file.startswith(OURS) and arg is not None and self.tried[key, frame.f_code] < 30:
                self.tried[key, frame.f_code] += 1
                if holds(walk, arg, walk.objects):
                    self.note(key, "returns", file)

    def moves(self, key: str, frame: FrameType | None) -> bool:
        """Note the functions that hand a value on; return whether there are any."""
        found = False
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(OURS) and any(holds(WALKS[key], one, 2) for one in dict(frame.f_locals).values()):
                found = True
                self.note(key, "hands-on", file)
            frame = frame.f_back
        return found

    def note(self, *noted: str) -> None:
        if noted not in self.noted:
            self.noted.add(noted)
            with self.file.open("a") as notes:
                notes.write(f"{' '.join(noted).replace(OURS, 'ddp_hydra/')}\n")


def model(**arguments: Any) -> Any:
    """Make the tests' tiny model, on a rank that takes notes from now on."""
    Notes(Path(os.environ[FILE])).watch()
    return get_object("models.tiny.Tiny")(**arguments)


def main() -> None:
    """Run the command after `--`."""
    file, _, *words = sys.argv[1:]
    os.environ[FILE] = file
    sys.argv = ["ddp-hydra", *words]
    # Not this module, which runs as __main__: a worker in this process is to see the same walks.
    import_module("tests.support.walks").Notes(Path(file)).watch()
    from ddp_hydra.cli.main import entry

    entry()


if __name__ == "__main__":
    main()
