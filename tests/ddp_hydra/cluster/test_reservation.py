from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.cluster import reservation, scheduler_plugin
from ddp_hydra.cluster.reservation import Reservation
from ddp_hydra.cluster.scheduler_plugin import FRONT, LATE_S, ReservationPlugin, release, reserve, reserve_or_wait
from ddp_hydra.errors import ClusterError


class Scheduler:
    """As much of Dask's as a reservation touches."""

    def __init__(self, *workers: str, clients: tuple[str, ...] = ("me", "you")) -> None:
        self.workers: dict[str, Any] = {}
        self.clients = {client: SimpleNamespace(last_seen=scheduler_plugin.scheduler_time()) for client in clients}
        self.aborted: list[str] = []
        self.client_comms = {
            client: SimpleNamespace(abort=lambda client=client: self.aborted.append(client)) for client in clients
        }
        self.plugins: dict[str, ReservationPlugin] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.loop = SimpleNamespace(call_later=lambda s, act, *args: self.later.append((s, lambda: act(*args))))
        self._broker = SimpleNamespace(_topics={}, truncate=lambda topic: self._broker._topics[topic].clear())
        for worker in workers:
            self.add(worker)

    def add(self, worker: str, status: Status = Status.running) -> None:
        self.workers[worker] = SimpleNamespace(host=worker.partition(":")[0], status=status)
        for plugin in list(self.plugins.values()):
            plugin.add_worker(self, worker)

    def remove(self, worker: str) -> None:
        del self.workers[worker]
        for plugin in list(self.plugins.values()):
            plugin.remove_worker(self, worker, stimulus_id="x")

    def remove_client(self, client: str) -> None:
        for plugin in list(self.plugins.values()):
            plugin.remove_client(self, client)
        del self.clients[client]

    def add_plugin(self, plugin: ReservationPlugin, name: str) -> None:
        assert name not in self.plugins
        self.plugins[name] = plugin

    def log_event(self, topic: str, message: Any) -> None:
        self._broker._topics.setdefault(topic, []).append(message)
        for plugin in self.plugins.values():
            plugin.log_event(topic, message)

    @property
    def topics(self) -> dict[str, list[Any]]:
        return self._broker._topics

    @property
    def reserved(self) -> dict[str, list[str]]:
        return {gang: entry["workers"] for gang, entry in scheduler_plugin._reservations(self).items()}

    def reserve(
        self, gang: str, wanted: int | None, least: int | None = None, holder: str = "me", avoid=(), sweep: str = ""
    ) -> Any:
        topic = f"topic of {gang}"
        answer = reserve(gang, holder, sweep or gang, topic, wanted, least or wanted, avoid, dask_scheduler=self)
        answer.pop("ahead", None)
        return answer


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


def test_a_gang_that_cannot_have_what_it_wants_keeps_what_it_has():
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("one", 2)
    scheduler.remove("a:2")
    assert scheduler.reserve("one", 2) == {"wanted": 2, "free": 1, "total": 1}
    assert scheduler.reserve("two", 1) == {"wanted": 1, "free": 0, "total": 1}


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


def test_giving_back_what_nobody_holds_is_no_error():
    scheduler = Scheduler()
    release("one", scheduler)
    assert scheduler.later == []


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


def test_a_lost_worker_is_told_to_the_gang_that_holds_it():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    told: list[tuple[str, Any]] = []
    scheduler.reserve("one", 1)
    scheduler.reserve("two", 1)
    scheduler.log_event = lambda topic, message: told.append((topic, message))
    scheduler.remove("a:2")
    scheduler.remove("a:3")
    assert told == [("topic of two", {"action": "remove-worker", "worker": "a:2"})]


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
    scheduler.log_event("topic of one", b"last word")
    ((after_s, act),) = scheduler.later
    act()
    assert (after_s, scheduler.topics) == (LATE_S, {})


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
    monkeypatch.setattr(scheduler_plugin.time, "monotonic", lambda: now[0])
    scheduler.reserve("one", 1, holder="you")
    scheduler.clients["you"].last_seen -= scheduler_plugin.SUSPENDED_S + 1
    assert "workers" in scheduler.reserve("two", 1)
    assert scheduler.reserved.keys() == {"one", "two"}  # nobody waited
    assert "workers" not in scheduler.reserve("three", 1)
    now[0] += scheduler_plugin.CONFIRM_S - 1
    assert "workers" not in scheduler.reserve("three", 1)
    now[0] += 2
    assert scheduler.reserve("three", 1) == {"workers": {"a:1": "a"}}
    assert (scheduler.aborted, scheduler.clients.keys()) == (["you"], {"me"})


def test_a_client_that_is_heard_again_was_not_suspended(monkeypatch):
    scheduler = Scheduler("a:1")
    now = [0.0]
    monkeypatch.setattr(scheduler_plugin.time, "monotonic", lambda: now[0])
    scheduler.reserve("one", 1, holder="you")
    scheduler.clients["you"].last_seen -= scheduler_plugin.SUSPENDED_S + 1
    scheduler.reserve("two", 1)
    scheduler.clients["you"].last_seen += scheduler_plugin.SUSPENDED_S
    now[0] += scheduler_plugin.CONFIRM_S + 1
    assert "workers" not in scheduler.reserve("two", 1)
    assert scheduler.aborted == []


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


def test_a_gang_that_starts_again_waits_for_nobody():
    scheduler = Scheduler("a:1", "a:2", "a:3")
    scheduler.reserve("one", 2)
    scheduler.reserve("large", 3)
    scheduler.remove("a:1")
    scheduler.add("a:4")
    assert len(scheduler.reserve("one", 2)["workers"]) == 2


def test_the_topic_of_the_attempt_before_is_forgotten_with_the_next():
    scheduler = Scheduler("a:1")
    reserve("one", "me", "sweep", "first", 1, 1, dask_scheduler=scheduler)
    scheduler.log_event("first", b"record")
    reserve("one", "me", "sweep", "second", 1, 1, dask_scheduler=scheduler)
    scheduler.log_event("second", b"record")
    assert scheduler.topics == {"second": []}
    assert len(scheduler.later) == 1


def test_while_a_gang_waits_its_topic_stays():
    scheduler = Scheduler("a:1")
    reserve("one", "me", "sweep", "first", 1, 1, dask_scheduler=scheduler)
    reserve("one", "me", "sweep", "second", 2, 2, dask_scheduler=scheduler)
    assert scheduler_plugin._reservations(scheduler)["one"]["topic"] == "first"


def test_a_scheduler_without_topics_is_fine():
    scheduler = Scheduler("a:1")
    del scheduler._broker
    scheduler.reserve("one", 1)
    release("one", scheduler)
    assert scheduler.reserved == {}


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


def test_a_gang_that_waits_gets_workers_when_they_are_released():
    scheduler = Scheduler("a:1", "a:2")
    scheduler.reserve("one", 2)
    (answer,) = while_they_wait(scheduler, {"two": 1}, lambda: release("one", scheduler))
    assert answer == {"workers": {"a:1": "a"}}
    assert scheduler.reserved == {"two": ["a:1"]}


def test_a_gang_that_waits_gets_workers_when_they_come():
    scheduler = Scheduler()
    (answer,) = while_they_wait(scheduler, {"one": 1}, lambda: scheduler.add("a:1"))
    assert answer == {"workers": {"a:1": "a"}}


def test_a_gang_that_waits_gets_the_workers_of_a_client_that_is_gone():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1, holder="you")
    (answer,) = while_they_wait(scheduler, {"two": 1}, lambda: scheduler.remove_client("you"))
    assert answer == {"workers": {"a:1": "a"}}


def test_of_the_gangs_that_wait_the_first_gets_the_workers():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    first, second = while_they_wait(scheduler, {"two": 1, "three": 1}, lambda: release("one", scheduler))
    assert first == {"workers": {"a:1": "a"}}
    assert second == {"wanted": 1, "free": 0, "total": 1, "ahead": 0}


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
    assert answer == {"wanted": 2, "free": 1, "total": 2, "ahead": 0}


def test_a_gang_far_behind_is_answered_at_once():
    scheduler = Scheduler("a:1")
    scheduler.reserve("one", 1)
    for number in range(FRONT):
        scheduler.reserve(f"earlier {number}", 1)
    (answer,) = while_they_wait(scheduler, {"late": 1}, lambda: None)
    assert answer["ahead"] == FRONT


# -- the client's side -------------------------------------------------------------------------------------


class Client:
    """A Dask client that asks the scheduler above at once."""

    id, status = "me", "running"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.lost, self.answering = scheduler, False, set(scheduler.workers)
        self.pinged: list[list[str]] = []

    def scheduler_info(self, n_workers: int = 5) -> dict[str, Any]:
        return {"address": "tcp://s:8786", "workers": dict(self.scheduler.workers) if n_workers == -1 else {}}

    def sync(self, function, *args, callback_timeout=None, **kwargs) -> Any:
        assert callback_timeout is not None, "the scheduler may be gone"
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


def test_workers_are_held_inside_the_block_and_given_back_after_it(scheduler, client):
    with Reservation(client, "one", 2) as held:
        assert held.reserve("t", 1.0) == {"a:1": "a", "a:2": "a"}
        assert scheduler.reserved == {"one": ["a:1", "a:2"]}
    assert scheduler.reserved == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ClusterError, ZeroDivisionError])
def test_workers_are_given_back_however_the_block_ends(scheduler, client, error):
    def end():
        with Reservation(client, "one", 2) as held:
            held.reserve("t", 1.0)
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
            ClusterError, match=r"2 workers were wanted, 1 of 4 are free after 5 s: .*dispatch.ranks=1 or less"
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
        pytest.raises(ClusterError, match=r"dispatch.ranks=6, but the cluster has 5 workers"),
    ):
        held.reserve("t", 1e6)
    assert clock.now < 60


def test_the_number_of_workers_stays_what_it_was_at_first(scheduler, client, clock):
    with Reservation(client, "one", None) as held:
        assert len(held.reserve("t", 1.0)) == 4
        scheduler.add("b:3")
        assert len(held.renew("t-1", [], None, 1.0)) == 4


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


def test_where_all_have_come_nobody_waits(client, clock):
    with Reservation(client, "one", 2) as held:
        held.reserve("t", 1.0)
        assert len(held.renew("t-1", [], 1, 60.0)) == 2
    assert clock.now == 0


def test_in_the_end_a_gang_goes_on_with_the_least_it_may(scheduler, client, clock):
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        scheduler.remove("a:2")
        assert held.renew("t-1", [], 2, 10.0).keys() == {"a:1", "b:1", "b:2"}
        assert clock.now > 10
        scheduler.add("a:3")
        assert len(held.renew("t-2", [], 2, 10.0)) == 4


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


def test_without_patience_the_least_is_taken_at_once(scheduler, client, clock):
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        scheduler.remove("a:2")
        assert len(held.renew("t-1", [], 1, 0.0)) == 3
    assert clock.now < 1


def test_a_silent_worker_is_taken_again_only_when_it_answers(scheduler, client, clock):
    client.answering = {"a:1"}
    clock.events[5.0] = lambda: client.answering.add("a:2")
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        assert held.renew("t-1", ["a:1", "a:2", "never:1"], None, 60.0).keys() == set(scheduler.workers)
    assert clock.now >= 5
    assert [sorted(asked) for asked in client.pinged[:2]] == [["a:1", "a:2"], ["a:2"]]


def test_a_silent_worker_that_stays_silent_is_done_without(client, clock):
    client.answering = set()
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        assert "b:2" not in held.renew("t-1", ["b:2"], 1, 5.0)


def test_a_ping_that_fails_is_no_answer(client, clock, monkeypatch):
    def fail(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(client, "_run", fail)
    with Reservation(client, "one", 4) as held:
        held.reserve("t", 1.0)
        assert len(held.renew("t-1", ["b:2"], 1, 5.0)) == 3
