from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra import heartbeat
from ddp_hydra.heartbeat import REASONS
from ddp_hydra.rank.world import World
from ddp_hydra.training import consensus
from ddp_hydra.training.consensus import Decision, StepConsensus, StopSignal
from tests.support.clocks import set_time


@pytest.fixture(autouse=True)
def board() -> Iterator[heartbeat.SharedStatus]:
    """The board of this process."""
    heartbeat.connect(None)
    yield heartbeat.here()
    heartbeat.connect(None)


# -- alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", range(len(REASONS)))
@pytest.mark.parametrize("good", [True, False])
def test_alone_a_rank_agrees_with_itself(good, stop):
    agreed = StepConsensus().decide(good=good, stop=stop)
    assert agreed == Decision(stop, None if good else 0)


def test_a_vote_may_be_asked_twice():
    decision = StepConsensus().vote(good=False, stop=2)
    assert decision() == decision() == Decision(2, 0)


def test_what_has_to_be_waited_for_is_looked_at_with_the_result_and_once():
    looked = []
    decision = StepConsensus().vote(good=lambda: bool(looked.append("now")), stop=1)
    assert not looked
    assert decision() == decision() == Decision(1, 0)
    assert looked == ["now"]


# -- the arithmetic ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=8))
def test_all_stop_when_one_does_and_the_first_bad_rank_is_named(votes):
    """gloo reduces the votes of all ranks to their maximum."""
    cast: list[torch.Tensor] = []

    def send_along(vote: torch.Tensor) -> Callable[[], torch.Tensor]:
        cast.append(vote)
        return lambda: vote.copy_(torch.stack(cast).amax(0))

    decisions = []
    for rank, (good, stop) in enumerate(votes):
        voter = StepConsensus(World(rank, len(votes)))
        decisions.append(voter.vote(good=good, stop=stop, send_along=send_along))
    bad = [rank for rank, (good, _) in enumerate(votes) if not good]
    agreed = Decision(max(stop for _, stop in votes), bad[0] if bad else None)
    assert [decision() for decision in decisions] == [agreed] * len(votes)


# -- whether to stop ---------------------------------------------------------------------------------------


def test_a_rank_stops_when_it_was_asked_to(board):
    stop_signal = StopSignal()
    assert stop_signal.reason() == 0
    board.ask_to_finish(REASONS.index("preemption"))
    assert REASONS[stop_signal.reason()] == "preemption"


@pytest.mark.parametrize("limit_s", [0.0, -1.0])
def test_a_rank_stops_when_its_time_is_up_whatever_else_it_was_asked(board, limit_s):
    board.ask_to_finish(REASONS.index("interrupt"))
    assert REASONS[StopSignal(limit_s).reason()] == "time_limit"


def test_a_rank_goes_on_while_it_has_time(monkeypatch):
    now = 1000.0
    set_time(monkeypatch, consensus, monotonic=lambda: now)
    stop_signal = StopSignal(60.0)
    now = 1059.9
    assert stop_signal.reason() == 0
    now = 1060.0
    assert REASONS[stop_signal.reason()] == "time_limit"
