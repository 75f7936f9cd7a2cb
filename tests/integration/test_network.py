"""Networks as they are: several interfaces, IPv6 only, mapped ports, workers that the client cannot reach."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from distributed import Client, Nanny, Scheduler, SpecCluster

from ddp_hydra import dispatch
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.errors import ClusterError
from tests.integration.support.hosts import Hosts, ip, needs_hosts
from tests.integration.support.training import train

pytestmark = pytest.mark.integration


def place() -> tuple[float, list[str], list[str]]:
    """The sum of ones, where this rank meets others, and where it listens."""
    import psutil

    total = torch.ones(1)
    dist.all_reduce(total)
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    found = psutil.Process().net_connections("inet")
    listening = sorted({f"{c.laddr.ip} {c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN})
    dist.barrier()
    return total.item(), [os.environ[name] for name in names], listening


# -- several interfaces ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_cables(warm_server) -> Iterator[Hosts]:
    """Hosts 1, 2 and 3 on two networks; Dask talks over the first."""
    with Hosts(3, cables=2) as hosts:
        yield hosts


@pytest.fixture
def hosts(two_cables) -> Hosts:
    two_cables.heal()
    return two_cables


@pytest.fixture
def client(hosts) -> Iterator[Client]:
    with hosts.client() as client:
        yield client


@pytest.mark.slow
@needs_hosts
def test_ranks_meet_on_the_interface_that_was_chosen(hosts, client, gang):
    """On the other network they could not."""
    for pair in ((1, 2), (1, 3), (2, 3)):
        hosts.part(*pair)
    places = gang(client, interface="eth1", timeout_s=120).run(place)
    first = hosts.hosts[1].second
    assert [found[:2] for found in places] == [(3.0, [first, "eth1", "=eth1"])] * 3
    for number, (_, _, listening) in enumerate(places, start=1):
        assert {where.split()[0] for where in listening} == {hosts.hosts[number].second}


@needs_hosts
def test_an_interface_that_some_hosts_lack_is_refused_before_the_job(hosts, client, gang):
    ip("-n", hosts.hosts[2].namespace, "link", "set", "eth1", "down")
    ip("-n", hosts.hosts[2].namespace, "address", "flush", "dev", "eth1")
    try:
        with pytest.raises(ClusterError) as caught:
            gang(client, interface="eth1").run(place)
    finally:
        hosts.hosts[2].add_address(hosts.hosts[2].second, "eth1")
        ip("-n", hosts.hosts[2].namespace, "link", "set", "eth1", "up")
    assert str(caught.value).startswith("dispatch.interface=eth1 is not there on all hosts, or has no address:\n")
    assert re.search(rf"tcp://{hosts.address(2)}:\d+: host \S+ has .*eth0 \({hosts.address(2)}", str(caught.value))
    assert hosts.address(3) not in str(caught.value)


@needs_hosts
@pytest.mark.slow
def test_ports_of_ranks_are_those_that_the_system_gives_out(hosts, client, gang):
    """gloo asks for any; what an operator can set is which the system gives."""
    for host in hosts.hosts[1:]:
        host.start("sh", "-c", "echo 42000 42099 > /proc/sys/net/ipv4/ip_local_port_range")
    try:
        places = gang(client, port_range=(42200, 42299)).run(place)
    finally:
        for host in hosts.hosts[1:]:
            host.start("sh", "-c", "echo 32768 60999 > /proc/sys/net/ipv4/ip_local_port_range")
    ports = [sorted(int(where.split()[1]) for where in listening) for _, _, listening in places]
    assert [len(found) for found in ports] == [2, 1, 1]
    assert ports[0].pop() in range(42200, 42300)
    assert all(42000 <= port <= 42099 for found in ports for port in found)


# -- a client that reaches only the scheduler --------------------------------------------------------------


@pytest.mark.slow  # each of the three hosts imports torch
@needs_hosts
def test_records_and_checkpoints_come_home_to_a_client_that_reaches_only_the_scheduler(
    hosts, client, project, tmp_path
):
    tiny = ("data=tiny", "model=tiny", "trainer.epochs=2", "trainer.log_every_steps=1")
    open_way = train(client, project, tmp_path / "open", *tiny, ranks=3)
    for number in (1, 2, 3):
        hosts.hide(number)
    with hosts.client() as far:  # nothing is left of connections that there may have been
        host, port = next(iter(workers_of(far))).removeprefix("tcp://").split(":")
        with pytest.raises(OSError, match="No route to host"):
            socket.create_connection((host, int(port)), timeout=5)
        only_scheduler = train(far, project, tmp_path / "far", *tiny, ranks=3)
        again = train(far, project, tmp_path / "again", *tiny, ranks=3, resume=tmp_path / "far/checkpoints/last.pt")
    assert only_scheduler.metrics() == open_way.metrics()
    assert again.value["steps"] == only_scheduler.value["steps"]
    mine, other = (run.checkpoint("last.pt")["model"] for run in (only_scheduler, open_way))
    assert all(torch.equal(mine[name], other[name]) for name in other)


# -- mapped ports ------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_hosts
def test_a_worker_behind_mapped_ports_hosts_rank_0(warm_server, gang):
    """Known by an address of another machine, as in a container; what that machine maps are two ports."""
    with Hosts(2, workers_each=0) as hosts, hosts.client() as client:
        outside = hosts.address(0).rpartition(".")[0] + ".5"
        hosts.map_ports(0, outside, 1, 9001, 9101)
        hosts.add_worker(1, "--listen-address", "tcp://0.0.0.0:9001", "--contact-address", f"tcp://{outside}:9001")
        hosts.add_worker(2)
        client.wait_for_workers(2, timeout=100)
        assert f"tcp://{outside}:9001" in workers_of(client)
        first, second = gang(client, port_range=(9101, 9101)).run(place)
    assert first[:2] == second[:2] == (2.0, [outside, "eth0", "=eth0"])
    assert {where.split()[0] for where in first[2] if where.endswith(" 9101")} == {"0.0.0.0"}
    assert [where.split()[0] for where in first[2] if not where.endswith(" 9101")] == [hosts.address(1)]
    assert [where.split()[0] for where in second[2]] == [hosts.address(2)]


# -- IPv6 --------------------------------------------------------------------------------------------------


def six(*overrides: str) -> tuple[str, ...]:
    return ("data=tiny", "model=tiny", "trainer.max_steps=4", *overrides)


@pytest.mark.slow
@needs_hosts
def test_a_gang_trains_where_there_is_only_ipv6(warm_server, project, tmp_path):
    with Hosts(2, family=6) as hosts, hosts.client() as client:
        assert all("[fd77:" in worker for worker in workers_of(client))
        places = dispatch.run(client, place)
        trained = train(client, project, tmp_path / "run", *six())
    assert [found[:2] for found in places] == [(2.0, [hosts.address(1), "eth0", "=eth0"])] * 2
    assert [line["step"] for line in trained.metrics()][-1] == 4


@pytest.mark.usefixtures("client2")  # nannies of this process leave variables behind once
@pytest.mark.slow
def test_workers_on_the_loopback_of_ipv6():
    options = {"host": "[::1]", "nthreads": 1, "dashboard": False}
    workers = {number: {"cls": Nanny, "options": options} for number in range(2)}
    scheduler = {"cls": Scheduler, "options": {"host": "[::1]", "port": 0, "dashboard_address": "127.0.0.1:0"}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=100)
        assert all("[::1]" in worker for worker in workers_of(client))
        assert [found[:2] for found in dispatch.run(client, place)] == [(2.0, ["::1", "lo", "=lo"])] * 2


# -- variables of the user ---------------------------------------------------------------------------------


def test_a_choice_in_the_environment_of_the_workers_goes_first_with_a_warning(client2, gang, caplog):
    def choose(name: str) -> None:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name

    client2.run(choose, "lo")
    try:
        with caplog.at_level(logging.WARNING):
            interfaces = [names[1] for _, names, _ in gang(client2, interface="eth0").run(place)]
    finally:
        client2.run(choose, "")
    assert interfaces == ["lo", "lo"]
    assert "GLOO_SOCKET_IFNAME of the workers overrides dispatch.interface:" in caplog.text
