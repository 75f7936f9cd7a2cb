"""Several hosts: ranks find each other over the network, and whatever is cut is detected, named and survived."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_hydra import dispatch, results
from ddp_hydra.rank_host.spool import CHUNK_BYTES
from ddp_hydra.writers import ResultsHandler, default_writers
from tests.integration import hosts as machines
from tests.integration.hosts import ROOT, Hosts, ip, needs_hosts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90), needs_hosts]


@pytest.fixture(scope="module")
def three_hosts(warm_server, tmp_path_factory) -> Iterator[Hosts]:
    """Hosts 1, 2 and 3, a worker on each; they see no file of the client's."""
    with Hosts(3, hidden=[tmp_path_factory.getbasetemp()]) as hosts:
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
from tests.integration import hosts
with hosts.network(2) as made:
    made[1].boot()
    made[1].start("sleep", "60")
    print(made[1].namespace, flush=True)
    sys.stdin.read()
"""


def sleeping(namespace: str) -> psutil.Process | None:
    """The program that a host was told to run."""
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
        sleeper = wait_for(lambda: sleeping(namespace), 5, "a process on the host")
        owner.kill()
    wait_for(lambda: not sleeper.is_running(), 5, "its end")
    machines.sweep()
    assert namespace not in ip("netns", "list")
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
    client.wait_for_workers(4, timeout=30)
    try:
        places = dispatch.run(client, place)
        assert [place[:2] for place in places] == [("0", "0"), ("1", "0"), ("1", "1"), ("2", "0")]
        assert places[1] == ("1", "0", places[2][2])
    finally:
        workers = client.scheduler_info(n_workers=-1)["workers"]
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
