"""Sweeps through the command line: real clusters, real gangs, real signals."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddp_hydra.cluster.connection import workers_of

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "trainer.epochs=2", "cluster.n_workers=4", "dispatch.ranks=2")
ALONE = ("cluster.n_workers=1", "dispatch.ranks=1")
SWEEP = ("-m", *TINY, "hydra.sweep.dir=sweep")


def rows(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["number"]: row for row in json.loads((folder / "sweep.json").read_text())["jobs"]}


def states(folder: Path) -> list[str]:
    return [row["state"] for _, row in sorted(rows(folder).items())]


@pytest.fixture
def nothing_left(cli, wait_for):
    """No process that a sweep has started is left when its command has ended."""

    def at_work() -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(cli.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found

    return lambda: wait_for(lambda: not at_work(), "no process of the sweep left")


@pytest.mark.slow
def test_jobs_of_all_kinds_of_ends_are_each_a_row_and_the_others_go_on(cli, nothing_left):
    """Six jobs of two ranks on four workers; then the same command again."""
    kinds = "faults=[],['raise,rank=1,step=5'],['segv,rank=0,step=4'],['kill,rank=1,step=3'],['hang,rank=0,step=5'],"
    kinds += "['exit,rank=1,step=2']"
    settings = ("dispatch.max_restarts=0", "dispatch.hang_timeout_s=10", "dispatch.first_step_timeout_s=60")
    ended = cli.run(*SWEEP, kinds, *settings)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1] == "ddp_hydra: 6 jobs: 1 done, 5 failed  ->  sweep/sweep.md"
    folder = cli.folder / "sweep"
    found = rows(folder)
    assert states(folder) == ["done"] + ["failed"] * 5
    for number, words in {
        1: "InjectedFault: a fault on purpose",
        2: "SIGSEGV",
        3: "SIGKILL",
        4: "no progress",
        5: "3",
    }.items():
        assert words in found[number]["message"]
        failure = json.loads((folder / str(number) / "summary.json").read_text())["failure"]
        assert failure["kind"] in ("raised", "killed", "hung", "exited")
    assert found[0]["objective"] == found[0]["metrics"]["val/accuracy"] > 0.5
    with (folder / "sweep.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["state"] for row in table] == ["done"] + ["failed"] * 5
    assert float(table[0]["val/accuracy"]) == pytest.approx(found[0]["objective"])
    nothing_left()

    again = cli.run(*SWEEP, kinds, *settings)
    assert again.returncode == 1
    assert "running" not in again.stderr, "nothing is run again unless that is asked for"
    assert again.stderr.splitlines()[-1] == "ddp_hydra: 6 jobs: 1 done, 5 failed  ->  sweep/sweep.md"


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_and_comes_to_the_same_end(cli, nothing_left, wait_for):
    slow = (*SWEEP[:3], "trainer.epochs=4", *SWEEP[4:], "data.delay_s=0.03", "optimizer.lr=0.1,0.05,0.01")
    swift = {"hydra.sweep.dir=sweep": "hydra.sweep.dir=straight", "data.delay_s=0.03": "data.delay_s=0"}
    cli.done(*(swift.get(word, word) for word in slow))

    process = cli.start(*slow)
    status = cli.folder / "sweep" / "0" / "status.json"
    wait_for(lambda: status.exists() and (json.loads(status.read_text())["step"] or 0) >= 8, "some steps")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "go on with the same command and hydra.sweep.dir=sweep" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert states(cli.folder / "sweep")[0] == "interrupted"
    assert states(cli.folder / "sweep")[2] in ("queued", "interrupted")
    nothing_left()

    cli.done(*slow)
    assert states(cli.folder / "sweep") == ["done"] * 3
    assert (cli.folder / "sweep" / "sweep.png").exists()
    for number in range(3):
        ends = [torch.load(cli.folder / name / f"{number}/checkpoints/last.pt") for name in ("sweep", "straight")]
        for name, value in ends[0]["model"].items():
            assert torch.equal(value, ends[1]["model"][name])
    nothing_left()


@pytest.mark.slow
def test_a_killed_sweep_leaves_nothing_behind_and_goes_on(cli, nothing_left, wait_for, ranks_alive):
    slow = (*SWEEP, "data.delay_s=0.1", "optimizer.lr=0.1,0.01")
    process = cli.start(*slow)
    status = cli.folder / "sweep" / "0" / "status.json"
    wait_for(lambda: status.exists() and (json.loads(status.read_text())["step"] or 0) >= 7, "some steps")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not ranks_alive(), "no rank left")
    nothing_left()
    cli.done(*slow)
    assert states(cli.folder / "sweep") == ["done"] * 2


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(cli, nothing_left, wait_for):
    process = cli.start(*SWEEP, "data.delay_s=1", "optimizer.lr=0.1,0.01")
    status = cli.folder / "sweep" / "0" / "status.json"
    wait_for(status.exists, "a job that runs")
    process.send_signal(signal.SIGINT)
    said = ""
    while "A second" not in said:  # the kernel makes one signal of two that are not yet handled
        said += (line := process.stderr.readline())
        assert line, said
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    nothing_left()


@pytest.mark.slow
def test_a_scaling_study_has_a_cluster_for_each_size(cli, nothing_left):
    cli.done("-m", *TINY[:3], "cluster.n_workers=1,2", "hydra.sweep.dir=sweep")
    assert [row["workers"] for row in rows(cli.folder / "sweep").values()] == [1, 2]
    nothing_left()


@pytest.mark.slow
def test_fail_fast_stops_the_others(cli, nothing_left):
    ended = cli.run(
        *SWEEP, "hydra.launcher.fail_fast=true", "dispatch.max_restarts=0", "data.delay_s=0.05",
        "faults=['raise,rank=1,step=3'],[]", "optimizer.lr=0.1,0.01,0.001",
    )  # fmt: skip
    assert ended.returncode == 1
    found = states(cli.folder / "sweep")
    assert "failed" in found
    assert "queued" in found
    assert "hydra.launcher.fail_fast=true" in ended.stderr
    nothing_left()


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_a_failed_row_and_the_one_that_waits_for_its_workers_is_not(cli, nothing_left):
    words = [*SWEEP, "cluster.n_workers=2", "hydra.launcher.job_timeout_s=20", "data.delay_s=2,0"]
    ended = cli.run(*words)
    assert ended.returncode == 1
    assert states(cli.folder / "sweep") == ["failed", "done"]
    assert "longer than hydra.launcher.job_timeout_s=20" in rows(cli.folder / "sweep")[0]["message"]
    nothing_left()


def test_a_cluster_that_does_not_come_up_fails_its_jobs_with_a_sentence(cli, nothing_left):
    ended = cli.run(*SWEEP, "optimizer.lr=0.1,0.01", "+cluster.no_such_thing=1")
    assert ended.returncode == 1
    assert states(cli.folder / "sweep") == ["failed"] * 2
    assert "no_such_thing" in rows(cli.folder / "sweep")[0]["message"]
    nothing_left()


@pytest.mark.slow
def test_a_dry_run_checks_every_job_without_a_cluster(cli, nothing_left):
    ended = cli.run(*SWEEP, "dry_run=true", "data.batch_size=8,5000", "model.dropout=0.0,7.0")
    assert ended.returncode == 1, ended.stderr
    folder = cli.folder / "sweep" / "dry_run"
    assert not (folder / "cluster.log").exists()
    assert states(folder)[0] == "done"
    assert "dropout" in rows(folder)[1]["message"]


@pytest.mark.slow
def test_a_folder_with_other_jobs_is_not_written_over(cli):
    cli.done("-m", *TINY[:3], *ALONE, "hydra.sweep.dir=sweep", "seed=1,2")
    before = hashlib.sha256((cli.folder / "sweep/0/checkpoints/last.pt").read_bytes()).hexdigest()
    cli.done("-m", *TINY[:3], *ALONE, "hydra.sweep.dir=sweep", "seed=3,2,1")
    found = rows(cli.folder / "sweep")
    assert {row["overrides"][-1]: number for number, row in found.items()} == {"seed=1": 0, "seed=2": 1, "seed=3": 2}
    assert hashlib.sha256((cli.folder / "sweep/0/checkpoints/last.pt").read_bytes()).hexdigest() == before
    cli.done("-m", *TINY[:3], *ALONE, "hydra.sweep.dir=sweep", "seed=4")
    assert states(cli.folder / "sweep") == ["done"] * 4, "what is not part of it this time stays in the table"
    codes = {(cli.folder / f"sweep/{number}/project.zip").stat().st_ino for number in range(3)}
    assert len(codes) == 1, "one copy for all jobs"


@pytest.mark.slow
def test_only_the_best_keep_their_checkpoints_also_when_the_sweep_goes_on(cli):
    here = ("-m", *TINY[:2], "trainer.epochs=1", "cluster=inline", "hydra.sweep.dir=sweep")
    cli.done(*here, "optimizer.lr=0.1,0.00001", "hydra.launcher.keep=best:1")
    folder = cli.folder / "sweep"
    assert [(folder / str(n) / "checkpoints/last.pt").exists() for n in range(2)] == [True, False]
    assert rows(folder)[1]["message"] == "its checkpoints were removed: hydra.launcher.keep=best:1"
    cli.done(*here, "optimizer.lr=0.000011,0.00001", "hydra.launcher.keep=best:1")
    assert [(folder / str(n) / "checkpoints/last.pt").exists() for n in range(3)] == [True, False, False]
    refused = cli.run("evaluate", "run=sweep/1")
    assert refused.returncode == 1
    assert "were removed: hydra.launcher.keep=best:1" in refused.stderr


@pytest.mark.slow
def test_only_the_best_keep_their_checkpoints_in_a_store(cli):
    store = cli.folder / "store"
    where = ("results.handler=cluster", f"results.root={store}", *TINY[3:])
    cli.done("-m", *TINY[:2], "trainer.epochs=1", *where, "optimizer.lr=0.1,0.00001", "hydra.launcher.keep=best:1",
             "hydra.sweep.dir=sweep")  # fmt: skip
    assert rows(cli.folder / "sweep")[1]["message"] == "its checkpoints were removed: hydra.launcher.keep=best:1"
    steps = {path.parents[1].name for path in store.rglob("step-*.pt")}
    assert steps == {"0"}
    assert list((cli.folder / "sweep").glob("1/checkpoints/*.pt")) == []
    refused = cli.run("evaluate", f"run={next(store.rglob('1/checkpoints')).parent}")
    assert "were removed: hydra.launcher.keep=best:1" in refused.stderr


@pytest.mark.slow
def test_a_population_comes_to_the_same_end_also_if_it_is_killed(cli, nothing_left, wait_for):
    """Four members, three generations; a copy trains with the values that it was given."""
    here = [
        "-m", "hydra/sweeper=pbt", "hydra.sweeper.population=4", "hydra.sweeper.generations=3", *TINY[:2],
        "trainer.epochs=3", "cluster.n_workers=2", "dispatch.ranks=1", "optimizer.lr=tag(log,interval(1e-4,0.5))",
    ]  # fmt: skip
    said = cli.done(*here, "hydra.sweep.dir=straight")
    assert "best: member" in said.stdout + said.stderr
    process = cli.start(*here, "hydra.sweep.dir=killed")
    wait_for(lambda: (cli.folder / "killed/5/summary.json").exists(), "a job of the second generation")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    cli.done(*here, "hydra.sweep.dir=killed")
    straight, killed = (cli.folder / name for name in ("straight", "killed"))
    found = [rows(folder) for folder in (straight, killed)]
    kept = [[(row["labels"], row["objective"]) for row in one.values()] for one in found]
    assert kept[0] == kept[1]
    for number in range(12):
        ends = [torch.load(folder / f"{number}/checkpoints/last.pt") for folder in (straight, killed)]
        for name, value in ends[0]["model"].items():
            assert torch.equal(value, ends[1]["model"][name])
        lr = float(next(word for word in found[0][number]["overrides"] if word.startswith("optimizer.lr="))[13:])
        assert ends[0]["optimizer"]["param_groups"][0]["initial_lr"] == lr
    copies = [row for row in found[0].values() if row["labels"]["parent"] not in ("", row["labels"]["member"])]
    assert len(copies) >= 2
    nothing_left()


@pytest.mark.slow
def test_a_population_that_keeps_the_best_comes_to_the_same_end_also_if_it_is_killed(cli, nothing_left, wait_for):
    """The checkpoints of a generation are gone when the sweep goes on after it, and nobody asks for them."""
    here = [
        "-m", "hydra/sweeper=pbt", "hydra.sweeper.population=3", "hydra.sweeper.generations=3", *TINY[:2],
        "trainer.epochs=3", "cluster.n_workers=2", "dispatch.ranks=1", "optimizer.lr=tag(log,interval(1e-4,0.5))",
    ]  # fmt: skip
    cli.done(*here, "hydra.sweep.dir=all")
    keeping = [*here, "hydra.launcher.keep=best:1", "hydra.sweep.dir=kept"]
    process = cli.start(*keeping)
    third = [cli.folder / "kept/6" / name for name in ("status.json", "summary.json")]
    wait_for(lambda: any(file.exists() for file in third), "a job of the third generation")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list((cli.folder / "kept").glob("[0-2]/checkpoints/*.pt"))
    cli.done(*keeping)
    found = [rows(cli.folder / name) for name in ("all", "kept")]
    kept = [[(row["labels"], row["objective"]) for row in one.values()] for one in found]
    assert kept[0] == kept[1]
    left = {path.parts[-3] for path in (cli.folder / "kept").glob("*/checkpoints/last.pt")}
    ends = {number: row["objective"] for number, row in rows(cli.folder / "kept").items() if int(number) >= 6}
    assert left == {str(max(ends, key=ends.get))}
    assert {path.parts[-3] for path in (cli.folder / "all").glob("*/checkpoints/last.pt")} == {*"012345678"}
    nothing_left()


@pytest.mark.slow
def test_two_sweeps_on_one_remote_cluster_get_its_workers_in_turn(cli, client4, nothing_left):
    remote = ["cluster=remote", f"cluster.address={client4.scheduler.address}", *SWEEP[1:4], "dispatch.ranks=2"]
    sweeps = [
        cli.start("-m", *remote, f"hydra.sweep.dir={name}", "data.delay_s=0.02", f"seed={seeds}")
        for name, seeds in (("many", "range(1,13)"), ("few", "1,2"))
    ]
    for process in sweeps:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    assert states(cli.folder / "many") + states(cli.folder / "few") == ["done"] * 14
    spans = {}
    for name in ("many", "few"):
        for number in rows(cli.folder / name):
            lines = (cli.folder / name / str(number) / "metrics.jsonl").read_text().splitlines()
            spans[name, number] = [json.loads(line)["time"] for line in (lines[0], lines[-1])]
    for begin, _ in spans.values():
        assert sum(first <= begin < last for first, last in spans.values()) <= 2, "four workers, two each"
    last_of_few = max(end for (name, _), (_, end) in spans.items() if name == "few")
    last_to_begin = max(begin for (name, _), (begin, _) in spans.items() if name == "many")
    assert last_of_few < last_to_begin, "the small sweep did not wait for the whole of the large one"
    assert len(workers_of(client4)) == 4, "it is not ours to close"
    nothing_left()


# -- apps that are not ours --------------------------------------------------------------------------------

APP = """
import logging, os, sys
import hydra, torch
from hydra.core.hydra_config import HydraConfig
from own_module import scaled

class Data:
    classes = ["a name that torch has, too"]

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    if cfg.how == "exit":
        sys.exit(3)
    if cfg.how == "crash":
        os.kill(os.getpid(), 9)
    if cfg.how == "raise":
        raise ValueError("not with me")
    total = float(len(Data.classes))
    if "RANK" in os.environ:
        import torch.distributed as dist
        x = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(x)
        total = float(x)
    logging.getLogger("app").info("the total is %g", total)
    print("in", HydraConfig.get().runtime.output_dir)
    return scaled(total) + HydraConfig.get().job.num

main()
"""


@pytest.fixture
def app(tmp_path, cli):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "own_module.py").write_text("def scaled(x):\n    return 10 * x\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "app.py", "-m", "hydra/launcher=dask_ddp", "hydra.sweep.dir=sweep", *arguments],
            cwd=tmp_path, env=cli.environment(), capture_output=True, text=True,
        )  # fmt: skip

    return run


@pytest.mark.slow
def test_an_app_of_others_runs_its_task_once_for_each_job(app, cli, nothing_left):
    ended = app("+how=fine,exit,crash,raise,fine2")
    assert ended.returncode == 1
    assert states(cli.folder / "sweep") == ["done", "failed", "failed", "failed", "done"]
    found = rows(cli.folder / "sweep")
    assert [found[0]["value"], found[4]["value"]] == [10.0, 14.0]
    assert found[1]["message"] == "the task exited with code 3 (sys.exit)"
    assert "SIGKILL" in found[2]["message"]
    assert found[3]["message"] == "ValueError: not with me"
    assert "raise ValueError" in (cli.folder / "sweep/3/logs/job.log").read_text()
    assert "hydra.launcher.direction=maximize" in (cli.folder / "sweep/sweep.md").read_text(), "nobody gave one"
    assert f"in {cli.folder}/sweep/0" in (cli.folder / "sweep/0/logs/job.log").read_text()
    nothing_left()


@pytest.mark.slow
def test_a_failed_job_is_run_again_on_request_and_none_that_is_done(app, cli, tmp_path):
    gone = tmp_path / "own_module.py"
    text = gone.read_text()
    gone.write_text("def scaled(x):\n    raise OSError('the disk is away')\n")
    assert app("+how=fine,fine2").returncode == 1
    gone.write_text(text)
    again = app("+how=fine,fine2,fine3", "hydra.launcher.resume=sweep")
    assert again.returncode == 1
    assert states(cli.folder / "sweep") == ["failed", "failed", "done"]
    third = app("+how=fine,fine2,fine3", "hydra.launcher.resume=sweep", "hydra.launcher.retry_failed=true")
    assert third.returncode == 0, third.stderr
    assert [row["value"] for row in rows(cli.folder / "sweep").values()] == [10.0, 11.0, 12.0]
    assert "job 2" not in third.stderr.replace("job 2 done", ""), "what is done is not run again"


@pytest.mark.slow
def test_an_app_of_others_gets_ranks_in_a_process_group_of_their_own(app, cli, nothing_left):
    ended = app("+how=fine,raise,fine2", "hydra.launcher.ranks=2", "hydra.launcher.cluster={n_workers: 4}")
    assert ended.returncode == 1
    assert states(cli.folder / "sweep") == ["done", "failed", "done"]
    found = rows(cli.folder / "sweep")
    assert [found[0]["value"], found[2]["value"]] == [30.0, 32.0]
    assert "ValueError: not with me" in found[1]["message"]
    assert f'File "{cli.folder}/app.py"' in (cli.folder / "sweep/1/logs/rank-0.log").read_text()
    assert f"in {cli.folder}/sweep/2" in (cli.folder / "sweep/2/logs/rank-1.log").read_text()
    (logged,) = (cli.folder / "sweep/2/app.log").read_text().splitlines()
    assert logged.endswith("[app][INFO] - the total is 3"), "of rank 0 alone"
    assert "distributed" not in ended.stderr.replace("torch.distributed", "")
    nothing_left()
