"""What holds for every cluster: workers that come, leave and are replaced, keeping, and ending."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from distributed import Client, LocalCluster, Worker
from omegaconf import OmegaConf

from ddp_hydra import dispatch
from ddp_hydra.cluster import connect, scheduler_plugin
from ddp_hydra.cluster.connection import BySource, workers_of
from ddp_hydra.cluster.reservation import Reservation
from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import fork_client
from tests.integration.support.by_hand import address_in, dask_scheduler, dask_worker
from tests.integration.support.hosts import ROOT
from tests.integration.support.pool import Pool

pytestmark = pytest.mark.integration


def wait_for_workers(client, n, timeout_s, status=lambda: "", hint=""):
    said = {"status": lambda _: status(), "hint": hint, "refusal": lambda _: ""}
    connect.wait_for_workers(client, SimpleNamespace(expected=n, wait_timeout_s=timeout_s, **said), None)


@pytest.fixture(autouse=True)
def pools_end() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # Dask's nannies set some
        yield
        if Pool.made is not None:
            Pool.made.close()
            Pool.made = None


def pool(**arguments: Any) -> contextlib.AbstractContextManager:
    return connect.connect(OmegaConf.create({"_target_": "tests.integration.support.pool.Pool", **arguments}))


# -- any class by its _target_ -----------------------------------------------------------------------------


def test_a_class_without_n_workers_is_scaled_and_its_own_arguments_arrive():
    with pool(n_workers=2, size=3) as client:
        assert [worker["nthreads"] for worker in workers_of(client).values()] == [3, 3]
        assert dispatch.run(client, "os.path:join", "a", "b") == ["a/b", "a/b"]
    assert not Pool.made.is_up


def test_a_local_cluster_has_credentials_of_its_own_where_they_are_wanted(warm_server, monkeypatch):
    monkeypatch.setattr(fork_client, "release", lambda: None)  # it is for all of these tests
    local = OmegaConf.load(ROOT / "conf" / "cluster" / "local.yaml")
    with connect.connect(OmegaConf.merge(local, {"security": True, "n_workers": 1, "preload": None})) as client:
        assert client.scheduler.address.startswith("tls://127.0.0.1:")
        assert dispatch.run(client, "os.path:join", "a", "b") == ["a/b"]


def test_a_cluster_that_is_kept_says_how_to_use_it_again():
    told: list[str] = []
    cfg = OmegaConf.create({"_target_": "tests.integration.support.pool.Pool", "n_workers": 1, "keep": True})
    with contextlib.ExitStack() as stack:
        connect.start(cfg, stack, told.append)
    assert Pool.made.is_up
    assert told == ["the cluster my pool is left running: the next job uses it with cluster.name='my pool'"]


def test_a_cluster_that_did_not_come_up_is_not_kept():
    with pytest.raises(ClusterError, match=r"^0 of 1 workers came in"), pool(keep=True, wait_timeout_s=0.2):
        pass
    assert not Pool.made.is_up


def test_a_cluster_is_left_to_the_jobs_of_others(caplog):
    with contextlib.ExitStack() as later:
        with pool(n_workers=2) as client:
            other = later.enter_context(Client(client.scheduler.address))
            later.enter_context(Reservation(other, "theirs", 1)).reserve("topic", 5)
        assert Pool.made.is_up
    assert "is kept for 1 other jobs that run on it" in caplog.text


# -- workers that come late, leave, and are replaced -------------------------------------------------------


@pytest.mark.slow
def test_so_many_workers_are_waited_for_as_are_there_at_the_same_time(warm_server, tmp_path):
    with dask_scheduler(tmp_path) as file, contextlib.ExitStack() as stack, Client(address_in(file)) as client:
        came: list[str] = []

        def come_and_go() -> None:
            with dask_worker(tmp_path, file, "first"):
                wait_for_workers(client, 1, 100)
                came.extend(workers_of(client))
            for name in ("second", "third"):  # the first is gone
                stack.enter_context(dask_worker(tmp_path, file, name))
                came.append(name)

        thread = threading.Thread(target=come_and_go)
        thread.start()
        wait_for_workers(client, 2, 100)
        names = sorted(str(worker["name"]) for worker in workers_of(client).values())
        thread.join()
    assert names == ["second", "third"]
    assert len(came) == 3


def test_a_cluster_that_adapts_its_size_is_asked_for_workers():
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        cluster.adapt(minimum=0, maximum=3, interval="100ms")
        wait_for_workers(client, 2, 60)
        with Reservation(client, "mine", 3) as held:
            assert len(held.reserve("topic", 60)) == 3


def test_a_worker_that_is_paused_does_not_count(wait_for):
    def become(status: str, dask_worker: Worker) -> None:
        from distributed.core import Status

        dask_worker.status = Status[status]

    with pool(n_workers=2) as client:
        first = list(workers_of(client))[:1]
        wait_for_workers(client, 2, 100)
        client.run(become, "paused", workers=first)
        wait_for(lambda: "paused" in str(workers_of(client)), "a scheduler that knows it")
        with pytest.raises(ClusterError, match=r"^1 of 2 workers came in \d+ s: 1 more paused\. Give clus"):
            wait_for_workers(client, 2, 0.3)
        client.run(become, "running", workers=first)
        wait_for_workers(client, 2, 100)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: "the pool is closed on Sundays", "the pool is closed on Sundays. Give"),
        (lambda: 1 / 0, "could not be read (ZeroDivisionError"),
        (lambda: time.sleep(60) or "too late", "look there. Give"),
        (lambda: "", "look there. Give"),
    ],
)
def test_who_starts_the_workers_is_asked_why_they_do_not_come(client2, monkeypatch, ask, said):
    if said == "look there. Give":
        monkeypatch.setattr("ddp_hydra.cluster.connect.STATUS_S", 0.5)
    with pytest.raises(ClusterError) as caught:
        wait_for_workers(client2, 3, 0.1, ask, "look there")
    assert re.match(r"2 of 3 workers came in \d+ s: ", str(caught.value))
    assert said in str(caught.value)
    assert "cluster.n_workers=2, or cluster.wait_timeout_s=60" in str(caught.value)


def test_a_scheduler_that_is_gone_while_one_waits():
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        client.shutdown()
        with pytest.raises(ClusterError, match="the scheduler does not answer any more"):
            wait_for_workers(client, 1, 0.3)


# -- the end, when the client was killed -------------------------------------------------------------------


def test_a_scheduler_ends_when_its_client_is_gone(warm_server, tmp_path, wait_for):
    with dask_scheduler(tmp_path) as file, Client(address_in(file)) as watcher, Client(address_in(file)) as client:
        client.run_on_scheduler(BySource(scheduler_plugin.set_up), client.id, 0.5)
        time.sleep(1.5)
        assert watcher.scheduler_info(n_workers=0)  # the client is there
        client.close()
        wait_for(lambda: watcher.status != "running", "the end of the scheduler")
