from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.cluster import scheduler_plugin
from ddp_hydra.cluster.scheduler_plugin import FRONT, LATE_S, ask_for_workers, release, reserve, reserve_or_wait
from tests.support.clocks import set_time
from tests.support.scheduler import Scheduler

# -- reservations on the scheduler -------------------------------------------------------------------------


def test_workers_of_one_gang_are_not_taken_by_another():
    scheduler = Scheduler("a:1", "a:2", "b:1")
    assert scheduler.reserve("one", 2) == {"workers": {"a:1": "a", "a:2": "a"}}
    assert scheduler.reserve("two", 2, holder="you") == {"wanted": 2, "free": 1, "total": 3}
    assert scheduler.reserve("two", 1, holder="you") == {"workers": {"b:1": "b"}}
    assert scheduler.reserve("three", 1) == {"wanted": 1, "free": 0, "total": 3}
    release("one", scheduler)
    assert scheduler.reserve("three", 1)["workers"] == {"a:1": "a"}


def test_without_a_number_a_gang_wants_all_workers_also_those_that_are_held():
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("one", 1)
    assert scheduler.reserve("two", None) == {"wanted": 2, "free": 1, "total": 2}
    release("one", scheduler)
    assert len(scheduler.reserve("two", None)["workers"]) == 2
    assert Scheduler().reserve("one", None) == {"wanted": 1, "free": 0, "total": 0}


@pytest.mark.parametrize(("there", "got"), [(1, None), (2, 2), (3, 3)])
def test_all_workers_are_no_fewer_than_were_asked_for(there, got):
    answer = Scheduler(*(f"a:{n}" for n in range(there))).reserve("one", None, expected=2)
    assert answer.get("wanted") == (None if got else 2)
    assert len(answer.get("workers", ())) == (got or 0)


@pytest.mark.parametrize("status", [Status.paused, Status.closing, Status.closing_gracefully, Status.init])
def test_only_running_workers_are_taken(status):
    scheduler = Scheduler("a:1")
    scheduler.add("a:2", status)
    assert scheduler.reserve("one", 2) == {"wanted": 2, "free": 1, "total": 1}


def test_workers_to_avoid_are_not_taken_though_they_are_there():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    assert scheduler.reserve("one", 2, avoid=["a:1"])["workers"].keys() == {"a:2", "a:3"}
    assert scheduler.reserve("one", 3, avoid=["a:1"]) == {"wanted": 3, "free": 2, "total": 2}


def test_what_a_gang_held_before_counts_as_free_for_itself():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    scheduler.reserve("one", 2)
    assert scheduler.reserve("one", 3)["workers"].keys() == {"a:1", "a:2", "a:3"}
    assert scheduler.reserve("one", 1)["workers"].keys() == {"a:1"}
    assert scheduler.reserve("two", 2)["workers"].keys() == {"a:2", "a:3"}


@pytest.mark.parametrize(("there", "got"), [(1, None), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_a_gang_takes_as_many_as_it_can_have_but_not_fewer_than_the_least(there, got):
    scheduler = Scheduler(*(f"a:{n}" for n in range(there)))
    answer = scheduler.reserve("one", 4, least=2)
    assert (len(answer["workers"]) if "workers" in answer else None) == got


def test_what_a_dead_client_held_is_free():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1, holder="you")
    del scheduler.clients["you"]  # without a word
    assert scheduler.reserve("two", 1)["workers"] == {"a:1": "a"}
    assert scheduler.reserved == {"two": ["a:1"]}


def test_a_client_that_leaves_gives_back_all_it_held_and_nothing_of_others():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    for gang, holder in (("one", "you"), ("two", "me"), ("three", "you")):
        scheduler.reserve(gang, 1, holder=holder)
    scheduler.remove_client("you")
    assert scheduler.reserved == {"two": ["a:2"]}


@given(st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(0, 4), st.sampled_from(["me", "you"])), max_size=20))
def test_no_worker_is_ever_held_twice(wishes):
    scheduler = Scheduler("a:1", "a:2", "b:1", "b:2")
    for gang, wanted, holder in wishes:
        if wanted:
            scheduler.reserve(gang, wanted, holder=holder)
        else:
            release(gang, scheduler)
        held = [worker for workers in scheduler.reserved.values() for worker in workers]
        assert len(held) == len(set(held))
        assert len(scheduler.plugins) == 1


# -- its topics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "planned"),
    [("handle-worker-cleanup-1", False), ("worker-close-gracefully-1", True), ("retire-workers-1", True)],
)
def test_a_lost_worker_is_told_to_the_gang_that_holds_it(reason, planned):
    scheduler = Scheduler("a:1", "a:2", "a:3")
    told: list[tuple[str, Any]] = []
    scheduler.reserve("one", 1)
    scheduler.reserve("two", 1)
    scheduler.log_event = lambda topic, message: told.append((topic, message))
    scheduler.remove("a:2", reason)
    scheduler.remove("a:3", reason)
    assert told == [("topic of two", {"action": "remove-worker", "worker": "a:2", "planned": planned})]


@pytest.mark.parametrize("saves", [True, False])
def test_a_worker_is_retired_when_its_gang_has_saved_or_its_time_is_up(saves, monkeypatch):
    monkeypatch.setattr(scheduler_plugin, "RETIRE_S", 0.2)
    scheduler = Scheduler("a:1", "a:2")
    task, other = SimpleNamespace(key="topic of one-rank-0"), SimpleNamespace(key="of somebody else")
    scheduler.workers["a:1"].has_what, scheduler.workers["a:1"].processing = [other], [task]
    calls: list[Any] = []

    async def retire(workers: list[str], **more: Any) -> dict[str, Any]:
        calls.append((workers, more["remove"], more.get("close_workers"), task in scheduler.workers["a:1"].processing))
        return dict.fromkeys(workers)

    def on_event(topic: str, message: Any) -> None:
        told.append((topic, message))
        if saves:
            scheduler.workers["a:1"].processing.clear()

    scheduler.retire_workers = retire
    scheduler.reserve("one", 1)
    scheduler.reserve("two", 1)
    told: list[tuple[str, Any]] = []
    scheduler.log_event = on_event
    assert asyncio.run(scheduler.handlers["retire_workers"](["a:1"], close_workers=True)) == {"a:1": None}
    assert told == [("topic of one", {"action": "retire-worker", "worker": "a:1", "planned": True})]
    assert calls == [(["a:1"], False, None, True), (["a:1"], True, True, not saves)]


def test_records_do_not_pile_up_in_the_topics_of_gangs_and_those_of_others_stay():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    for topic in ("topic of one", "of somebody else"):
        scheduler.log_event(topic, b"record")
    assert scheduler.topics == {"topic of one": [], "of somebody else": [b"record"]}


def test_a_topic_is_forgotten_with_its_gang_also_when_a_last_word_makes_it_once_more():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    scheduler.log_event("topic of one", b"record")
    release("one", scheduler)
    assert scheduler.topics == {}
    scheduler.topics["topic of one"] = []  # as the client's end of its subscription does
    ((after_s, act),) = scheduler.later
    act()
    assert (after_s, scheduler.topics) == (LATE_S, {})
    scheduler.log_event("topic of one", b"a record that a slow worker sent later still")
    assert scheduler.topics == {}


def test_nobody_overtakes_so_a_large_gang_is_not_kept_waiting_by_small_ones():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    scheduler.reserve("small", 1)
    assert "workers" not in scheduler.reserve("large", 3)
    assert "workers" not in scheduler.reserve("next", 1)
    release("small", scheduler)
    assert "workers" not in scheduler.reserve("next", 1)
    assert len(scheduler.reserve("large", 3)["workers"]) == 3
    release("large", scheduler)
    assert "workers" in scheduler.reserve("next", 1)


def test_sweeps_get_workers_in_turn_whoever_has_more_jobs():
    scheduler = Scheduler("a:1", "a:2")
    for job in ("a1", "a2", "a3", "a4"):
        scheduler.reserve(job, 1, sweep="a")
    assert "workers" not in scheduler.reserve("b1", 1, sweep="b")
    release("a1", scheduler)
    assert "workers" not in scheduler.reserve("a3", 1, sweep="a")  # it came first, but its sweep has a gang at work
    assert "workers" in scheduler.reserve("b1", 1, sweep="b")
    release("a2", scheduler)
    assert "workers" in scheduler.reserve("a3", 1, sweep="a")


def test_a_gang_larger_than_the_cluster_keeps_nobody_waiting():
    scheduler = Scheduler("a:1")
    assert "workers" not in scheduler.reserve("large", 2)
    assert "workers" in scheduler.reserve("small", 1)


def test_a_sweep_that_has_gangs_at_work_lets_as_many_newcomers_pass_and_no_more():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    for job in ("a1", "a2"):
        scheduler.reserve(job, 1, sweep="a")
    running = [scheduler.reserve("newcomer 0", 1) and "newcomer 0"]
    assert "workers" not in scheduler.reserve("a3", 1, sweep="a")
    served = []
    for number in range(1, 5):  # as soon as one ends, the next has come already
        newcomer = f"newcomer {number}"
        assert "workers" not in scheduler.reserve(newcomer, 1)
        release(running.pop(), scheduler)
        waiting = ["a3", *(f"newcomer {n}" for n in range(1, number + 1))]
        for name in waiting:
            if name not in scheduler.reserved and "workers" in scheduler.reserve(
                name, 1, sweep="a" if name == "a3" else ""
            ):
                served.append(name)
        running.append(served[-1])
    assert served[:3] == ["newcomer 1", "newcomer 2", "a3"]


def test_a_suspended_client_loses_its_workers_to_those_who_wait_for_them(monkeypatch):
    scheduler = Scheduler("a:1", "a:2")
    now = [0.0]
    set_time(monkeypatch, scheduler_plugin, monotonic=lambda: now[0])
    scheduler.reserve("one", 1, holder="you")
    scheduler.clients["you"].last_seen -= scheduler_plugin.SUSPENDED_S + 1
    assert "workers" in scheduler.reserve("two", 1)
    assert scheduler.reserved.keys() == {"one", "two"}  # nobody waited
    assert "workers" not in scheduler.reserve("three", 1)
    scheduler.clients["you"].last_seen += scheduler_plugin.SUSPENDED_S  # it is heard again, for a moment
    now[0] += scheduler_plugin.CONFIRM_S + 1
    assert "workers" not in scheduler.reserve("three", 1)
    scheduler.clients["you"].last_seen -= scheduler_plugin.SUSPENDED_S
    assert "workers" not in scheduler.reserve("three", 1)
    now[0] += scheduler_plugin.CONFIRM_S - 1
    assert "workers" not in scheduler.reserve("three", 1)
    now[0] += 2
    assert scheduler.reserve("three", 1) == {"workers": {"a:1": "a"}}
    assert (scheduler.aborted, scheduler.clients.keys()) == (["you"], {"me"})


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_who_has_left_the_queue_keeps_nobody_waiting(how, monkeypatch):
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("one", 1)
    scheduler.reserve("large", 2, holder="you")
    assert "workers" not in scheduler.reserve("small", 1)
    if how == "gone":
        del scheduler.clients["you"]
    else:
        monkeypatch.setattr(scheduler_plugin, "ABSENT_S", -1.0)
    assert "workers" in scheduler.reserve("small", 1)


def test_the_next_worker_is_for_a_gang_that_starts_again_and_not_for_the_queue():
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("again", 2)
    scheduler.remove("a:1")
    assert "workers" not in scheduler.reserve("again", 2)
    scheduler.add("a:3")
    assert scheduler.reserve("new", 1)["free"] == 0
    assert len(scheduler.reserve("again", 2)["workers"]) == 2
    scheduler.add("a:4")
    assert len(scheduler.reserve("new", 1)["workers"]) == 1


def test_the_topic_of_the_attempt_before_is_forgotten_with_the_next():
    scheduler = Scheduler("a:1")
    reserve("one", "me", "sweep", "first", 1, 1, dask_scheduler=scheduler)
    scheduler.log_event("first", b"record")
    reserve("one", "me", "sweep", "second", 2, 2, dask_scheduler=scheduler)  # it waits
    assert scheduler.topics.keys() == {"first"}
    reserve("one", "me", "sweep", "second", 1, 1, dask_scheduler=scheduler)
    scheduler.log_event("second", b"record")
    assert scheduler.topics == {"second": []}
    assert len(scheduler.later) == 1


# -- waiting on the scheduler --------------------------------------------------------------------------------

NEVER_S = 60.0


def while_they_wait(scheduler: Scheduler, gangs: dict[str, int], then: Callable[[], None], wait_s=NEVER_S) -> list[Any]:
    """Return the answers of gangs that ask for so many workers each, and are waiting when `then` is called."""

    async def ask() -> list[Any]:
        asked = [
            asyncio.ensure_future(
                reserve_or_wait(gang, "me", gang, f"topic of {gang}", n, n, wait_s=wait_s, dask_scheduler=scheduler)
            )
            for gang, n in gangs.items()
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        then()
        return await asyncio.wait_for(asyncio.gather(*asked), NEVER_S / 2)

    return asyncio.run(ask())


@pytest.mark.parametrize("how", ["released", "come", "of a client that is gone"])
def test_a_gang_that_waits_gets_workers_as_soon_as_there_are_some(how):
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1, holder="you")
    happens = {
        "released": lambda: release("one", scheduler),
        "come": lambda: scheduler.add("b:1"),
        "of a client that is gone": lambda: scheduler.remove_client("you"),
    }
    (answer,) = while_they_wait(scheduler, {"two": 1}, happens[how])
    assert answer == {"workers": {"b:1": "b"} if how == "come" else {"a:1": "a"}}


def test_of_the_gangs_that_wait_the_first_gets_the_workers():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    first, second = while_they_wait(scheduler, {"two": 1, "three": 1}, lambda: release("one", scheduler))
    assert first == {"workers": {"a:1": "a"}}
    assert second == {"wanted": 1, "free": 0, "total": 1, "ahead": 0, "grows": False}


def test_a_gang_that_has_given_up_while_it_waited_gets_nothing():
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("one", 2)

    def give_up() -> None:
        release("two", scheduler)
        release("one", scheduler)

    (answer,) = while_they_wait(scheduler, {"two": 1}, give_up)
    assert "workers" not in answer
    assert scheduler.reserved == {}


def test_a_gang_that_has_waited_for_nothing_is_told_how_many_are_free():
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("one", 1)
    (answer,) = while_they_wait(scheduler, {"two": 2}, lambda: None, wait_s=0.01)
    assert answer == {"wanted": 2, "free": 1, "total": 2, "ahead": 0, "grows": False}


def test_a_gang_far_behind_is_answered_at_once():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    for number in range(FRONT):
        scheduler.reserve(f"earlier {number}", 1)
    (answer,) = while_they_wait(scheduler, {"late": 1}, lambda: None)
    assert answer["ahead"] == FRONT


def test_a_cluster_that_adapts_its_size_is_asked_for_the_workers_of_gangs_and_clients():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    scheduler.reserve("two", 3)
    target = scheduler.handlers["adaptive_target"]
    assert target("5s") == scheduler.adaptive_target() == 4
    ask_for_workers("you", 6, scheduler)
    assert target() == 6
    scheduler.remove_client("you")
    assert target() == 4
    release("two", scheduler)
    assert target() == 1
