from __future__ import annotations

import asyncio
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.cluster import reservation, scheduler_plugin
from ddp_hydra.cluster.reservation import Reservation
from ddp_hydra.cluster.scheduler_plugin import release
from ddp_hydra.errors import ClusterError
from tests.support.scheduler import Scheduler


class Client:
    """A Dask client that asks the scheduler above at once."""

    id, status = "me", "running"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.lost, self.answering = scheduler, False, set(scheduler.workers)
        self.pinged: list[list[str]] = []

    def scheduler_info(self, n_workers: int = 5) -> dict[str, Any]:
        return self.scheduler.identity(0)  # a timer has asked meanwhile

    def sync(self, function, *args, callback_timeout=None, **kwargs) -> Any:
        assert callback_timeout is not None or function == self.scheduler.identity, "the scheduler may be gone"
        return function(*args, **kwargs)

    def _run_on_scheduler(self, function, *args, wait_s=0.0, **kwargs) -> Any:
        if self.lost:
            raise OSError("connection refused")
        function = pickle.loads(pickle.dumps(function))
        if not inspect.iscoroutinefunction(function):
            return function(*args, dask_scheduler=self.scheduler, **kwargs)
        answer = asyncio.run(function(*args, wait_s=0.0, dask_scheduler=self.scheduler, **kwargs))
        if wait_s and "workers" not in answer:
            reservation.time.sleep(wait_s)
        return answer

    def _run(self, function, workers, on_error) -> dict[str, Any]:
        assert on_error == "ignore"
        self.pinged.append(workers)
        return {worker: function() for worker in workers if worker in self.answering}


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Time passes only in `sleep`, where things happen at their time."""

    def sleep(seconds: float) -> None:
        made.now += seconds
        for when in sorted(when for when in made.events if when <= made.now):
            made.events.pop(when)()

    made = SimpleNamespace(now=0.0, events={}, sleep=sleep, monotonic=lambda: made.now)
    monkeypatch.setattr(reservation, "time", made)
    return made


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler("a:1", "a:2", "b:1", "b:2")


@pytest.fixture
def client(scheduler) -> Client:
    return Client(scheduler)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ClusterError, ZeroDivisionError])
def test_workers_are_held_inside_the_block_and_given_back_however_it_ends(scheduler, client, error):
    def end():
        with Reservation(client, "one", 2) as held:
            assert held.reserve("t", 1.0) == {"a:1": "a", "a:2": "a"}
            assert scheduler.reserved == {"one": ["a:1", "a:2"]}
            raise error

    with pytest.raises(error):
        end()
    assert scheduler.reserved == {}


@pytest.mark.parametrize("how", ["lost", "closed"])
def test_a_scheduler_that_is_gone_does_not_hide_why_the_block_ended(client, how):
    def end():
        with Reservation(client, "one", 2) as held:
            held.reserve("t", 1.0)
            client.lost, client.status = True, "running" if how == "lost" else "closed"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        end()


def test_a_scheduler_that_does_not_answer_is_told_in_a_sentence(client):
    client.lost = True
    with Reservation(client, "one", 2) as held:
        for ask in (lambda: held.reserve("t", 1.0), lambda: held.renew("t", [], None, 1.0)):
            with pytest.raises(ClusterError, match="the scheduler tcp://s:8786 does not answer: connection refused"):
                ask()


def test_a_busy_scheduler_is_asked_again_while_nothing_runs_yet(client, clock, monkeypatch):
    asked, run = [], client._run_on_scheduler

    def slow(function, *args, **kwargs):
        asked.append(client.status)
        if len(asked) < 4:
            clock.sleep(10.0)
            raise TimeoutError("timed out after 10 s.")
        return run(function, *args, **kwargs)

    monkeypatch.setattr(client, "_run_on_scheduler", slow)
    with Reservation(client, "one", 2) as held:
        assert len(held.reserve("t", 60.0)) == 2
    for status, queue_timeout_s in (("connecting", 60.0), ("running", 5.0)):
        client.status = status
        asked.clear()
        with pytest.raises(ClusterError, match="does not answer: timed out after 10 s"):
            Reservation(client, "two", 2).reserve("t", queue_timeout_s)
        assert len(asked) == 1


@pytest.mark.medium
def test_a_cluster_that_adapts_its_size_may_take_as_long_as_the_queue(scheduler, client, clock):
    scheduler.reserve("other", 1, holder="you")
    scheduler.adaptive_target()
    clock.events[50.0] = lambda: scheduler.add("b:3")
    with Reservation(client, "one", 4) as held:
        assert len(held.reserve("t", 60.0)) == 4


def test_a_gang_waits_for_others_to_let_go(scheduler, client, clock):
    scheduler.reserve("other", 3, holder="you")
    clock.events[30.0] = lambda: release("other", scheduler)
    with Reservation(client, "one", 2) as held:
        assert len(held.reserve("t", 60.0)) == 2
    assert clock.now >= 30


def test_a_gang_that_waited_too_long_says_what_was_free(scheduler, client, clock):
    scheduler.reserve("other", 3, holder="you")
    with (
        Reservation(client, "one", 2) as held,
        pytest.raises(
            ClusterError, match=r"2 workers were wanted, 1 of 4 are free after 5 s, .*dispatch.ranks=1 or less"
        ),
    ):
        held.reserve("t", 5.0)
    assert list(scheduler.reserved) == ["other"]


def test_a_cluster_that_is_too_small_may_grow_but_not_for_long(scheduler, client, clock):
    clock.events[5.0] = lambda: scheduler.add("b:3")
    with Reservation(client, "one", 5) as held:
        assert len(held.reserve("t", 1e6)) == 5
    with (
        Reservation(client, "one", 6) as held,
        pytest.raises(ClusterError, match=r"dispatch.ranks=6, but there are 5 workers"),
    ):
        held.reserve("t", 1e6)
    assert clock.now < 60


def test_workers_of_a_lost_process_may_take_longer_to_come_back(client, scheduler, clock):
    for worker in tuple(scheduler.workers):
        scheduler.remove(worker)
    for when in (20.0, 30.0):
        clock.events[when] = lambda when=when: scheduler.add(f"c:{when:g}")
    with Reservation(client, "one", 2, expected=2) as held:
        assert len(held.reserve("t", 1e6, restart_wait_s=60.0, least=2)) == 2
    scheduler.remove("c:20")
    with Reservation(client, "one", 2, expected=2) as held:
        expected = r"after dispatch.restart_wait_s=60 s, 1 of 2 workers are there, fewer than 2: .*min_ranks=1"
        with pytest.raises(ClusterError, match=expected):
            held.reserve("t", 1e6, restart_wait_s=60.0, least=2)
        begin = clock.now
        assert len(held.reserve("t", 1e6, restart_wait_s=60.0, least=1)) == 1
        assert clock.now - begin > 60
        scheduler.add("c:2")
        assert len(held.renew("t-1", [], 1, 60.0)) == 2
    scheduler.remove("c:2")
    scheduler.remove("c:30")
    with Reservation(client, "two", 2) as held, pytest.raises(ClusterError) as caught:
        held.reserve("t", 1e6)
    assert (
        str(caught.value) == "dispatch.ranks=2, but the cluster has no workers: start some, as with cluster.n_workers=2"
    )


@pytest.mark.parametrize(("comes", "got"), [(("c:1",), 4), (("c:1", "c:2"), 5)])
def test_a_job_that_waits_begins_with_no_fewer_workers_than_were_asked_for(comes, got, client, scheduler, clock):
    scheduler.reserve("other", 4, holder="you")
    clock.events[100.0] = lambda: scheduler.remove("a:1")
    clock.events[110.0] = lambda: release("other", scheduler)
    clock.events[150.0] = lambda: [scheduler.add(worker) for worker in comes]
    with Reservation(client, "one", None, expected=4) as held:
        assert len(held.reserve("t", 1e6, restart_wait_s=60.0)) == got
        assert clock.now >= 150
        scheduler.remove("b:1")
        assert len(held.renew("t-1", [], 1, 10.0)) == got - 1  # later attempts may have fewer


@pytest.mark.parametrize(
    ("wanted", "slots", "left", "advice"),
    [
        (None, 2, 3, "start more, or give cluster.n_workers=3"),
        (4, 2, 3, "start more, or give dispatch.ranks=6"),
        (None, 1, 0, "start some"),
    ],
)
def test_workers_that_a_job_waits_for_and_that_stay_lost_are_told(
    wanted, slots, left, advice, client, scheduler, clock
):
    scheduler.reserve("other", 4, holder="you")
    clock.events[100.0] = lambda: [scheduler.remove(worker) for worker in tuple(scheduler.workers)[left:]]
    with Reservation(client, "one", wanted, slots=slots, expected=4) as held, pytest.raises(ClusterError) as caught:
        held.reserve("t", 1e6, restart_wait_s=60.0)
    assert str(caught.value) == f"after dispatch.restart_wait_s=60 s, {left} of 4 workers are there: {advice}"
    assert clock.now > 160


def test_workers_of_a_new_scheduler_come_one_after_the_other(client, scheduler, clock):
    for number, worker in enumerate(tuple(scheduler.workers)):
        scheduler.remove(worker)
        clock.events[14.0 * (number + 1)] = lambda worker=worker: scheduler.add(worker)
    for wanted, expected in ((4, 1), (None, 4)):
        with Reservation(client, "one", wanted, expected=expected) as held:
            assert len(held.reserve("t", 1e6, restart_wait_s=60.0)) == 4


def test_the_number_of_workers_stays_what_it_was_at_first(scheduler, client, clock):
    with Reservation(client, "one", None) as held:
        assert len(held.reserve("t", 1.0)) == 4
        scheduler.add("b:3")
        assert len(held.renew("t-1", [], None, 1.0)) == 4


@pytest.mark.medium
def test_a_lost_worker_is_replaced_and_survivors_stay_held_while_waiting(scheduler, client, clock):
    seen = []
    with Reservation(client, "one", 2) as held:
        held.reserve("t", 1.0)
        scheduler.reserve("other", 2, holder="you")
        scheduler.remove("a:2")
        clock.events[10.0] = lambda: seen.append(scheduler.reserve("thief", 1))
        clock.events[20.0] = lambda: scheduler.add("c:1")
        assert held.renew("t-1", [], None, 60.0) == {"a:1": "a", "c:1": "c"}
    assert seen == [{"wanted": 1, "free": 0, "total": 3}]
    assert scheduler_plugin._reservations(scheduler).keys() == {"other"}


def test_in_the_end_a_gang_goes_on_with_the_least_it_may(scheduler, client, clock):
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        assert len(held.renew("t-0", [], 2, 60.0)) == 4
        assert clock.now == 0  # all have come
        scheduler.remove("a:2")
        assert held.renew("t-1", [], 2, 10.0).keys() == {"a:1", "b:1", "b:2"}
        assert clock.now > 10
        scheduler.add("a:3")
        assert len(held.renew("t-2", [], 2, 10.0)) == 4


@pytest.mark.medium
@pytest.mark.parametrize(("least", "need"), [(None, 4), (4, 4), (99, 4), (2, 2)])
def test_below_the_least_it_gives_up_and_says_what_to_do(scheduler, client, clock, least, need):
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        for worker in ("a:1", "a:2", "b:1"):
            scheduler.remove(worker)
        with pytest.raises(ClusterError) as caught:
            held.renew("t-1", [], least, 10.0)
    assert "after dispatch.restart_wait_s=10 s, 1 of 4 workers are there" in str(caught.value)
    assert f"fewer than {need}: " in str(caught.value)
    assert "dispatch.min_ranks=1" in str(caught.value)


def test_a_silent_worker_is_taken_again_only_when_it_answers(scheduler, client, clock):
    client.answering = {"a:1"}
    clock.events[5.0] = lambda: client.answering.add("a:2")
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        assert held.renew("t-1", ["a:1", "a:2", "never:1"], None, 60.0).keys() == set(scheduler.workers)
    assert clock.now >= 5
    assert [sorted(asked) for asked in client.pinged[:2]] == [["a:1", "a:2"], ["a:2"]]


@pytest.mark.parametrize("ping", ["fails", "is not answered"])
def test_a_silent_worker_that_stays_silent_is_done_without(client, clock, monkeypatch, ping):
    def fail(*_, **__):
        raise TimeoutError

    client.answering = set()
    if ping == "fails":
        monkeypatch.setattr(client, "_run", fail)
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        assert len(held.renew("t-1", ["b:2"], 1, 5.0)) == 3
