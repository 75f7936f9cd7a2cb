"""SLURMCluster of the real dask-jobqueue, with commands that run batch jobs as processes of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.support import slurm
from tests.integration.support.by_hand import killed_at_work
from tests.integration.support.training import summary_of

pytestmark = pytest.mark.integration

TINY = ("cluster=slurm", "cluster.interface=lo", "cluster.cores=1", "cluster.memory=1GB")
TINY += ("data=tiny", "model=tiny", "optimizer.lr=0.1")


@dataclass
class Queue:
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_STANDIN": str(self.folder)}

    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("*.sh"))]


@pytest.fixture
def queue(tmp_path, wait_for) -> Iterator[Queue]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    slurm.install(folder)
    yield Queue(folder)
    wait_for(lambda: not slurm.running(folder), "the end of all batch jobs")


def test_the_main_job_on_two_workers_of_one_batch_job(cli, queue):
    native = ("cluster.queue=short", "cluster.account=me", "cluster.walltime='00:10:00'")
    native += ("cluster.cores=2", "cluster.processes=2")
    extra = ("cluster.job_extra_directives=['--gres=gpu:1']", "cluster.job_script_prologue=['export SAID=hello']")
    cli.done(*TINY, *native, *extra, "hydra.run.dir=run", **queue.variables)
    assert (summary_of(cli.folder / "run")["status"], summary_of(cli.folder / "run")["world_size"]) == ("done", 2)
    (script,) = queue.scripts()
    for line in ("-p short", "-A me", "-t 00:10:00", "--gres=gpu:1", "--cpus-per-task=2"):
        assert f"#SBATCH {line}\n" in script
    assert "export SAID=hello" in script
    assert f'#SBATCH --output="{cli.folder}/run/logs/slurm-%j.out"\n' in script


@pytest.mark.slow
def test_a_sweep_on_batch_jobs(cli, queue):
    cli.done("-m", *TINY, "dispatch.ranks=1", "seed=1,2", "hydra.sweep.dir=sweep", **queue.variables)
    assert [summary_of(cli.folder / "sweep" / number)["status"] for number in "01"] == ["done"] * 2
    assert len(queue.scripts()) == 2
    assert f'#SBATCH --output="{cli.folder}/sweep/logs/slurm-%j.out"\n' in queue.scripts()[0]


def test_a_refusal_of_sbatch_ends_the_wait_at_once_in_its_words(cli, queue):
    said = "sbatch: error: invalid partition specified: gpu\nsbatch: error: Batch job submission failed: bad name\n"
    (queue.folder / "refuses").write_text(said)
    ended = cli.run(*TINY, "cluster.queue=gpu", **queue.variables)  # it would wait for an hour
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "ddp_hydra: sbatch refused 2 batch jobs: invalid partition specified: gpu; Batch job submission failed: bad "
        "name: look at cluster.queue, account, "
    ), ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_no_batch_job(cli, queue):
    with killed_at_work(cli, *TINY, **queue.variables):
        pass


def test_a_queue_that_is_full(cli, queue):
    (queue.folder / "full").touch()
    ended = cli.run(*TINY, "cluster.wait_timeout_s=1", **queue.variables)
    assert ended.returncode == 1
    said = r"0 of 2 workers came in \d+ s: squeue says: 10\d PENDING \(Resources\), 10\d PENDING \(Resources\)\. Give"
    assert re.search(said, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_batch_jobs_that_end_at_once(cli, queue):
    ended = cli.run(
        *TINY,
        "cluster.job_script_prologue=['exit 1']",
        "cluster.wait_timeout_s=20",
        "hydra.run.dir=run",
        **queue.variables,
    )
    said = r"0 of 2 workers .*squeue says: (10\d) is no longer in the queue.*\(see /.*/run/logs/slurm-\1\.out\)"
    assert re.search(said, ended.stderr), ended.stderr
