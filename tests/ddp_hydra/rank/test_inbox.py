from __future__ import annotations

import logging
import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ddp_hydra.rank import inbox

WORKER = "tcp://host:1"


@pytest.fixture
def gang() -> Iterator[str]:
    yield "gang-1"
    for name, worker in list(inbox._boxes):
        inbox.remove(name, worker, 0)
    inbox._ended.clear()


def post(gang, message, rank=None, worker=WORKER, attempt=0):
    return inbox.deliver(gang, attempt, rank, message, dask_worker=SimpleNamespace(address=worker))


def is_ready(box):
    return bool(select.select([box], [], [], 0)[0])


def test_messages_are_taken_once_in_order_with_their_ranks(gang):
    box = inbox.of_task(gang, WORKER)
    post(gang, {"n": 1}, 0)
    post(gang, {"n": 3}, 0, "tcp://host:2")
    post(gang, {"n": 2})
    assert box.take(0) == [(0, {"n": 1}), (None, {"n": 2})]
    assert box.take(0) == []
    assert inbox.of_task(gang, "tcp://host:2").take(0) == [(0, {"n": 3})]
    assert set(inbox._boxes) == {(gang, WORKER), (gang, "tcp://host:2")}


def test_a_box_can_be_waited_on(gang):
    box = inbox.of_task(gang, WORKER)
    assert not is_ready(box)
    timer = threading.Timer(0.02, post, (gang, {"stop": True}))
    timer.start()
    assert select.select([box], [], [], 60)[0] == [box]
    timer.join()
    assert box.take(0) == [(None, {"stop": True})]
    assert not is_ready(box)


def test_a_reader_that_is_behind_blocks_nobody_and_misses_nothing(gang):
    box = inbox.of_task(gang, WORKER)
    for n in range(5000):  # more wake-ups than the socket holds
        box.put({"n": n})
    taken = []
    while is_ready(box):
        taken += box.take(0)
    assert [message["n"] for _, message in taken] == list(range(5000))


def test_no_message_is_lost_between_threads(gang):
    box, taken = inbox.of_task(gang, WORKER), []
    writers = [
        threading.Thread(target=lambda w=w: [box.put({"from": w, "n": n}) for n in range(500)]) for w in range(4)
    ]
    for writer in writers:
        writer.start()
    while len(taken) < 2000:
        assert select.select([box], [], [], 60)[0], f"only {len(taken)} of 2000 woke the reader"
        taken += box.take(0)
    for writer in writers:
        writer.join()
    for w in range(4):
        assert [message["n"] for _, message in taken if message["from"] == w] == list(range(500))


def test_a_removed_box_is_closed_and_its_messages_forgotten(gang):
    box = inbox.of_task(gang, WORKER)
    box.put({"n": 1})
    inbox.remove(gang, WORKER, 0)
    inbox.remove(gang, WORKER, 0)
    assert box.reader.fileno() == box.writer.fileno() == -1
    assert inbox.of_task(gang, WORKER).take(0) == []


def test_messages_to_tasks_that_never_come_are_forgotten_the_oldest_first(gang, monkeypatch):
    monkeypatch.setattr(inbox, "MAX_BOXES", 3)
    post(gang, {"n": 0}, worker="w0")
    first = inbox._boxes[gang, "w0"]
    here = inbox.of_task(gang, "w9")
    for number in range(1, 4):
        post(gang, {"n": number}, worker=f"w{number}")
    assert [worker for _, worker in inbox._boxes] == ["w9", "w1", "w2", "w3"]
    assert first.reader.fileno() == -1
    assert here.reader.fileno() != -1  # a task is there to read it


def test_only_the_tasks_of_a_worker_that_are_here_are_told_of_its_end(gang):
    post(gang, {"n": 0})
    box, other = inbox.of_task("gang-2", WORKER), inbox.of_task(gang, "tcp://host:2")
    assert inbox.send_to_worker(WORKER, {"preempted": True}) == [("gang-2", WORKER)]
    assert box.take(0) == [(None, {"preempted": True})]
    assert other.take(0) == []  # another worker of this process
    assert inbox.has_any([("gang-2", WORKER)])
    inbox.remove("gang-2", WORKER, 0)
    assert not inbox.has_any([("gang-2", WORKER)])


def test_messages_about_an_earlier_attempt_are_dropped_and_those_about_a_later_one_wait(gang):
    box = inbox.of_task(gang, WORKER)
    for attempt, n in ((1, 1), (0, 2), (2, 3), (None, 4), (2, 5)):
        box.put({"n": n}, attempt=attempt)
    assert [message["n"] for _, message in box.take(1)] == [1, 4]
    assert not is_ready(box)
    assert [message["n"] for _, message in box.take(2)] == [3, 5]


def test_a_gang_whose_task_has_ended_well_gets_another_one_for_its_next_attempt(gang):
    inbox.of_task(gang, WORKER)
    assert post(gang, {"acknowledged": 1}, attempt=1) is True
    inbox.remove(gang, WORKER, 1)
    assert post(gang, {"acknowledged": 1}, attempt=1) is False
    assert not inbox._boxes
    assert post(gang, {"rendezvous": ["h", 1]}, attempt=2) is False  # before its task is there
    assert inbox.of_task(gang, WORKER).take(2) == [(None, {"rendezvous": ["h", 1]})]


def test_a_local_worker_does_not_complain_that_its_command_ends():
    messages = ("Failed to communicate with scheduler during heartbeat.", "Memory is short", "Async instruction for %s")
    told = [m for m in messages if inbox.is_worth_logging(logging.makeLogRecord({"msg": m}))]
    assert told == ["Memory is short"]
