"""Without Dask: each process that torchrun starts is one rank of the same job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.support.training import CLOCKS, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]
TINY = (
    "data=tiny",
    "model=tiny",
    "optimizer.lr=0.1",
    "scheduler=none",
    "trainer.threads=1",
    "trainer.log_every_steps=1",
)
TWO = ("--standalone", "--nproc-per-node", "2", "-m", "ddp_hydra")


def torchrun(cli: Any, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return cli.run(*TWO, *arguments, module="torch.distributed.run", **apart(cli), **options)


def apart(cli: Any) -> dict[str, str]:
    """A place for the folders that torchrun leaves."""
    (cli.folder / "home").mkdir(exist_ok=True)
    return {"TMPDIR": str(cli.folder / "home")}


def run_directory(cli: Any) -> Path:
    (folder,) = (cli.folder / "outputs").glob("*/*")
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def test_the_same_numbers_as_on_dask_in_one_run_directory_and_resumes(cli, client2, project, tmp_path):
    on_dask = train(client2, project, tmp_path / "dask", *TINY, "trainer.epochs=2", ranks=2)

    first = torchrun(cli, "cluster=torchrun", *TINY, "trainer.epochs=1")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\ndone: ") == 1
    folder = run_directory(cli)
    assert sorted(path.name for path in cli.folder.iterdir() if path.name != "home") == ["dask", "outputs"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("done", 2)
    half = len(metrics(folder))
    assert metrics(folder) == on_dask.metrics()[:half]

    rest = torchrun(cli, "cluster=torchrun", *TINY, f"resume={folder}", "trainer.epochs=2", "hydra.run.dir=rest")
    assert rest.returncode == 0, rest.stderr
    assert metrics(cli.folder / "rest") == on_dask.metrics()[half:]
    mine = torch.load(cli.folder / "rest" / "checkpoints" / "last.pt", weights_only=True)["model"]
    theirs = on_dask.checkpoint("last.pt")["model"]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_rank_0_names_it(cli):
    ended = torchrun(cli, "cluster=torchrun", *TINY, "+fault=raise,rank=1,step=3", timeout_s=60)
    assert ended.returncode != 0
    failure = json.loads((run_directory(cli) / "summary.json").read_text())["failure"]
    assert (failure["kind"], failure["rank"]) == ("raised", 1)
    assert f"rank 1 on {failure['host']}: " in ended.stderr
    assert failure["traceback"] in ended.stderr


@pytest.mark.slow
def test_a_model_that_cannot_be_built_is_a_failed_run(cli):
    ended = torchrun(cli, "cluster=torchrun", *TINY, "model.num_classes=nine", timeout_s=60)
    assert ended.returncode != 0
    assert json.loads((run_directory(cli) / "summary.json").read_text())["status"] == "failed"


def test_a_mistake_is_told_at_once(cli):
    ended = torchrun(cli, "cluster=torchrun", *TINY, "trainer.epochs=0", "hydra.run.dir=other", timeout_s=60)
    assert ended.returncode != 0
    assert "trainer.epochs=0: give a whole number of at least 1" in ended.stderr


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), marks=pytest.mark.slow),
        lambda pid: os.killpg(pid, signal.SIGINT),
    ],
    ids=["SIGTERM to torchrun", "Ctrl-C in its terminal"],
)
def test_a_job_that_is_told_to_end_saves_first(cli, wait_for, end):
    slow = ("data.delay_s=0.05", "trainer.epochs=500")
    process = cli.start(*TWO, "cluster=torchrun", *TINY, *slow, module="torch.distributed.run", **apart(cli))
    try:
        wait_for(lambda: [*cli.folder.glob("outputs/*/*/metrics.jsonl")], 60, "a first step")
        end(process.pid)
        process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode != 0
    summary = json.loads((run_directory(cli) / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (run_directory(cli) / "checkpoints" / "last.pt").exists()


HERE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["cluster=torchrun", "seed=1"], {}, "-m ddp_hydra cluster=torchrun seed=1"),
        (["cluster=torchrun"], {**HERE, "WORLD_SIZE": "two"}, "must be whole numbers"),
        (
            ["cluster=inline"],
            HERE,
            "rank 1 of 2 that torchrun has started, but cluster ddp_hydra.cluster.kinds.inline.Inline",
        ),
        (["-m", "cluster=torchrun", "seed=1,2"], HERE, "a sweep starts its jobs itself"),
    ],
)
def test_what_does_not_fit_the_environment_is_refused_with_what_to_type(cli, arguments, variables, said):
    ended = cli.run(*arguments, *TINY, **variables)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(cli.folder.rglob("summary.json"))
