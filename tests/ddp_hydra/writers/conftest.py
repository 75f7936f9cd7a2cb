from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hydra.record import Checkpoint, File, Metrics, Record
from ddp_hydra.writers.files import SUBMITTED

MakeRecord = Callable[..., Record]


@pytest.fixture
def metrics_record() -> MakeRecord:
    def make(step: int, attempt: int = 0, rank: int = 0, epoch: int = 1, **metrics: float) -> Record:
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        return Record(Metrics(named, epoch, step * 8), rank, step, 1000.5 + step, attempt)

    return make


@pytest.fixture
def file_record() -> MakeRecord:
    def make(path: str, /, content: bytes = b"hello", **changes: object) -> Record:
        data = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "inline": base64.b64encode(content).decode(),
        }
        return Record(File(**{"path": path} | data | changes), rank=2)

    return make


@pytest.fixture
def checkpoint_record(file_record: MakeRecord) -> MakeRecord:
    def make(step: int, content: bytes | None = None, best: bool = False, **changes: object) -> Record:
        holds = Checkpoint(step, 1, step * 8, {"val/loss": 1 / step}, best)
        body = b"weights %d" % step if content is None else content
        return file_record(f"checkpoints/step-{step:06d}.pt", body, **{"checkpoint": holds} | changes)

    return make


def tree(folder: Path) -> set[str]:
    """Every file under `folder`, hidden ones too, but for the list of those that ranks have submitted."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return files - {SUBMITTED}


@pytest.fixture(name="tree")
def tree_function() -> Callable[[Path], set[str]]:
    return tree
