"""Several hosts: ranks find each other over the network, and whatever is cut is detected, named and survived."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from ddp_hydra import dispatch, results
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.dispatch import workers
from ddp_hydra.errors import ClusterError, Interrupted, RankFailed
from ddp_hydra.job.run import run_job
from ddp_hydra.rank.outbox import CHUNK_BYTES
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.training.checkpoint import read
from ddp_hydra.writers.handler import ResultsHandler, default_writers
from tests.integration.support import hosts as machines
from tests.integration.support.hosts import ROOT, Hosts, ip, needs_hosts

pytestmark = [pytest.mark.integration, needs_hosts]


TCP_S = "12s"
"""How soon Dask itself notices that a host is gone; it takes no less."""


@pytest.fixture(scope="module")
def three_hosts(warm_server, tmp_path_factory) -> Iterator[Hosts]:
    """Hosts 1, 2 and 3, a worker on each; they see no file of the client's."""
    with (
        dask.config.set({"distributed.comm.timeouts.tcp": TCP_S}),
        Hosts(3, hidden=[tmp_path_factory.getbasetemp()], DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=TCP_S) as hosts,
    ):
        yield hosts


@pytest.fixture
def hosts(three_hosts) -> Hosts:
    """The same, as whole as they were."""
    three_hosts.heal()
    return three_hosts


@pytest.fixture
def client(hosts):
    with hosts.client() as client:
        yield client


# -- the hosts themselves ----------------------------------------------------------------------------------

OWNER = """
import sys
from tests.integration.support import hosts
with hosts.network(2) as made:
    made[1].boot()
    made[1].start("sleep", "60")
    print(made[1].namespace, flush=True)
    sys.stdin.read()
"""


def sleeping(namespace: str) -> psutil.Process | None:
    for pid in ip("netns", "pids", namespace).split():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := psutil.Process(int(pid))).name() == "sleep":
                return process
    return None


def test_hosts_of_a_process_that_was_killed_are_removed_and_those_of_others_stay(wait_for):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        namespace = owner.stdout.readline().strip()
        machines.sweep()
        assert namespace in ip("netns", "list")
        sleeper = wait_for(lambda: sleeping(namespace), "a process on the host")
        owner.kill()
    wait_for(lambda: not sleeper.is_running(), "its end")
    # The tests of another process may be removing it.
    wait_for(lambda: machines.sweep() or namespace not in ip("netns", "list"), "the end of its host")
    number = namespace.split("-")[1]
    assert not Path(f"/sys/class/net/ddph{number}").exists()
    assert not Path(f"/run/ddph{number}").exists()


# -- as long as all is well --------------------------------------------------------------------------------


def test_ranks_count_by_host_and_meet_over_the_network(hosts, client):
    def place():
        total = torch.ones(1)
        dist.all_reduce(total)
        names = ("RANK", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return (
            total.item(),
            os.environ["MASTER_ADDR"],
            os.environ["GLOO_SOCKET_IFNAME"],
            [int(os.environ[name]) for name in names],
        )

    places = [(3.0, hosts.address(1), "eth0", [number, number, 0, 1]) for number in range(3)]
    assert dispatch.run(client, place) == places


def test_two_workers_of_a_host_share_its_warm_server(hosts, client):
    def place():
        import psutil

        return os.environ["NODE_RANK"], os.environ["LOCAL_RANK"], psutil.Process().ppid()

    hosts.add_worker(2)
    client.wait_for_workers(4, timeout=100)
    try:
        places = dispatch.run(client, place)
        assert [place[:2] for place in places] == [("0", "0"), ("1", "0"), ("1", "1"), ("2", "0")]
        assert places[1] == ("1", "0", places[2][2])
    finally:
        workers = workers_of(client)
        client.retire_workers([max((w for w in workers if hosts.number(w) == 2), key=lambda w: workers[w]["name"])])


def content(number: int, size: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest() * (size // 32)


def test_files_and_large_values_come_from_hosts_whose_files_the_client_does_not_see(hosts, client, gang, tmp_path):
    size = 20 * 2**20
    assert size > 2 * CHUNK_BYTES

    def submit():
        rank = dist.get_rank()
        results.submit(f"large/{rank}.bin", content(rank, size))
        return content(10 + rank, size)

    large = gang(client)
    with ResultsHandler(default_writers(tmp_path / "run", large.fetch, progress=False)) as handler:
        large.on_record = handler.handle
        values = large.run(submit)
    assert not any(any(host.folder.iterdir()) for host in hosts.hosts)
    assert values == [content(10 + number, size) for number in range(3)]
    for number in range(3):
        assert (tmp_path / "run" / "large" / f"{number}.bin").read_bytes() == content(number, size)


def test_files_of_the_client_go_to_hosts_that_do_not_see_them(client, gang, tmp_path):
    def look(files):
        path = Path(files["resume"])
        return str(path), hashlib.sha256(path.read_bytes()).hexdigest() if dist.get_rank() == 0 else ""

    file = tmp_path / "file.bin"
    file.write_bytes(content(1, 20 * 2**20))
    (path, digest), *_ = gang(client, files={"resume": file}).run(look)
    assert path != str(file)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()


# -- a cut, a crash ----------------------------------------------------------------------------------------

TINY = (
    "data=tiny",
    "model=tiny",
    "optimizer.lr=0.1",
    "trainer.threads=1",
    "trainer.epochs=4",
    "trainer.log_every_steps=1",
    "trainer.checkpoint_every_steps=2",
    "results.keep_checkpoints=null",
)
"""Four steps an epoch on three ranks, with nothing random that depends on their number."""
ON_TWO = (
    "dispatch.max_restarts=1",
    "dispatch.min_ranks=2",
    "dispatch.restart_wait_s=1",
    "dispatch.lost_timeout_s=5",
)
SLOW = "data.delay_s=0.1"
"""Time enough to pull a cable."""
TIMES = ("time", "samples_per_s", "tokens_per_s", "slowest_rank", "data_wait", "attempt")


@dataclass
class Run:
    folder: Path

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that hold in the end, without what is measured by a clock."""
        with contextlib.suppress(FileNotFoundError):
            found = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
            plain = [{name: value for name, value in line.items() if name not in TIMES} for line in found]
            return list({(line["step"], "val/loss" in line): line for line in plain}.values())
        return []

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def first_failure(self) -> dict[str, Any]:
        return self.summary()["attempts"][0]["failure"]

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "checkpoints" / "last.pt", weights_only=True)["model"]


@pytest.fixture
def new_run(tmp_path) -> Callable[[str], Run]:
    return lambda name: Run(tmp_path / name)


@pytest.fixture
def train(client, project, monkeypatch) -> Callable[..., None]:
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    monkeypatch.setattr("ddp_hydra.cluster.connect.connect", lambda *_, **__: contextlib.nullcontext(client))

    def run(run: Run, *overrides: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        schema.register()
        with initialize_config_dir(str(project / "conf"), **VERSION_BASE):
            cfg = compose("config", [*TINY, *overrides])
        with ThreadPoolExecutor(1) as pool:
            accident = pool.submit(meanwhile)
            run_job(cfg, run.folder)
            accident.result()

    return run


def test_weights_to_begin_with_reach_hosts_that_do_not_see_their_file(train, new_run):
    first, second = new_run("first"), new_run("second")
    train(first, "trainer.epochs=1")
    train(second, f"+model.weights={first.folder}", "trainer.epochs=1", "optimizer.lr=1e-30")
    for name, value in first.weights().items():
        assert torch.equal(second.weights()[name], value)


def test_parts_of_a_checkpoint_come_from_all_workers_and_reach_all_of_them(hosts, client, train, new_run):
    """Two of them are on one host, each with a folder of its own."""
    hosts.add_worker(2)
    client.wait_for_workers(4, timeout=100)
    parts = ("parallel=fsdp2", "trainer.shard_above_gb=0", "optimizer.fused=false", "data.batch_size=6")
    parts += ("trainer.epochs=2",)
    try:
        whole, resumed = new_run("whole"), new_run("resumed")
        train(whole, *parts)
        train(resumed, *parts, f"resume={whole.folder / 'checkpoints' / 'step-000004'}")
        last, wanted = (read(find_checkpoint(run.folder)) for run in (resumed, whole))
        assert last["position"]["step"] == 8
        for name, value in wanted["model"].items():
            assert torch.equal(last["model"][name], value)
    finally:
        workers = workers_of(client)
        client.retire_workers([max((w for w in workers if hosts.number(w) == 2), key=lambda w: workers[w]["name"])])


@pytest.fixture(scope="module")
def wholes() -> dict[tuple[str, ...], Run]:
    return {}


@pytest.fixture
def uninterrupted(train, wholes, tmp_path_factory) -> Callable[..., Run]:
    """Return a run to which nothing happens; it is trained when first asked for."""

    def run(*overrides: str) -> Run:
        if overrides not in wholes:
            whole = Run(tmp_path_factory.mktemp("whole") / "run")
            train(whole, *overrides)
            wholes[overrides] = whole
        return wholes[overrides]

    return run


def assert_same_weights(run: Run, other: Run) -> None:
    weights, expected = run.weights(), other.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def assert_same_curve(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same samples in the same batches, so the same losses, but for what the order of a sum changes."""
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "gone"])
def test_a_paused_job_continues_with_the_checkpoint_that_its_host_has_kept(
    train, uninterrupted, new_run, client, monkeypatch, is_kept
):
    called, run, call = [], new_run("run"), workers.WorkerCaller.call

    def noted(caller: Any, worker: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        called.append(function.__name__)
        return call(caller, worker, function, *args, **options)

    monkeypatch.setattr(workers.WorkerCaller, "call", noted)
    train(run, "trainer.pause_after_validations=1")
    assert run.summary()["status"] == "paused"
    assert "keep" in called
    if not is_kept:
        client.run(lambda dask_worker: shutil.rmtree(Path(dask_worker.local_directory, "ddp_hydra-checkpoints"), True))
    called.clear()
    train(run, f"resume={run.folder}")
    assert called[:2] == ["is_same_file", "find"]
    assert ("write" in called) is not is_kept
    assert_same_weights(run, uninterrupted())


@pytest.mark.slow
def test_a_cut_that_is_mended_in_time_changes_nothing(hosts, train, uninterrupted, new_run, wait_for):
    whole, run = uninterrupted(), new_run("run")

    def cut_for_a_moment():
        wait_for(lambda: run.step() >= 6, "six steps")
        hosts.cut(2)
        time.sleep(1.5)
        hosts.mend(2)

    train(run, SLOW, "dispatch.max_restarts=1", "dispatch.lost_timeout_s=20", meanwhile=cut_for_a_moment)
    assert run.lines() == whole.lines()
    assert_same_weights(run, whole)
    assert run.summary()["restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "left"), [(1, 2), (3, 1)])
def test_a_host_that_is_cut_off_is_named_and_the_others_go_on(
    hosts, train, uninterrupted, new_run, wait_for, lost, left
):
    """Host 1 has rank 0, which writes the checkpoints and is where the others meet.

    When it comes back, too late, it does not disturb: its rank ends.
    """
    whole, run = uninterrupted(), new_run("run")

    def cut_and_mend():
        wait_for(lambda: run.step() >= 6, "six steps")
        hosts.cut(lost)
        wait_for(lambda: any("rank 0/2" in title for title in hosts.ranks(left)), "a new attempt on two hosts")
        assert hosts.ranks(lost)
        hosts.mend(lost)

    train(run, SLOW, *ON_TWO, meanwhile=cut_and_mend)
    wait_for(lambda: not hosts.ranks(lost), "the end of the rank on the host that came back")
    assert_same_curve(run.lines(), whole.lines())
    summary = run.summary()
    assert (summary["status"], summary["restarts"], summary["world_size"]) == ("done", 1, 2)
    assert summary["samples"] == 4 * 96
    failure = run.first_failure()
    assert (failure["kind"], failure["rank"], failure["host"]) == ("lost", lost - 1, hosts.address(lost))
    assert re.search(rf"nothing was heard from its worker tcp://{hosts.address(lost)}:\d+ for .*=5", failure["message"])


@pytest.mark.slow
def test_a_spare_host_takes_over_from_one_that_is_gone(hosts, train, uninterrupted, new_run, wait_for):
    whole, run = uninterrupted("dispatch.ranks=2"), new_run("run")
    killed = []

    def kill():
        wait_for(lambda: run.step() >= 6, "six steps")
        killed.extend(number for number in (1, 2, 3) if any("rank 0/" in title for title in hosts.ranks(number)))
        hosts.kill(*killed)

    train(run, SLOW, "dispatch.ranks=2", "dispatch.max_restarts=1", meanwhile=kill)
    assert run.lines() == whole.lines()
    assert_same_weights(run, whole)
    summary, failure = run.summary(), run.first_failure()
    assert (summary["status"], summary["restarts"], summary["world_size"]) == ("done", 1, 2)
    assert (failure["kind"], failure["rank"], failure["host"]) == ("lost", 0, hosts.address(*killed))


@pytest.mark.slow
def test_ranks_that_no_longer_reach_each_other_are_named(hosts, train, new_run, wait_for):
    """All of them still reach the scheduler."""
    run = new_run("run")

    def part():
        wait_for(lambda: run.step() >= 6, "six steps")
        hosts.part(2, 3)

    with pytest.raises(RankFailed, match=r"rank \d on 10\.77\.\S+: hangs: no progress for \d+ s in .* of step \d"):
        train(run, SLOW, "dispatch.hang_timeout_s=5", "dispatch.max_restarts=0", meanwhile=part)
    failure = run.first_failure()
    assert (failure["kind"], failure["host"]) == ("hung", hosts.address(failure["rank"] + 1))
    assert failure["traceback"]
    assert all("(most recent call first)" in run.log(rank) for rank in range(3))
    assert not hosts.ranks(1) + hosts.ranks(2) + hosts.ranks(3)


@pytest.mark.slow
def test_a_preempted_host_lets_the_job_save_and_end(hosts, train, uninterrupted, new_run, wait_for):
    whole, run, rest = uninterrupted(), new_run("run"), new_run("rest")

    def preempt():
        wait_for(lambda: run.step() >= 6, "six steps")
        hosts.terminate(2)

    with pytest.raises(Interrupted, match=r"a worker is being shut down \(SIGTERM\); saved at step \d+"):
        train(run, SLOW, meanwhile=preempt)
    assert run.summary()["status"] == "interrupted"
    wait_for(lambda: not hosts.processes(2), "the end of all that ran on the host")
    hosts.heal()
    train(rest, f"resume={run.folder}")
    assert run.lines() + rest.lines() == whole.lines()
    assert_same_weights(rest, whole)


@pytest.mark.slow
def test_a_scheduler_that_is_cut_off_ends_the_job_with_a_sentence_and_all_ranks_end(hosts, client, gang, wait_for):
    def run_on():
        results.text("up", "")
        time.sleep(600)

    def cut(record):
        if record.kind == "text" and 0 not in hosts.hurt:
            hosts.cut(0)

    with pytest.raises(ClusterError, match=rf"the scheduler {hosts.scheduler} was not heard for 5 s"):
        gang(client, on_record=cut, lost_timeout_s=5).run(run_on)
    assert hosts.ranks(1)
    wait_for(lambda: not hosts.ranks(1) + hosts.ranks(2) + hosts.ranks(3), "the end of all ranks")
