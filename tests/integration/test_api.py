"""Jobs that Python code starts: one after the other on a warm cluster, and in the background."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hydra
from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.errors import ConfigError, Interrupted, RankFailed
from ddp_hydra.results import finite

pytestmark = pytest.mark.integration
TINY = ("data=tiny", "model=tiny", "trainer.threads=1", "dispatch.max_restarts=0")


@pytest.fixture
def folder(project, tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in imported():  # of the checkout, by other tests of this process
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    """The modules of a project space that this process has imported."""
    return [name for name in sys.modules if name.partition(".")[0] in ("models", "data")]


@pytest.fixture
def warm(folder, client2):
    """The test session's cluster in place of one that `connect` starts."""
    connect.use_existing(Scheduler(client2.scheduler.address))
    yield
    connect.use_existing(None)


def test_a_run_gives_its_metrics_its_model_and_what_resume_and_evaluate_need(warm, folder):
    run = ddp_hydra.run([*TINY, "trainer.epochs=1", "hydra.run.dir=run"])
    assert (run.status, run.done(), run.dir) == ("done", True, folder / "run")
    assert run.wait() is run
    assert run.summary["world_size"] == 2
    assert run.objective == run.summary["metrics"]["val/accuracy"]
    assert "train/loss" in run.metrics().columns
    assert sum(p.numel() for p in run.load_model("last").parameters()) > 0
    again = ddp_hydra.run(["resume=run", "trainer.epochs=2", "hydra.run.dir=again"])
    assert again.summary["steps"] == 2 * run.summary["steps"]
    assert again.objective == finite(again.summary["metrics"])["val/accuracy"]

    before = [(run.dir / name).read_bytes() for name in ("summary.json", ".hydra/overrides.yaml")]
    with pytest.raises(ConfigError, match=r"data\.batch_size=0"):
        ddp_hydra.run(["resume=run", "data.batch_size=0", "hydra.run.dir=run"])
    assert [(run.dir / name).read_bytes() for name in ("summary.json", ".hydra/overrides.yaml")] == before
    own = ddp_hydra.run(["resume=run", "trainer.epochs=2", "hydra.run.dir=run"])
    assert own.summary["steps"] == again.summary["steps"]
    assert "trainer.epochs=2" in (run.dir / ".hydra" / "overrides.yaml").read_text()


def test_a_run_in_the_background_is_stopped_with_a_checkpoint(warm, folder):
    run = ddp_hydra.run([*TINY, "trainer.epochs=100000"], wait=False)
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(0.1)
    while not run.records():
        assert not run.done()
        time.sleep(0.05)
    assert run.status == "running"
    run.stop()
    with pytest.raises(Interrupted, match=r"go on with resume=outputs/"):
        run.wait(100)
    assert (run.status, run.done()) == ("interrupted", True)
    assert (run.dir / "checkpoints" / "last.pt").exists()


def test_a_failed_run_raises_what_the_command_would_say(warm, folder):
    run = ddp_hydra.run([*TINY, "trainer.epochs=1", "faults=['raise,rank=1,step=1']"], wait=False)
    with pytest.raises(RankFailed, match="rank 1"):
        run.wait(100)
    assert run.status == "failed"


LEFT_BEHIND = """
import os, signal, sys, time
import ddp_hydra

if __name__ == "__main__":
    run = ddp_hydra.run(WORDS, wait=False)
    while sys.argv[1] != "at once" and not run.records():
        assert not run.done(), run.wait()
        time.sleep(0.05)
    if sys.argv[1] == "raise":
        raise ValueError("mine")
    if sys.argv[1] == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("end", ["by itself", "at once", "raise", "SIGTERM"])
def test_the_end_of_the_program_stops_its_run_with_a_checkpoint(folder, client2, ranks_alive, end):
    address = client2.scheduler.address
    words = [*TINY, "trainer.epochs=100000", "cluster=remote", f"cluster.address={address}", "hydra.run.dir=run"]
    (folder / "program.py").write_text(LEFT_BEHIND.replace("WORDS", repr(words)))
    done = subprocess.run([sys.executable, "program.py", end], capture_output=True, text=True)
    assert done.returncode == {"raise": 1, "SIGTERM": -signal.SIGTERM}.get(end, 0), done.stderr
    run = ddp_hydra.Run("run")
    assert (run.status, run.summary["interrupted"], (run.dir / ".lock").exists()) == ("interrupted", "interrupt", False)
    is_saved = (run.dir / "checkpoints" / "last.pt").exists()
    assert is_saved or end == "at once"
    assert "the program ends, and the run in run with it: interrupted" in done.stderr
    assert done.stderr.rstrip().endswith("go on with resume=run" if is_saved else "run has no checkpoint yet")
    assert not ranks_alive()


PROGRAM = """
import ddp_hydra

if __name__ == "__main__":
    with ddp_hydra.connect(["cluster.n_workers=1"]) as cluster:
        print(repr(cluster))
        try:
            ddp_hydra.connect()
        except Exception as error:
            print(error)
        print([ddp_hydra.run(WORDS).summary["world_size"] for _ in range(2)])
    print(repr(cluster))
"""


@pytest.mark.slow
def test_a_program_keeps_a_cluster_for_its_runs(folder):
    words = [*TINY, "trainer.max_steps=1"]
    (folder / "program.py").write_text(PROGRAM.replace("WORDS", repr(words)))
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<Connection: 1 workers at tcp://127.0.0.1:" in done.stdout
    assert "there is a cluster already: close it" in done.stdout
    assert "[1, 1]" in done.stdout
    assert "<Connection: closed>" in done.stdout
