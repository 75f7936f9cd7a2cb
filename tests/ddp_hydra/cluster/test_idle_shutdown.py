"""A cluster ends when the client that started it has been away for too long and nobody else uses it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Scheduler

from ddp_hydra.cluster import scheduler_plugin
from ddp_hydra.cluster.scheduler_plugin import NAME, IdleShutdown, count_other_jobs, set_up


def scheduler(*clients: str, holders: tuple[str, ...] = ()) -> Any:
    ended: list[str] = []

    async def close(reason: str) -> None:
        ended.append(reason)

    reservations = {number: {"holder": holder} for number, holder in enumerate(holders)}
    return SimpleNamespace(
        clients=dict.fromkeys(clients), plugins={}, close=close, ended=ended, _ddp_hydra_reservations=reservations
    )


def test_nothing_happens_while_the_client_is_there_or_another_one_runs_a_job():
    for one in (scheduler("mine"), scheduler("other", holders=("other",))):
        check = IdleShutdown(one, "mine", timeout_s=0.0)
        check.seen -= 10
        asyncio.run(check.check())
        assert one.ended == []
        assert not check.is_over


def test_a_client_that_is_away_may_come_back_for_some_time():
    one = scheduler("other", holders=("gone",))
    check = IdleShutdown(one, "mine", timeout_s=60.0)
    asyncio.run(check.check())
    assert one.ended == []
    check.seen -= 61
    one.clients["mine"] = None
    asyncio.run(check.check())
    del one.clients["mine"]
    asyncio.run(check.check())
    assert one.ended == []
    check.seen -= 61
    for _ in range(2):
        asyncio.run(check.check())
    assert one.ended == ["its client is gone"]


def test_jobs_of_others_are_counted():
    one = scheduler("mine", "other", holders=("mine", "other", "other", "gone"))
    assert count_other_jobs("mine", one) == 2
    assert count_other_jobs("mine", SimpleNamespace(clients={})) == 0


def test_dask_gateway_ends_a_cluster_its_own_way():
    ended = []

    async def shutdown() -> None:
        ended.append("by the gateway")

    one = scheduler()
    one.plugins = {"nanny": object(), "gateway": SimpleNamespace(service=SimpleNamespace(gateway=None))}
    one.plugins["other"] = SimpleNamespace(service=SimpleNamespace(gateway=SimpleNamespace(shutdown=shutdown)))
    asyncio.run(scheduler_plugin.end(one))
    assert (ended, one.ended) == (["by the gateway"], [])


@pytest.mark.medium
def test_a_scheduler_looks_by_itself_until_the_cluster_is_to_be_kept():
    async def run() -> tuple[bool, str]:
        async with Scheduler(dashboard=False, dashboard_address="127.0.0.1:0", protocol="inproc://") as one:
            set_up("mine", 0.04, dask_scheduler=one)
            first = one.periodic_callbacks[NAME]
            set_up("mine", 0.02, dask_scheduler=one)
            assert not first.is_running()
            set_up(None, 0.0, dask_scheduler=one)
            was_kept = NAME not in one.periodic_callbacks
            set_up("mine", 0.02, dask_scheduler=one)
            await asyncio.wait_for(one.finished(), 100)
            return was_kept, one.status.name

    assert asyncio.run(run()) == (True, "closed")
