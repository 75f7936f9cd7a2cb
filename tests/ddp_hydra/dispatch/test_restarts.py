from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.dispatch.health import OWN_FAULT, Restarts, repeated
from ddp_hydra.errors import Failure
from ddp_hydra.run_state import AttemptEntry, FailureEntry

LOST = ("lost", "its worker tcp://10.0.0.1:4711 left the cluster")


def failed(kind="raised", message="ValueError: bad", step=20, attempt=0, **more) -> tuple[AttemptEntry, Failure]:
    failure = Failure(kind, 1, "h", message, step=step, attempt=attempt, **more)
    return entry_of(failure, max(0, step - 1)), failure


def entry_of(failure: Failure, steps_done: int) -> AttemptEntry:
    entry = FailureEntry(**failure.as_dict())
    return AttemptEntry(attempt=failure.attempt, world_size=4, steps_done=steps_done, failure=entry)


def are_the_same(*messages: str) -> bool:
    return repeated([failed(message=message)[0] for message in messages]) is not None


@given(st.integers(0, 5))
def test_there_are_as_many_new_attempts_as_the_budget_has(most):
    restarts = Restarts(most)
    answers = [restarts.note(*failed(*LOST, attempt=attempt)) for attempt in range(most + 1)]
    assert answers[:-1] == [None] * most
    assert answers[-1] == ("" if most == 0 else f"all {most} restarts of dispatch.max_restarts={most} are used up")
    assert [ended.attempt for ended in restarts.ended] == list(range(most + 1))


@pytest.mark.parametrize("kind", OWN_FAULT)
def test_the_same_failure_at_the_same_step_twice_is_not_tried_a_third_time(kind):
    restarts = Restarts(5)
    assert restarts.note(*failed(kind)) is None
    assert restarts.note(*failed(kind)) == "the same failure in step 20 in two attempts running: it was not tried again"
    assert restarts.note(*failed(kind, step=0)) is None
    assert restarts.note(*failed(kind, step=0)).startswith("the same failure before the first step in two attempts")
    assert restarts.note(*failed(mistake=True)) == ""  # the sentence itself says why


def test_a_kill_from_outside_is_tried_again_wherever_it_strikes():
    restarts = Restarts(5)
    message = "killed by SIGKILL: by hand, or by the system because memory ran out"
    assert [restarts.note(*failed("killed", message)) for _ in range(3)] == [None] * 3


def test_of_a_function_that_says_no_steps_nobody_knows_whether_it_failed_at_the_same_place():
    restarts = Restarts(5)
    unknown = failed(step=0, phase="run", deterministic=True)
    assert [restarts.note(*unknown) for _ in range(3)] == [None] * 3
    restarts = Restarts(5)
    logged = entry_of(unknown[1], 20)  # steps of results.log
    assert [restarts.note(logged, unknown[1]) for _ in range(2)] == [
        None,
        "the same failure in step 20 in two attempts running: it was not tried again",
    ]


def test_planned_ends_of_workers_use_up_no_restarts():
    restarts = Restarts(1)
    planned = failed(*LOST)
    assert [restarts.note(*planned, is_planned=True) for _ in range(5)] == [None] * 5
    assert restarts.note(*failed(*LOST)) is None
    assert restarts.note(*failed(*LOST)).startswith("all 1 restarts")


@pytest.mark.parametrize("kind", ["lost", "hung", "start", "never heard of"])
def test_what_is_not_a_ranks_own_fault_is_tried_again_however_often(kind):
    restarts = Restarts(3)
    assert [restarts.note(*failed(kind)) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("change", [{"step": 21}, {"message": "KeyError: 'x'"}, {"kind": "exited"}])
def test_another_failure_or_another_step_is_tried_again(change):
    restarts = Restarts(3)
    restarts.note(*failed())
    assert restarts.note(*failed(**change)) is None


def test_only_two_attempts_running_are_the_same():
    restarts = Restarts(5)
    assert [restarts.note(*failed(step=step)) for step in (20, 21, 20)] == [None] * 3
    assert restarts.note(*failed(step=20)).startswith("the same failure in step 20")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("object at 0x7f00dead", "object at 0xBEEF"),
        ("worker tcp://10.0.0.1:4711, pid 12", "worker tcp://10.0.0.2:80, pid 31337"),
        ("its peak memory was 3,072 MiB", "its peak memory was 978 MiB"),
        ("after 1800000ms", "after 17.25ms"),
    ],
)
def test_numbers_and_addresses_do_not_make_another_failure(one, other):
    assert are_the_same(one, other)
    assert not are_the_same(one, f"bad {other}")


def test_what_the_projects_code_raises_before_the_first_step_is_not_tried_again():
    why = "the code of the job raised this before the first step was done: it was not tried again"
    assert Restarts(5).note(*failed(step=1, deterministic=True)) == why
    assert Restarts(5).note(*failed(step=20, deterministic=True)) is None
    restarts = Restarts(5)
    restarts.note(*failed("lost", "m", step=0))
    assert restarts.note(*failed(step=1, deterministic=True)) is None  # the hosts are not what they were
