"""Batch jobs on the SLURM of this machine: `make test-slurm`. Elsewhere, and in `make test`, all of this is skipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

INTERFACE = os.environ.get("TEST_SLURM")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not INTERFACE, reason="submits batch jobs: make test-slurm"),
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="there is no SLURM here"),
]
TINY = ("cluster=slurm", f"cluster.interface={INTERFACE}", "cluster.cores=1", "cluster.memory=1GB")
TINY += ("data=tiny", "model=tiny", "optimizer.lr=0.1", "hydra.run.dir=run")


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def nothing_left(wait_for, monkeypatch):
    """Our batch jobs have left the queue at the end. SLURM kills what is left of one, and so leaves sockets behind."""
    runtime = tempfile.mkdtemp(prefix="run-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    before = set(slurm("squeue", "--me", "--noheader", "--format=%i").split())
    yield
    ours = lambda: set(slurm("squeue", "--me", "--noheader", "--format=%i").split()) - before  # noqa: E731
    wait_for(lambda: not ours(), "the end of all batch jobs")
    shutil.rmtree(runtime)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cluster.queue=no_such_partition", "Invalid partition name specified"),
        ("cluster.memory=900TB", "Requested node configuration is not available"),
        ("controller", "Unable to contact slurm controller"),
    ],
)
def test_a_refusal_ends_the_wait_at_once_in_the_words_of_sbatch(cli, given, said):
    variables = {}
    if given == "controller":  # where nobody listens
        config = re.search(r"SLURM_CONF\s*= (\S+)", slurm("scontrol", "show", "config"))
        assert config is not None
        ours = re.sub(r"(?m)^SlurmctldPort=.*\n", "", Path(config[1]).read_text()) + "\nSlurmctldPort=9\n"
        (cli.folder / "slurm.conf").write_text(ours)
        variables, given = {"SLURM_CONF": str(cli.folder / "slurm.conf")}, "cluster.walltime='00:01:00'"
    ended = cli.run(*TINY, given, **variables)  # it would wait for an hour
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("ddp_hydra: sbatch refused 2 batch jobs: ")
    assert said in ended.stderr


def test_batch_jobs_that_may_not_start_yet(cli):
    later = "cluster.job_extra_directives=['--begin=now+1hour']"
    ended = cli.run(*TINY, later, "cluster.wait_timeout_s=2")
    assert ended.returncode == 1
    assert re.search(r"0 of 2 workers came in \d+ s: squeue says: \d+ PENDING \(BeginTime\), ", ended.stderr)


def test_a_job_whose_batch_jobs_print_into_the_run_directory(cli):
    cli.done(*TINY)
    summary = json.loads((cli.folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("done", 2)
    logs = sorted((cli.folder / "run" / "logs").glob("slurm-*.out"))
    assert len(logs) == 2
    assert "Start worker at" in logs[0].read_text()
    assert not list(cli.folder.glob("slurm-*")), "nothing in the folder where it was typed"


def test_a_batch_job_that_is_cancelled_ends_the_run_with_a_checkpoint(cli, wait_for):
    endless = ("trainer.epochs=100000", "data.delay_s=0.01")
    process = cli.start(*TINY, *endless)
    try:
        wait_for((cli.folder / "run" / "metrics.jsonl").exists, "a job at work")
        first = sorted((cli.folder / "run" / "logs").glob("slurm-*.out"))[0]
        slurm("scancel", first.stem.removeprefix("slurm-"))
        _, err = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    (line,) = err.splitlines()
    assert re.match(r"a worker is being shut down \(SIGTERM\); saved at step \d+: go on with resume=run", line)
