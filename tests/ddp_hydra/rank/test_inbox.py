from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ddp_hydra.rank import inbox


@pytest.fixture
def gang() -> Iterator[str]:
    yield "gang-1"
    for name, rank in list(inbox._boxes):
        inbox.remove(name, rank)
    inbox._ended.clear()


def post(gang, rank, message):
    """As the client does: messages to all workers, of which each takes its own."""
    messages = {f"tcp://host:{rank}": (rank, message), "tcp://elsewhere:1": (99, {"n": "for another"})}
    inbox.deliver(gang, messages, dask_worker=SimpleNamespace(address=f"tcp://host:{rank}"))


def is_ready(box):
    return bool(select.select([box], [], [], 0)[0])


def test_messages_are_taken_once_in_order(gang):
    box = inbox.of_rank(gang, 0)
    for rank, n in ((0, 1), (1, 3), (0, 2)):
        post(gang, rank, {"n": n})
    assert box.take() == [{"n": 1}, {"n": 2}]
    assert box.take() == []
    assert inbox.of_rank(gang, 1).take() == [{"n": 3}]
    assert set(inbox._boxes) == {(gang, 0), (gang, 1)}


def test_a_message_waits_for_a_rank_that_comes_later(gang):
    post(gang, 5, {"rendezvous": ["h", 1]})
    assert inbox.of_rank(gang, 5).take() == [{"rendezvous": ["h", 1]}]


def test_a_box_can_be_waited_on(gang):
    box = inbox.of_rank(gang, 0)
    assert not is_ready(box)
    timer = threading.Timer(0.02, post, (gang, 0, {"stop": True}))
    timer.start()
    assert select.select([box], [], [], 5)[0] == [box]
    timer.join()
    assert box.take() == [{"stop": True}]
    assert not is_ready(box)


def test_a_reader_that_is_behind_blocks_nobody_and_misses_nothing(gang):
    box = inbox.of_rank(gang, 0)
    for n in range(5000):  # more wake-ups than the socket holds
        box.put({"n": n})
    taken = []
    while is_ready(box):
        taken += box.take()
    assert [message["n"] for message in taken] == list(range(5000))


def test_no_message_is_lost_between_threads(gang):
    box, taken = inbox.of_rank(gang, 0), []
    writers = [
        threading.Thread(target=lambda w=w: [box.put({"from": w, "n": n}) for n in range(500)]) for w in range(4)
    ]
    for writer in writers:
        writer.start()
    while len(taken) < 2000:
        assert select.select([box], [], [], 5)[0], f"only {len(taken)} of 2000 woke the reader"
        taken += box.take()
    for writer in writers:
        writer.join()
    for w in range(4):
        assert [message["n"] for message in taken if message["from"] == w] == list(range(500))


def test_gangs_and_ranks_have_their_own_boxes(gang):
    boxes = {inbox.of_rank(name, rank) for name in (gang, "gang-2") for rank in (0, 1)}
    assert len(boxes) == 4
    assert inbox.of_rank(gang, 0) in boxes


def test_a_removed_box_is_closed_and_its_messages_forgotten(gang):
    box = inbox.of_rank(gang, 0)
    box.put({"n": 1})
    inbox.remove(gang, 0)
    inbox.remove(gang, 0)
    assert box.reader.fileno() == box.writer.fileno() == -1
    assert inbox.of_rank(gang, 0).take() == []


def test_a_letter_that_comes_too_late_opens_no_new_box(gang):
    inbox.of_rank(gang, 0)
    inbox.remove(gang, 0)
    post(gang, 0, {"acknowledged": 1})
    assert not inbox._boxes


def test_messages_to_ranks_that_never_come_are_forgotten_the_oldest_first(gang, monkeypatch):
    monkeypatch.setattr(inbox, "MAX_BOXES", 3)
    post(gang, 0, {"n": 0})
    first = inbox._boxes[gang, 0]
    here = inbox.of_rank(gang, 9)
    for rank in range(1, 4):
        post(gang, rank, {"n": rank})
    assert [rank for _, rank in inbox._boxes] == [9, 1, 2, 3]
    assert first.reader.fileno() == -1
    assert here.reader.fileno() != -1  # a rank is there to read it


def test_only_ranks_that_are_here_are_told_of_the_end_of_their_worker(gang):
    post(gang, 0, {"n": 0})
    box = inbox.of_rank(gang, 1)
    assert inbox.send_to_all({"preempted": True}) == [(gang, 1)]
    assert box.take() == [{"preempted": True}]
    assert inbox.has_any([(gang, 1)])
    inbox.remove(gang, 1)
    assert not inbox.has_any([(gang, 1)])
