"""Jobs on a real Ray of two nodes, and on one that the job starts itself."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import wait_for
from tests.integration.support.by_hand import killed_at_work, program
from tests.integration.support.training import metrics_of, summary_of
from tests.support.ports import free_port

pytest.importorskip("ray")
pytestmark = [pytest.mark.integration, pytest.mark.slow]
HOST = "127.0.0.1"
JOB = ("cluster=ray", "data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1")


@dataclass
class Nodes:
    """A Ray of two nodes with two CPUs each, as an operator starts it."""

    address: str
    variables: dict[str, str]
    folder: Path
    client_port: int
    pids: list[int]

    @property
    def job(self) -> tuple[str, ...]:
        return (*JOB, f"cluster.address={self.address}")

    @contextmanager
    def node(self, *words: object, cpus: int = 2) -> Iterator[int]:
        """Start a node; yield the pid of its `ray start`, which leads a process group."""
        number = len(self.pids)
        log, own = self.folder / f"node-{number}.log", f"127.0.0.{number + 1}"  # a command connects to the first
        command = (Path(sys.executable).with_name("ray"), "start", *words, "--block", f"--node-ip-address={own}")
        limits = (f"--num-cpus={cpus}", f"--object-store-memory={80 * 2**20}")
        with program(*command, *limits, log=log, **self.variables) as process:
            self.pids.append(process.pid)
            wait_for(lambda: "Ray runtime started" in log.read_text(), f"{log.name} of Ray", timeout_s=150)
            try:
                yield process.pid
            finally:
                self.pids.remove(process.pid)

    def of_dask(self, *pids: int) -> list[psutil.Process]:
        """Return the scheduler and the workers' nannies that run on the nodes, or on some of them."""
        found = []
        for pid in pids or self.pids:
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    words = process.cmdline()  # a scheduler changes it
                    if words[1:3] == ["-m", "dask"] or "".join(words[:1]).startswith("dask scheduler"):
                        found.append(process)
        return found


@pytest.fixture(scope="module")
def nodes(warm_server) -> Iterator[Nodes]:
    # Paths of sockets are short.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")))
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        port, client_port = free_port(), free_port()
        nodes = Nodes(f"{HOST}:{port}", variables, folder, client_port, [])
        own = ("--include-dashboard=false", f"--ray-client-server-port={client_port}", f"--temp-dir={folder}")
        stack.enter_context(nodes.node("--head", f"--port={port}", *own))
        stack.enter_context(nodes.node(f"--address={nodes.address}"))
        yield nodes


@pytest.fixture(autouse=True)
def nothing_left(nodes) -> Iterator[None]:
    yield
    wait_for(lambda: not nodes.of_dask(), "the end of all that ran on the nodes")


def test_a_job_on_both_nodes_gives_the_numbers_of_a_local_cluster(cli, nodes):
    spread = ("cluster.strategy=STRICT_SPREAD", "trainer.epochs=3")
    cli.done(*nodes.job, *spread, "hydra.run.dir=there", **nodes.variables)
    assert summary_of(cli.folder / "there")["world_size"] == 2
    cli.done(*JOB[1:], "trainer.epochs=3", "hydra.run.dir=here")
    assert metrics_of(cli.folder / "there") == metrics_of(cli.folder / "here")


SLOW = ("trainer.epochs=8", "data.delay_s=0.1", "hydra.run.dir=run")


def survives(cli, nodes: Nodes, *words: str, fault: Callable[[], object]) -> dict[str, Any]:
    """Run a job of 8 epochs, kill something after its first checkpoint, and return the summary of its end."""
    process = cli.start(*nodes.job, *SLOW, *words, **nodes.variables)
    try:
        wait_for((cli.folder / "run" / "checkpoints" / "last.pt").exists, "a checkpoint")
        fault()
        out, err = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, out + err
    assert metrics_of(cli.folder / "run")[-1]["epoch"] == 8
    return summary_of(cli.folder / "run")


def test_a_worker_that_is_killed_is_replaced_by_ray(cli, nodes):
    def kill_worker() -> None:
        next(one for one in nodes.of_dask() if "worker" in one.cmdline()).kill()

    ended = survives(cli, nodes, fault=kill_worker)
    assert (ended["status"], ended["restarts"]) == ("done", 1)


def test_the_worker_of_a_lost_node_goes_to_another_one(cli, nodes):
    with nodes.node(f"--address={nodes.address}", cpus=1) as third:

        def kill_node() -> None:
            if len(nodes.of_dask(third)) > 1:
                pytest.skip("Ray has taken the command for a process of this node, so the scheduler is there, too")
            assert len(nodes.of_dask(third)) == 1
            os.killpg(third, signal.SIGKILL)

        spread = ("cluster.n_workers=3", "dispatch.ranks=3", "cluster.strategy=SPREAD")
        ended = survives(cli, nodes, *spread, fault=kill_node)
    assert (ended["status"], ended["restarts"], ended["world_size"]) == ("done", 1, 3)


def test_a_job_from_a_machine_that_is_not_a_node(cli, nodes):
    words = (*JOB, f"cluster.address=ray://{HOST}:{nodes.client_port}", "hydra.run.dir=run")
    ended = cli.run(*words, **nodes.variables)
    if "Starting Ray client server failed" in ended.stderr:  # as Ray's proxy does now and then on a busy machine
        ended = cli.run(*words, **nodes.variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary_of(cli.folder / "run")["world_size"] == 2


def test_too_few_workers_are_told_with_what_ray_says(cli, nodes):
    ended = cli.run(*nodes.job, "cluster.n_workers=9", "cluster.wait_timeout_s=3", **nodes.variables)
    assert ended.returncode == 1
    assert re.search(
        r"0 of 9 workers came in \d+ s: Ray's placement group of 9 x \{CPU=1\} is (PENDING|INFEASIBLE); "
        r"Ray has \d of 4 CPU free\. Give",
        ended.stderr,
    ), ended.stderr


def test_a_cluster_is_kept_used_again_and_ended(cli, nodes):
    kept = cli.done(*nodes.job, "cluster.keep=true", "hydra.run.dir=first", **nodes.variables)
    again = re.search(r"with (cluster=ray \S+ cluster\.name=\S+)", kept.stdout + kept.stderr)
    assert again, kept.stdout + kept.stderr
    before = {process.pid for process in nodes.of_dask()}
    assert len(before) == 3
    words = again[1].split()
    cli.done(*JOB[1:], *words, "cluster.keep=true", "hydra.run.dir=second", **nodes.variables)
    assert {process.pid for process in nodes.of_dask()} == before
    cli.done(*JOB[1:], *words, "hydra.run.dir=third", **nodes.variables)
    wait_for(lambda: not nodes.of_dask(), "the end of the kept cluster")
    gone = cli.run(*JOB[1:], *words, **nodes.variables)
    assert "no cluster of the name" in gone.stderr


def test_a_killed_client_leaves_nothing_on_the_nodes(cli, nodes):
    with killed_at_work(cli, *nodes.job, **nodes.variables):
        assert len(nodes.of_dask()) == 3


def test_without_an_address_the_job_starts_a_ray_and_ends_it(cli):
    before = set(Path("/tmp").glob("ddp_hydra-ray-*"))
    cli.done(*JOB, "cluster.n_workers=3", "dispatch.ranks=3", "hydra.run.dir=run")
    assert summary_of(cli.folder / "run")["world_size"] == 3
    left = set(Path("/tmp").glob("ddp_hydra-ray-*")) - before
    for folder in left:
        shutil.rmtree(folder)
    assert not left
