"""Jobs with loggers: one of the project's own here, those of services in `test_logger_services.py`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
from pathlib import Path

import pytest

from ddp_hydra.errors import RankFailed
from ddp_hydra.job.run import run_job
from tests.integration.support.training import configured

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1", "trainer.epochs=1")
HERE = (*TINY, "cluster=inline", "results.loggers_timeout_s=60")


def tracker(folder: Path, does: str = "") -> str:
    return f"results.loggers=[{{_target_:models.tracker.Tracker,folder:{folder},does:'{does}'}}]"


def lines_of(file: Path) -> list[list]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def job(client2, project, tmp_path, monkeypatch, caplog):
    """Run a job on a living cluster, from here."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    monkeypatch.setattr("ddp_hydra.cluster.connect.connect", lambda *_, **__: contextlib.nullcontext(client2))
    settings = (*TINY, "dispatch.max_restarts=0", "results.loggers_timeout_s=60")
    return lambda name, *words: run_job(configured(project, *settings, *words), tmp_path / "outputs" / name)


def test_a_run_and_its_resume_are_one_run_at_the_service(job, tmp_path, caplog):
    runs = tmp_path / "runs"
    job("first", tracker(runs), "tags=[mine]")
    assert caplog.text.count("Tracker: http://tracker/run-first") == 1
    job("second", tracker(runs), "trainer.epochs=2", f"resume={tmp_path}/outputs/first")
    (file,) = runs.iterdir()
    lines = lines_of(file)
    (_, name, sweep, tags, params, earlier), again = (line for line in lines if line[0] == "begin")
    assert (name, sweep, tags, earlier) == ("first", "", ["mine"], "")
    assert (again[1], again[5]) == ("second", "run-first")
    assert params["optimizer.lr"] == 0.1
    assert not [key for key in params if key.startswith("cluster")]
    steps = [line[1] for line in lines if line[0] == "metrics" and "train/loss" in line[2]]
    assert steps == list(range(1, 13))  # 6 of each epoch
    assert lines[-1] == ["end", "finished"]
    assert [line[1] for line in lines if line[0] == "checkpoint"] == ["step-000006.pt", "step-000012.pt"]
    metrics = [json.loads(line) for line in (tmp_path / "outputs/first/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    assert [line[2]["train/loss"] for line in lines if line[0] == "metrics" and "train/loss" in line[2]][:6] == losses


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_grouped(cli, tmp_path):
    runs = tmp_path / "runs"
    cli.done("-m", *HERE, tracker(runs), "optimizer.lr=0.1,0.2", "hydra.sweep.dir=multirun/mine")
    begins = [lines_of(file)[0] for file in sorted(runs.iterdir())]
    assert [(line[1], line[2], line[4]["optimizer.lr"]) for line in begins] == [
        ("mine/0", "mine", 0.1), ("mine/1", "mine", 0.2),
    ]  # fmt: skip


def test_a_failed_job_is_a_failed_run(job, tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(RankFailed):
        job("x", tracker(runs), "trainer.on_nonfinite=abort", "optimizer.lr=1e38")
    assert lines_of(runs / "run-x.jsonl")[-1] == ["end", "failed"]


@pytest.mark.slow
def test_an_interrupted_job_is_a_killed_run(cli, tmp_path, wait_for):
    file = tmp_path / "runs" / "run-x.jsonl"
    process = cli.start(
        *HERE, tracker(file.parent), "trainer.epochs=100000", "data.delay_s=0.001", "hydra.run.dir=outputs/x"
    )
    try:
        wait_for(lambda: file.exists() and '"metrics"' in file.read_text(), "metrics at the service")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert lines_of(file)[-1] == ["end", "killed"]


@pytest.mark.parametrize(
    ("does", "timeout_s", "sentence"),
    [
        pytest.param(
            "blocks",
            6,
            "Tracker lacks records of this job: it had not taken everything when the job ended.",
            marks=pytest.mark.slow,
        ),
        (
            "fails",
            100,
            r"Tracker does not answer \(ConnectionError: nobody there\): the job goes on, and its records wait",
        ),
    ],
)
def test_a_logger_that_does_not_work_fails_no_job(does, timeout_s, sentence, job, tmp_path, capsys, caplog):
    job("x", tracker(tmp_path / "runs", does), f"results.loggers_timeout_s={timeout_s}")
    assert re.search(sentence, caplog.text)
    assert "done: 6 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_its_command_logs_from_the_cluster(cli, tmp_path):
    runs, root = tmp_path / "runs", tmp_path / "root"
    cluster = (*TINY, "cluster.n_workers=1", "results.handler=cluster", f"results.root={root}")
    timeout = "results.loggers_timeout_s=60"
    ended = cli.done(*cluster, timeout, tracker(runs), "hydra.run.dir=outputs/x")
    assert ended.stderr.count("Tracker: http://tracker/run-") == 1
    cli.done(*cluster, timeout, tracker(runs), "trainer.epochs=2", "resume=outputs/x", "hydra.run.dir=outputs/y")
    (file,) = runs.iterdir()
    lines = lines_of(file)
    assert [line[1] for line in lines if line[0] == "metrics" and "train/loss" in line[2]] == list(range(1, 25))
    assert [line[1] for line in lines if line[0] == "end"] == ["finished", "finished"]
    assert len(list(root.rglob("loggers.json"))) == 2
    assert not list(root.rglob("*project*/models"))
