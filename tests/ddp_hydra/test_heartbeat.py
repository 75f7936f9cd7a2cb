from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra import heartbeat
from ddp_hydra.heartbeat import PHASES, REASONS, Place, SharedStatus
from ddp_hydra.record import Beat
from tests.support.clocks import set_time

places = st.tuples(st.sampled_from(PHASES), st.integers(0, 2**63 - 1))


@pytest.fixture
def page() -> Iterator[tuple[SharedStatus, int]]:
    """A page as a worker's task has it, and its descriptor."""
    shared_status, fd = SharedStatus.create()
    yield shared_status, fd
    shared_status.close()
    os.close(fd)


@pytest.fixture
def shared_status() -> Iterator[SharedStatus]:
    heartbeat.connect(None)
    yield heartbeat.here()
    heartbeat.connect(None)


def plain() -> SharedStatus:
    return SharedStatus(bytearray(128))


# -- between two processes ---------------------------------------------------------------------------------

RANK = """
import sys
from ddp_hydra import heartbeat
heartbeat.connect(heartbeat.SharedStatus.of(int(sys.argv[1])))
heartbeat.at("load", 2**40)
heartbeat.progress()
print("there", flush=True)
sys.stdin.readline()
print(heartbeat.here().finish, heartbeat.here().die, flush=True)
heartbeat.at("save", 2**40)
"""


@pytest.mark.integration
def test_a_page_is_shared_with_another_process_both_ways_and_outlives_it(page):
    shared_status, fd = page
    assert shared_status.read() == Place(0, 0, "join", first=True)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", RANK, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as rank:
        assert rank.stdout.readline() == "there\n"
        assert shared_status.read() == Place(ticks=2, step=2**40, phase="load", first=True)
        shared_status.ask_to_finish(REASONS.index("preemption"))
        shared_status.ask_to_die()
        rank.stdin.write("go on\n")
        rank.stdin.close()
        assert rank.stdout.readline() == "3 True\n"
    assert rank.returncode == 0
    assert shared_status.read() == Place(ticks=3, step=2**40, phase="save", first=True)


def test_taking_a_page_closes_its_descriptor_and_keeps_what_is_on_it(page):
    shared_status, fd = page
    other = os.dup(fd)
    same = SharedStatus.of(other)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    same.enter("forward", 3)
    shared_status.ask_to_finish(1)
    assert (shared_status.read().step, same.finish) == (3, 1)
    same.close()


def test_the_page_tells_the_steps_that_are_done_and_the_wish_to_leave_which_ends_with_the_world(page):
    shared_status, _ = page
    assert (shared_status.steps_done, shared_status.leave) == (0, False)
    shared_status.commit(2**40)
    shared_status.ask_to_leave()
    assert (shared_status.steps_done, shared_status.leave) == (2**40, True)
    assert (shared_status.finish, shared_status.die, shared_status.saving) == (0, False, False)
    shared_status.stay()
    assert not shared_status.leave


def test_a_page_that_cannot_be_made_leaves_no_descriptor_behind(monkeypatch):
    made = []

    def fail(fd, size):
        made.append(fd)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        SharedStatus.create()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


@given(st.binary(min_size=128, max_size=128))
def test_whatever_is_on_a_page_can_be_read(content):
    """A rank may write anything there, and be read in the middle of it."""
    place = SharedStatus(bytearray(content)).read()
    assert place.phase in PHASES
    assert place.ticks >= 0
    assert isinstance(place.first, bool)


# -- where a rank is ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 5)), max_size=30))
def test_a_phase_is_visited_for_the_first_time_until_the_rank_goes_elsewhere(visits):
    shared_status, before, seen, was_first = plain(), None, set(), False
    for visit in visits:
        shared_status.enter(*visit)
        shared_status.progress()
        assert (shared_status.read().phase, shared_status.read().step) == visit
        was_first = visit[0] not in seen or (was_first and visit == before)
        assert shared_status.read().first == was_first
        seen.add(visit[0])
        before = visit


def test_a_tick_of_another_thread_does_not_bring_back_an_old_place():
    shared_status = plain()
    shared_status.enter("load", 1)
    other = SharedStatus(shared_status.memory)  # knows no place, as a thread that was held up may know an old one
    shared_status.enter("forward", 2)
    other.progress()
    assert (shared_status.read().phase, shared_status.read().step) == ("forward", 2)


@pytest.mark.parametrize(
    ("phase", "step", "done"),
    [
        ("join", 0, 0),
        ("load", 1, 0),
        ("update", 7, 6),
        ("log", 7, 7),
        ("validate", 7, 7),
        ("save", 7, 7),
        ("end", 7, 7),
    ],
)
def test_a_step_is_done_after_its_update(phase, step, done):
    assert Beat(step, phase).steps_done == done


def test_ranks_pass_the_places_of_a_step_in_order():
    passed = [Beat(4, "save"), Beat(5, "load"), Beat(5, "forward"), Beat(5, "log"), Beat(6, "load")]
    assert sorted(passed, key=lambda beat: beat.order) == passed


def test_a_phase_that_does_not_exist_is_refused(shared_status):
    with pytest.raises(ValueError, match="not in tuple"):
        heartbeat.at("lunch", 1)
    assert shared_status.read().ticks == 0


# -- what is asked of it -----------------------------------------------------------------------------------


def test_the_first_reason_to_finish_stays():
    shared_status = plain()
    assert (shared_status.finish, shared_status.die) == (0, False)
    shared_status.ask_to_finish(REASONS.index("interrupt"))
    shared_status.ask_to_finish(REASONS.index("preemption"))
    assert REASONS[shared_status.finish] == "interrupt"
    assert not shared_status.die
    shared_status.ask_to_die()
    shared_status.enter("load", 2)
    assert (REASONS[shared_status.finish], shared_status.die) == ("interrupt", True)


def test_a_checkpoint_under_way_is_on_the_page_and_waited_for(page, monkeypatch):
    assert not page[0].saving
    other = SharedStatus.of(os.dup(page[1]))
    heartbeat.connect(other)
    other.saving = True
    assert page[0].saving
    set_time(monkeypatch, heartbeat, sleep=lambda seconds: setattr(page[0], "saving", False))
    heartbeat.await_saved()
    assert not other.saving
    other.saving = True
    monkeypatch.setattr(heartbeat, "SAVE_S", 0.0)
    heartbeat.await_saved()
    heartbeat.connect(None)
    other.close()


# -- of this process ---------------------------------------------------------------------------------------


def test_what_this_process_says_is_on_its_board_until_another_is_connected(shared_status):
    heartbeat.at("load", 1)
    heartbeat.progress()
    assert shared_status.read().ticks == 2
    other = plain()
    heartbeat.connect(other)
    heartbeat.at("save", 9)
    assert (shared_status.read().step, other.read().step) == (1, 9)


def test_hooks_hear_of_each_phase_after_it_was_written_and_are_forgotten_with_the_board(shared_status):
    heard = []
    heartbeat.on_phase(lambda phase, step: heard.append((phase, step, heartbeat.here().read().phase)))
    heartbeat.at("load", 1)
    heartbeat.progress()
    heartbeat.at("forward", 1)
    heartbeat.connect(None)
    heartbeat.at("backward", 1)
    assert heard == [("load", 1, "load"), ("forward", 1, "forward")]
