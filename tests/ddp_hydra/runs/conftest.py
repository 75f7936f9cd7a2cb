from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.api import ComposedConfig
from ddp_hydra.errors import Failure, RankFailed
from ddp_hydra.job.summary import summarised
from ddp_hydra.record import Checkpoint, File, Metrics, Record, Start
from ddp_hydra.run_state import Objective
from ddp_hydra.writers.handler import ResultsHandler, default_writers
from ddp_hydra.writers.run_dir import locked
from tests.support.s3_server import credentials as credentials
from tests.support.s3_server import s3 as s3

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No index of the user is read or written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def hydra_files(tmp_path_factory) -> Callable[..., Path]:
    """Return a folder with what Hydra saves for a run with some overrides; each is composed once."""
    made: dict[tuple[str, ...], Path] = {}

    def compose(*words: str) -> Path:
        if words not in made:
            run_dir = tmp_path_factory.mktemp("composed")
            ComposedConfig([*words, f"hydra.run.dir={run_dir}"]).save()
            made[words] = run_dir / ".hydra"
        return made[words]

    return compose


@pytest.fixture
def make_run(tmp_path, hydra_files) -> MakeRun:
    """Write a run by the writers of jobs: `make_run("outputs/a", "model=mlp", loss=0.5, end="done")`."""

    def make(name: str, *words: str, **given: Any) -> Path:
        return write_run(tmp_path / name, hydra_files(*words), **given)

    return make


def write_run(
    run_dir: Path, hydra: Path, end: str = "done", steps: int = 4, tags: list[str] | None = None, **metrics: float
) -> Path:
    """Write a run by the writers of jobs, with what Hydra has saved in a folder, and return its directory."""
    shutil.copytree(hydra, run_dir / ".hydra")
    cfg = OmegaConf.create({"tags": tags or []})
    try:
        with locked(run_dir), summarised(run_dir, cfg) as summary:
            summary.project = "c0de" * 16
            summary.objective = Objective("val/loss", "minimize")
            write_records(run_dir, steps, metrics or {"loss": 0.5})
            value = {f"val/{key}": number for key, number in (metrics or {"loss": 0.5}).items()}
            summary.update({"steps": steps, "metrics": value, "world_size": 2})
            if end == "failed":
                raise RankFailed("a rank failed", Failure("killed", 1, "far", "\x1b[31mred", step=3))
            if end == "interrupted":
                raise KeyboardInterrupt
            summary.status = "done"
    except (RankFailed, KeyboardInterrupt):
        pass
    return run_dir


def write_records(run_dir: Path, steps: int, metrics: dict[str, float]) -> None:
    """Write metrics, and two checkpoints."""
    handler = ResultsHandler(default_writers(run_dir, tensorboard=False, progress=False))
    named = {f"val/{key}": number for key, number in metrics.items()}
    handler.handle(Record(Start(total_steps=2 * steps, epochs=2, world_size=2), step=0))
    for step in range(1, steps + 1):
        handler.handle(Record(Metrics(metrics=named, epoch=1, samples=step * 8), 0, step))
    for step in (steps - 1, steps):
        content = b"weights %d" % step
        saved = Checkpoint(step, 1, step * 8, named, best=step == steps)
        sha256, inline = hashlib.sha256(content).hexdigest(), base64.b64encode(content).decode()
        file = File(f"checkpoints/step-{step:06d}.pt", len(content), sha256, inline=inline, checkpoint=saved)
        handler.handle(Record(file))
    handler.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from ddp_hydra.record import Record, Start
from ddp_hydra.run_state import Objective, Status
from ddp_hydra.writers.run_dir import locked
from ddp_hydra.writers.run_dir import StatusWriter
run_dir = Path(sys.argv[1])
with locked(run_dir):
    base = Status(objective=Objective("val/loss", "minimize"), tags=["good"])
    StatusWriter(run_dir, base=base).write(Record(Start(total_steps=9, epochs=1, world_size=2), step=0))
    print("ready", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def process_of():
    """Start a process that writes a run directory, until its stdin is closed: then it is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run_dir: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", KILLED, str(run_dir)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.communicate()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.communicate()
    assert process.returncode == -9
