"""Each fault, on 2 and 4 ranks, at each moment: named, stopped in time, cleaned up, and survived without a difference.

A fault is injected the way users rehearse theirs, with the config key `faults`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from distributed import Client

from tests.integration.chaos import Chaos, Story, assert_same, workers_to_kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(100)]

STOP_S = 2.0
"""How soon after a fault all ranks are gone."""
HANG_S = 3.0
"""The same of a hang, after its timeout."""


@pytest.fixture
def chaos(project, tmp_path, monkeypatch, ranks_alive) -> Chaos:
    return Chaos(project, tmp_path, monkeypatch, ranks_alive)


@pytest.fixture(scope="module")
def uninterrupted(project, tmp_path_factory, ranks_alive) -> Iterator[Callable[..., Story]]:
    """The same job, without faults; run when it is first asked for."""
    with pytest.MonkeyPatch.context() as patch:
        chaos = Chaos(project, tmp_path_factory.mktemp("uninterrupted"), patch, ranks_alive)

        @functools.cache
        def run(client: Client, ranks: int, *overrides: str) -> Story:
            story = chaos.done(client, ranks=ranks, overrides=overrides)
            patch.undo()
            return story

        yield run


@pytest.fixture(scope="module")
def clients(client2, client4) -> dict[int, Client]:
    return {2: client2, 4: client4}


@pytest.fixture(scope="module")
def clients_to_kill(warm_server) -> Iterator[dict[int, Client]]:
    with workers_to_kill(2) as two, workers_to_kill(4) as four:
        yield {2: two, 4: four}


# -- the matrix --------------------------------------------------------------------------------------------

FAULTS = {
    "raise": ("raised", "RuntimeError: a fault on purpose"),
    "exit": ("exited", "the process exited with code 3 before its work was done"),
    "kill": ("killed", "killed by SIGKILL"),
    "segv": ("killed", "killed by SIGSEGV"),
    "hang": ("hung", "hangs: no progress for "),
    "stop": ("hung", "its process is suspended (SIGSTOP, or a debugger)"),
    "worker": ("lost", "left the cluster (killed, out of memory, or its host is gone)"),
}
"""The kind of failure that each shall be taken for, and what is said."""

LAST = -1
MOMENTS = {
    "setting up": (LAST, 0, "start"),
    "first step": (0, 1, "forward"),
    "mid-epoch": (LAST, 9, "backward"),
    "checkpoint": (LAST, 8, "save"),
    "in the checkpoint's file": (0, 8, "write"),
    "validation": (0, 12, "validate"),
}
"""Which rank, in which step, doing what. The end of an epoch comes after steps 6, 12, 18; checkpoints after 4, 8, 16."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_stopped_cleaned_up_and_makes_no_difference(
    chaos, clients, clients_to_kill, uninterrupted, fault, moment, ranks
):
    client = (clients_to_kill if fault == "worker" else clients)[ranks]
    whole = uninterrupted(clients[ranks], ranks)
    rank, step, place = MOMENTS[moment]
    rank %= ranks
    story = chaos.done(client, f"{fault},rank={rank},step={step},at={place}", ranks=ranks)

    (over,) = story.over
    kind, message = FAULTS[fault]
    assert (over.failure.kind, over.failure.rank, over.failure.host) == (kind, rank, "127.0.0.1")
    assert message in over.failure.message
    assert_step(over.failure.step, fault, step, place)
    assert over.ranks == []
    if fault != "worker":  # whose relay can't pass on what the rank says last
        (struck,) = story.strikes()
        assert over.at_s - struck < allowed_s(fault, moment)

    assert_survived(story, whole, restarts=1)


def assert_step(found: int, fault: str, step: int, place: str) -> None:
    """The failure names the step."""
    if fault == "worker":  # which the client has last heard a second ago
        assert 0 <= found <= step + 4 * (place == "write")
    elif place == "write":  # the loop goes on meanwhile, at most to the next checkpoint
        assert step <= found <= 12
    else:
        assert found == step


def allowed_s(fault: str, moment: str) -> float:
    if fault not in ("hang", "stop"):
        return STOP_S
    # A suspended process is never busy setting up.
    first = moment in ("setting up", "first step") and fault == "hang"
    return HANG_S + (3 if first else 1.5)


def assert_survived(story: Story, whole: Story, restarts: int) -> None:
    """The job went on after its faults, and ended as if there had been none."""
    summary = story.summary
    assert (summary["restarts"], summary["failure"]) == (restarts, None)
    assert [attempt["failure"]["kind"] for attempt in summary["attempts"]] == [over.failure.kind for over in story.over]
    assert_same(story.checkpoint(), whole.checkpoint())
    assert story.curve() == whole.curve()
