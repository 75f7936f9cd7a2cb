"""What a gang asks of its reservation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.dispatch import gang as module
from ddp_hydra.dispatch.gang import Gang


class Asked(Exception):
    """The reservation was asked."""


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    found: list[Any] = []

    class Reservation:
        def __init__(self, client, name, wanted, sweep, check, slots, expected):
            found.extend([wanted, expected])

        __enter__ = __exit__ = lambda *_: None

        def reserve(self, topic, timeout_s, restart_wait_s, least):
            found.extend([restart_wait_s, least])
            raise Asked

    monkeypatch.setattr(module, "Reservation", Reservation)
    return found


@pytest.mark.parametrize(
    ("ranks", "expected", "ranks_before", "wanted", "there", "least"),
    [
        (None, None, None, None, 0, None),  # on a client of one's own
        (None, 2, None, None, 2, None),
        (2, 1, None, 2, 1, None),
        (None, 2, 0, None, 2, None),  # the driver before had no ranks yet: no fewer begin
        (None, None, 0, None, 1, None),
        (2, 1, 0, 2, 1, None),  # it may never have had 2
        (2, None, 0, 2, 2, None),
        (None, 2, 3, 3, 3, 1),
    ],
)
def test_how_many_workers_are_waited_for(asked, ranks, expected, ranks_before, wanted, there, least):
    gang = Gang(None, ranks, min_ranks=1, restart_wait_s=7.0)
    with pytest.raises(Asked):
        gang.run_attempts(lambda number, world_size: None, ranks_before=ranks_before, expected=expected)
    assert asked == [wanted, there, 7.0, least]


def test_gpus_are_counted_once_a_worker_is_there_again(monkeypatch):
    answers = [{}, {}, {}, {"tcp://h:1": {"host": "h"}}]
    monkeypatch.setattr(module, "workers_of", lambda client: answers.pop(0))
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module.placement, "slots_of_workers", lambda client, given: 8 - len(answers))
    gang = Gang(SimpleNamespace(), ranks_per_worker="auto")
    assert gang.find_slots(may_wait=True) == 8
    answers.append({})
    assert gang.find_slots(may_wait=False) == 7  # nobody has said that there are workers
