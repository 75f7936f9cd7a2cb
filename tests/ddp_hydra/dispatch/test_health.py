from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.dispatch.health import GAP_S, SUSPENDED_S, HealthMonitor, waits
from ddp_hydra.heartbeat import PHASES
from ddp_hydra.record import Beat

LOST_S, HANG_S, FIRST_S, JOIN_S = 15.0, 60.0, 600.0, 300.0


def health(hang_s=HANG_S, first_s=FIRST_S) -> HealthMonitor:
    return HealthMonitor(hang_s, first_s, JOIN_S)


def at(phase, step=5, age_s=0.0, **more):
    return Beat(step, phase, age_s=age_s, **more)


def gang(*beats, now=0.0) -> HealthMonitor:
    """Ranks 0, 1 … where they said they are."""
    seen = health()
    for rank, beat in enumerate(beats):
        seen.note_heartbeat(rank, beat, now)
    return seen


# -- who hangs ---------------------------------------------------------------------------------------------


def test_the_rank_that_is_least_far_holds_up_the_others():
    seen = gang(at("backward", age_s=61), at("load", age_s=70), at("backward", age_s=61), at("backward", age_s=61))
    hang = seen.hang(range(4), 0.0)
    assert hang.rank == 1
    assert hang.message == (
        "hangs: no progress for 70 s in loading data of step 5; rank 0, 2-3 wait for it further on; "
        "the stack of every rank is in its log"
    )
    assert gang(at("load", 6, 99), at("save", 5, 99)).hang([0, 1], 0.0).rank == 1  # of an earlier step
    message = gang(at("forward", 3, 100)).hang([0], 0.0).message
    assert message.startswith("hangs: no progress for 100 s in the forward pass of step 3; the stack of every")
    assert gang(at("backward", age_s=500), at("load", age_s=1)).hang([0, 1], 0.0) is None  # it moves


def test_of_several_at_one_place_the_suspended_one_is_named():
    hang = gang(at("forward", age_s=80), at("forward", age_s=70, stopped=True), at("log", age_s=70)).hang(range(3), 0.0)
    assert hang.rank == 1
    assert "its process is suspended (SIGSTOP, or a debugger); rank 0 stands at the same place" in hang.message
    assert "rank 2 waits for it further on" in hang.message


def test_of_several_at_one_place_one_that_does_not_wait_is_named_unless_another_is_suspended():
    beats = [at("forward", age_s=80), at("forward", age_s=80), at("forward", age_s=80)]
    assert gang(*beats).hang(range(3), 0.0).rank == 0
    assert gang(*beats).hang(range(3), 0.0, waiting=[0, 1]).rank == 2
    beats[1] = at("forward", age_s=80, stopped=True)
    assert gang(*beats).hang(range(3), 0.0, waiting=[0, 1]).rank == 1


@pytest.mark.parametrize(
    ("module", "is_waiting"),
    [
        ("torch.autograd.graph", True),
        ("ddp_hydra.training.consensus", True),
        ("ddp_hydra.training.parallel.shared_memory", True),
        ("ddp_hydra.training.loop", False),
    ],
)
def test_a_rank_waits_for_others_in_the_files_where_ranks_meet(module, is_waiting):
    backward = '  File "/site-packages/torch/autograd/graph.py", line 1072 in _engine_run_backward\n'
    stacks = (
        f"Thread 0x1 (most recent call first):\n{backward}\nCurrent thread 0x2 (most recent call first):\n"
        f'  File "{find_spec(module).origin}", line 75 in wait\n{backward if is_waiting else ""}'
    )
    assert waits(stacks) == is_waiting


def test_a_suspended_rank_that_is_further_than_others_is_not_to_blame():
    assert gang(at("load", age_s=80), at("backward", age_s=80, stopped=True)).hang([0, 1], 0.0).rank == 0


def test_a_suspended_rank_does_not_hold_up_a_job_that_is_to_end():
    seen = gang(at("load", age_s=SUSPENDED_S + 1, stopped=True), at("backward", age_s=SUSPENDED_S + 1))
    assert seen.hang([0, 1], 0.0) is None
    seen.is_ending = True
    assert seen.hang([0, 1], 0.0).rank == 0
    seen.note_heartbeat(0, at("load", age_s=SUSPENDED_S + 1), 0.0)
    assert seen.hang([0, 1], 0.0) is None, "a slow step is no hang"


def test_time_since_the_last_beat_counts_too():
    seen = gang(at("load", age_s=50), now=100.0)
    assert seen.hang([0], 109.0) is None
    assert seen.hang([0], 111.0).rank == 0


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "run"])
def test_a_phase_that_is_visited_for_the_first_time_may_take_longer(phase):
    limit_s = {"join": JOIN_S, "end": HANG_S}.get(phase, FIRST_S)  # nothing is set up on the way out
    assert gang(at(phase, age_s=limit_s - 1, first=True)).hang([0], 0.0) is None
    assert gang(at(phase, age_s=limit_s + 1, first=True)).hang([0], 0.0).rank == 0
    for more in ({"first": False}, {"first": True, "stopped": True}):
        assert gang(at(phase, age_s=HANG_S + 1, **more)).hang([0], 0.0).rank == 0


def test_a_first_visit_never_gets_less_time_than_later_ones():
    seen = health(hang_s=60, first_s=5)
    seen.note_heartbeat(0, at("load", age_s=30, first=True), 0.0)
    assert seen.hang([0], 0.0) is None


@pytest.mark.parametrize("other", ["run", "load"])
def test_there_is_no_alarm_where_some_rank_runs_a_function_that_says_nothing_of_itself(other):
    assert gang(at("run", 0, 1e6), at(other, 0, 1e6)).hang([0, 1], 0.0) is None


def test_there_is_no_alarm_before_all_have_said_where_they_are():
    assert gang(at("load", age_s=1e6)).hang([0, 1], 0.0) is None


def test_ranks_that_have_ended_or_are_about_to_are_waited_for_by_nobody():
    seen = gang(at("load", age_s=1e6), at("backward", age_s=1e6), at("end", 2, age_s=1e6))
    assert seen.hang([1, 2], 0.0).rank == 1
    assert seen.hang([], 0.0) is None


def test_a_gang_that_does_not_come_out_of_its_end_hangs_there():
    hang = gang(at("end", 20, 61), at("end", 20, 62)).hang([0, 1], 0.0)
    assert hang.rank == 0
    assert "in leaving the process group of step 20; rank 1 stands at the same place" in hang.message


def test_a_standstill_while_the_client_was_busy_is_not_held_against_a_rank():
    seen = gang(at("save", age_s=900), at("backward", age_s=900), now=100.0)
    seen.excuse(100.0)
    assert seen.hang([0, 1], 100.0 + HANG_S - 1) is None
    assert seen.hang([0, 1], 100.0 + HANG_S + 1).message.startswith("hangs: no progress for 61 s in the backward pass")


def test_ranks_that_write_a_checkpoint_are_known():
    seen = gang(at("backward", saving=True), at("backward"), at("save", saving=1))
    assert (seen.saving([0, 1, 2]), seen.saving([1]), seen.saving([7])) == ([0, 2], [], [])


# -- who is silent -----------------------------------------------------------------------------------------


def test_a_rank_is_silent_when_nothing_was_heard_for_too_long():
    seen = health()
    seen.note_message(0, 0.0)
    seen.note_message(1, 10.0)
    assert seen.overdue([0, 1], 15.0, LOST_S) == []
    assert seen.overdue([0, 1], 15.1, LOST_S) == [0]
    assert seen.overdue([1], 15.1, LOST_S) == []
    assert seen.overdue([0, 1], 15.1, after_s=3.0) == [0, 1]
    assert seen.overdue([2], 1e9, LOST_S) == []  # it was never heard: it is late


# -- the watcher itself ------------------------------------------------------------------------------------


def looking(seen: HealthMonitor, begin: float, end: float, every_s: float = 1.0) -> None:
    for n in range(int((end - begin) / every_s) + 1):
        seen.look(begin + n * every_s)


@given(st.floats(GAP_S + 0.01, 1e6), st.floats(0, 10))
def test_time_in_which_the_watcher_slept_is_nobodys_fault(slept_s, silent_s):
    seen = health()
    seen.note_message(0, 0.0)
    seen.note_heartbeat(0, at("load", age_s=0), 0.0)
    looking(seen, 0.0, silent_s)
    seen.look(silent_s)
    now = silent_s + slept_s
    seen.look(now)
    assert seen.overdue([0], now, LOST_S) == []
    assert seen.hang([0], now) is None
    assert seen.overdue([0], now + LOST_S - silent_s - 0.1, LOST_S) == []


def test_what_was_heard_when_the_watcher_woke_up_gets_no_more_time_than_others():
    seen = health()
    seen.look(0.0)
    seen.note_message(0, 1000.0)
    seen.note_heartbeat(0, at("load"), 1000.0)
    seen.look(1000.1)
    assert seen.overdue([0], 1000.1 + LOST_S + 0.1, LOST_S) == [0]
    assert seen.hang([0], 1000.1 + HANG_S + 0.1).rank == 0


def test_a_watcher_that_looks_on_time_gives_nobody_any():
    seen = health()
    seen.note_message(0, 0.0)
    seen.note_heartbeat(0, at("load"), 0.0)
    looking(seen, 0.0, HANG_S + 1)
    assert seen.overdue([0], HANG_S + 1, LOST_S) == [0]
    assert seen.hang([0], HANG_S + 1).rank == 0


# -- what hosts say ----------------------------------------------------------------------------------------

beats = st.builds(
    Beat, st.integers(0, 2**63 - 1), st.sampled_from(PHASES), st.booleans(), st.floats(0, 1e9), st.booleans()
)


@settings(max_examples=40)
@given(st.lists(beats, min_size=1, max_size=4), st.floats(0, 1e6))
@pytest.mark.medium
def test_any_beats_can_be_told(said, now):
    seen = health()
    for rank, beat in enumerate(said):
        seen.note_heartbeat(rank, beat, 0.0)
    hang = seen.hang(range(len(said)), now)
    assert hang is None or (hang.rank in range(len(said)) and hang.message.startswith("hangs: "))
    assert 0 <= seen.steps_done < 2**63
    assert seen.in_loop(range(len(said))) in (True, False)


# -- how far the gang is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["join", "run", "start"])
def test_the_loop_is_reached_when_all_are_in_it(phase):
    assert gang(at("load"), at("save")).in_loop([0, 1])
    assert not gang(at("load"), at(phase)).in_loop([0, 1])
    assert not gang(at("load")).in_loop([0, 1])
    assert gang(at("load"), at(phase)).in_loop([0])


def test_joining_the_others_has_a_limit_of_its_own():
    seen = gang(*[at("join", 0, JOIN_S - 1, first=True)] * 2)
    assert seen.hang([0, 1], 0.5) is None
    message = seen.hang([0, 1], 1.5).message
    assert "in joining the process group;" in message
    assert "they may all wait for each other" in message


def test_ranks_that_wait_for_data_do_not_wait_for_the_network():
    message = gang(at("load", 5, HANG_S), at("load", 5, HANG_S)).hang([0, 1], 1.0).message
    assert "in loading data of step 5; rank 1 stands at the same place;" in message
    assert "network" not in message
