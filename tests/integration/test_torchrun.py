"""Under torchrun: the first process of each host is a Dask worker, which holds as many ranks as there are processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddp_hydra.rank.rank_process import BEAT_S
from tests.integration.project.models.reporter import LARGE
from tests.integration.support.certificates import Authority
from tests.integration.support.hosts import PLUMBING, Host, needs_hosts, network
from tests.integration.support.training import metrics_of, summary_of, train
from tests.support.ports import free_port
from tests.support.warm_server import PATIENCE_S

pytestmark = pytest.mark.integration
TINY = (
    "data=tiny",
    "model=tiny",
    "optimizer.lr=0.1",
    "scheduler=none",
    "trainer.threads=1",
    "trainer.log_every_steps=1",
)


def torchrun(cli: Any, *own: str, job: Iterable[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return cli.run(*two(*own), *job, module="torch.distributed.run", **apart(cli), **options)


def two(*own: str) -> list[str]:
    """The arguments of torchrun for two ranks here."""
    return ["--standalone", "--nproc-per-node", "2", *own, "-m", "ddp_hydra"]


def apart(cli: Any) -> dict[str, str]:
    (cli.folder / "home").mkdir(exist_ok=True)
    return {"TMPDIR": str(cli.folder / "home")}


def run_directory(cli: Any) -> Path:
    (folder,) = (cli.folder / "outputs").glob("*/*")
    return folder


def test_a_killed_rank_is_replaced_unseen_by_torchrun_and_the_numbers_are_those_of_dask(
    cli, client2, project, tmp_path
):
    """In one run directory, with what all ranks print and send."""
    words = (*TINY, "trainer.epochs=2", "trainer.checkpoint_every_steps=2")
    on_dask = train(client2, project, tmp_path / "dask", *words, ranks=2)

    said = "+callbacks.reporter._target_=models.reporter.Reporter"
    job = ("cluster=torchrun", *words, said, "+fault=kill,rank=1,step=5")
    ended = torchrun(cli, job=job)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\ndone: ") == 1
    assert sorted(path.name for path in cli.folder.iterdir() if path.name != "home") == ["dask", "outputs"]
    folder = run_directory(cli)
    summary = summary_of(folder)
    assert (summary["status"], summary["world_size"], summary["restarts"]) == ("done", 2, 1)
    (failed,) = summary["attempts"]
    assert (failed["attempt"], failed["failure"]["rank"], failed["failure"]["step"]) == (0, 1, 5)
    assert failed["failure"]["message"].startswith("killed by SIGKILL: ")
    assert "ddp_hydra: " not in ended.stderr

    lines = [line for line in metrics_of(folder) if not any(name.startswith("of_rank") for name in line)]
    for line in lines:
        line["attempt"] = 0
    assert lines == on_dask.metrics()
    mine = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"]
    theirs = on_dask.checkpoint("last.pt")["model"]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)

    for rank in range(2):
        log = (folder / "logs" / f"rank-{rank}.log").read_text()
        first, again, *more = log.split("--- attempt 1 ---\n")
        assert f"printed by rank {rank}" in first
        assert f"printed by rank {rank}" in again
        assert not more
        assert len(re.findall(rf"^\S+ rank {rank}: warning of rank {rank}$", ended.stderr, re.MULTILINE)) == 2
        assert (folder / "said" / f"small-{rank}.txt").read_text() == str(rank)
        assert (folder / "said" / f"large-{rank}.txt").read_text() == str(rank) * LARGE
    assert {name for line in metrics_of(folder) for name in line if name.startswith("of_")} == {
        "of_rank_0",
        "of_rank_1",
    }


@pytest.mark.slow
def test_one_failure_is_reported_with_its_rank(cli):
    ended = torchrun(cli, job=("cluster=torchrun", *TINY, "+fault=raise,rank=1,step=3", "dispatch.max_restarts=0"))
    assert ended.returncode != 0
    failure = summary_of(run_directory(cli))["failure"]
    assert (failure["kind"], failure["rank"], failure["step"]) == ("raised", 1, 3)
    said = f"rank 1 on {failure['host']}: {failure['message']}"
    assert ended.stderr.count(f"ddp_hydra: {said}") == 1
    assert failure["traceback"] in ended.stderr
    cause = ended.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 0 " in cause
    assert said in cause


@pytest.mark.slow
def test_a_mistake_is_told_once(cli):
    ended = torchrun(cli, job=("cluster=torchrun", *TINY, "trainer.epochs=0", "hydra.run.dir=other"))
    assert ended.returncode != 0
    assert ended.stderr.count("ddp_hydra: trainer.epochs=0: give a whole number of at least 1") == 1


def of_torchrun(process: subprocess.Popen[str], rank: int) -> int:
    for child in psutil.Process(process.pid).children():
        if child.environ().get("RANK") == str(rank):
            return child.pid
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.parametrize(
    "end",
    [
        lambda it: it.send_signal(signal.SIGTERM),
        lambda it: os.kill(of_torchrun(it, 1), signal.SIGTERM),
        lambda it: os.killpg(it.pid, signal.SIGINT),
        lambda it: it.kill(),
    ],
    ids=["SIGTERM to torchrun", "SIGTERM to one process", "Ctrl-C in its terminal", "SIGKILL to torchrun"],
)
@pytest.mark.slow
def test_a_job_that_is_told_to_end_saves_first(cli, wait_for, end):
    with running(cli, wait_for) as process:
        started = psutil.Process(process.pid).children(recursive=True)
        end(process)
        _, stderr = process.communicate()
    assert not psutil.wait_procs(started, timeout=PATIENCE_S)[1]
    assert process.returncode != 0
    summary = summary_of(run_directory(cli))
    assert (summary["status"], summary["interrupted"]) == ("interrupted", "interrupt")
    assert f"saved at step {summary['steps']}: go on with resume=" in stderr
    assert (run_directory(cli) / "checkpoints" / "last.pt").exists()
    if "exitcode" in stderr:  # torchrun was not told to end itself
        assert "exitcode  : 130" in stderr


@pytest.mark.slow
def test_a_killed_first_process_is_started_again_where_it_was(cli, wait_for):
    with running(cli, wait_for, "--max-restarts=1", slow=("trainer.epochs=8", "data.delay_s=0.2")) as process:
        wait_for(lambda: [*cli.folder.glob("outputs/*/*/checkpoints/last.pt")], "a checkpoint")
        os.kill(of_torchrun(process, 0), signal.SIGKILL)
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "  resumed   at step " in stdout
    assert (summary_of(run_directory(cli))["status"], summary_of(run_directory(cli))["steps"]) == ("done", 48)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_job_goes_on_with_one_torchrun_of_two(cli, wait_for, number):
    """From a checkpoint of the last step, with the same global batch; nothing is left running."""
    meet = ("--rdzv-backend=c10d", "--rdzv-id=t", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    own = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", *meet)
    slow = (
        "data.delay_s=0.05",
        "trainer.epochs=15",
        "trainer.checkpoint_every_steps=1000",
        "dispatch.restart_wait_s=1",
    )
    job = ("-m", "ddp_hydra", "cluster=torchrun", "cluster.trust_network=true", *TINY, *slow, "hydra.run.dir=run")
    agents = []
    try:
        for node in range(2):
            conf = f"--rdzv-conf=is_host={1 - node},last_call_timeout=20"
            agents.append(cli.start(*own, conf, *job, module="torch.distributed.run", **apart(cli)))
        wait_for((cli.folder / "run" / "metrics.jsonl").exists, "a first step", timeout_s=200)
        started = [child for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
        agents[1].send_signal(number)
        stdout, stderr = agents[0].communicate()
        agents[1].communicate()
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert agents[0].returncode == 0, stderr
    assert not psutil.wait_procs(started, timeout=PATIENCE_S)[1]
    assert "  resumed   at step " in stdout
    summary = summary_of(cli.folder / "run")
    assert (summary["status"], summary["world_size"], summary["steps"], summary["steps_lost"]) == ("done", 1, 90, 0)
    assert summary["samples"] == 90 * 16


@pytest.mark.slow
def test_all_commands_run_on_the_ranks_of_torchrun(cli):
    """Once, whatever the number of processes: a sweep, and an evaluation of its first job."""
    job = ("-m", "cluster=torchrun", *TINY, "trainer.epochs=1", "optimizer.lr=0.1,0.2", "hydra.sweep.dir=sweep")
    swept = torchrun(cli, job=job)
    assert swept.returncode == 0, swept.stderr
    assert swept.stderr.count("2 jobs: 2 done") == 1
    assert summary_of(cli.folder / "sweep" / "0")["world_size"] == 2
    evaluated = torchrun(cli, job=("evaluate", "run=sweep/0", "cluster=torchrun"))
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout.count("val/loss") == 1


@contextlib.contextmanager
def running(
    cli: Any, wait_for: Any, *own: str, slow: Iterable[str] = ("data.delay_s=0.05", "trainer.epochs=500")
) -> Iterator[subprocess.Popen[str]]:
    """A job that takes long, after its first steps."""
    slow = (*slow, "trainer.checkpoint_every_steps=2")
    process = cli.start(*two(*own), "cluster=torchrun", *TINY, *slow, module="torch.distributed.run", **apart(cli))
    try:
        wait_for(lambda: [*cli.folder.glob("outputs/*/*/metrics.jsonl")], "a first step")
        (file,) = cli.folder.glob("outputs/*/*/metrics.jsonl")

        def spanned_s() -> float:
            times = [json.loads(line)["time"] for line in file.read_text().split("\n")[:-1]]
            return max(times, default=0.0) - min(times, default=0.0)

        # Between two steps so far apart, the command has heard from each rank that it trains.
        wait_for(lambda: spanned_s() > 2 * BEAT_S, "steps of more than a heartbeat")
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.slow
def test_any_launcher_that_sets_the_variables_will_do(cli):
    """Here nobody serves a store, as where `srun` starts each process."""
    port = str(free_port())
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **apart(cli)}
    words = ("cluster=torchrun", *TINY, "trainer.epochs=1", "+callbacks.reporter._target_=models.reporter.Reporter")
    processes = [cli.start(*words, RANK=str(rank), LOCAL_RANK=str(rank), **own) for rank in range(2)]
    try:
        ended = [process.communicate() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0, 0], ended
    assert summary_of(run_directory(cli))["status"] == "done"
    assert ended[1] == ("", "")
    assert "printed by rank 1" in (run_directory(cli) / "logs" / "rank-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["mine", "other"])
def test_hosts_meet_with_certificates_from_the_environment_or_say_why_not(cli, other):
    """In Dask's own variables; a host that has those of another authority ends."""
    certificates = {name: Authority(cli.folder / name, name) for name in ("mine", "other")}
    port, wait = str(free_port()), f"cluster.wait_timeout_s={300 if other == 'mine' else 60}"
    processes = []
    for rank, authority in enumerate([certificates["mine"], certificates[other]]):
        cert, key = authority.issue(f"host-{rank}")
        tls = {"TLS__CA_FILE": authority.ca, "REQUIRE_ENCRYPTION": True}
        for role in ("SCHEDULER", "WORKER", "CLIENT"):
            tls |= {f"TLS__{role}__CERT": cert, f"TLS__{role}__KEY": key}
        variables = {f"DASK_DISTRIBUTED__COMM__{name}": str(value) for name, value in tls.items()}
        variables |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        words = (
            "cluster=torchrun",
            wait,
            *TINY,
            "trainer.epochs=1",
            "hydra.run.dir=run",
        )
        processes.append(cli.start(*words, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **variables, **apart(cli)))
    try:
        (_, first), (_, second) = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if other == "mine":
        assert [process.returncode for process in processes] == [0, 0], (first, second)
        assert summary_of(cli.folder / "run")["world_size"] == 2
    else:
        assert "of 2 workers came in" in first
        assert "is not signed by cluster.security.tls_ca_file=" in second


@contextlib.contextmanager
def on_two_hosts(project: Path, *job: str, nodes: str = "2") -> Iterator[list[Host]]:
    """Start a torchrun on each of two hosts, with one rank."""
    with network(2) as hosts:
        for node, host in enumerate(hosts):
            host.boot()
            meet = ("--rdzv-backend=c10d", "--rdzv-id=t", f"--rdzv-endpoint={hosts[0].address}:29400")
            # They have the same name, which leads to none of them.
            here = (f"--rdzv-conf=is_host={1 - node},last_call_timeout=20", f"--local-addr={host.address}")
            own = (f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=1", "-m", "ddp_hydra", "cluster=torchrun")
            trust = ("cluster.trust_network=true",)
            command = ("-m", "torch.distributed.run", *meet, *here, *own, *trust, *TINY, *job)
            host.start(sys.executable, *command, DDP_HYDRA_PROJECT=str(project), OMP_NUM_THREADS="1")
        yield hosts


def is_done(folder: Path) -> bool:
    return (folder / "summary.json").exists() and summary_of(folder)["status"] == "done"


@pytest.mark.slow
@needs_hosts
def test_two_hosts_that_share_no_loopback(project, wait_for, tmp_path):
    """A rank is killed and replaced, and what the other host's rank sends comes through the network."""
    run = tmp_path / "run"
    job = (f"hydra.run.dir={run}", "trainer.epochs=2", "trainer.checkpoint_every_steps=2", "+fault=kill,rank=1,step=3")
    with on_two_hosts(project, *job, "+callbacks.reporter._target_=models.reporter.Reporter") as hosts:
        wait_for(lambda: is_done(run), "the job")
        wait_for(lambda: all(it.name() in PLUMBING for host in hosts for it in host.processes()), "the end")
        told = "".join(host.log.read_text() for host in hosts)
    summary = summary_of(run)
    assert (summary["world_size"], summary["restarts"]) == (2, 1)
    assert summary["attempts"][0]["failure"]["message"].startswith("killed by SIGKILL: ")
    assert "ddp_hydra: " not in told
    for rank in range(2):
        assert f"printed by rank {rank}" in (run / "logs" / f"rank-{rank}.log").read_text()
        assert (run / "said" / f"large-{rank}.txt").read_text() == str(rank) * LARGE


@pytest.mark.slow
@needs_hosts
def test_a_job_goes_on_without_a_host_that_is_lost(project, wait_for, tmp_path):
    """With the same global batch, where torchrun may do with fewer hosts."""
    run = tmp_path / "run"
    job = (f"hydra.run.dir={run}", "trainer.epochs=15", "trainer.checkpoint_every_steps=2", "data.delay_s=0.03")
    quick = ("dispatch.restart_wait_s=1", "dispatch.lost_timeout_s=5")
    with on_two_hosts(project, *job, *quick, nodes="1:2") as hosts:
        wait_for((run / "checkpoints" / "last.pt").exists, "a checkpoint")
        hosts[1].kill()
        wait_for(lambda: is_done(run), "the job")
        wait_for(lambda: all(it.name() in PLUMBING for it in hosts[0].processes()), "the end")
    summary = summary_of(run)
    assert (summary["world_size"], summary["steps"], summary["samples"]) == (1, 90, 90 * 16)
    failure = summary["attempts"][0]["failure"]
    assert (failure["kind"], failure["rank"]) == ("lost", 1)


HERE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TWO_HOSTS = {**HERE, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["cluster=torchrun", "seed=1"], {}, "-m ddp_hydra cluster=torchrun seed=1"),
        (["cluster=inline"], HERE, "torchrun has started this process: give cluster=torchrun"),
        (["cluster=torchrun", "cluster.n_workers=2"], HERE, "torchrun has started one worker on each of 1 hosts"),
        pytest.param(
            ["cluster=torchrun"],
            TWO_HOSTS,
            "or, in a network of your own, cluster.trust_network=true",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["cluster=torchrun", "cluster.security=true"],
            TWO_HOSTS,
            "a certificate that Dask makes stays in this",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_fit_the_environment_is_refused_with_what_to_type(cli, arguments, variables, said):
    ended = cli.run(*arguments, *TINY, **variables)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(cli.folder.rglob("metrics.jsonl"))
