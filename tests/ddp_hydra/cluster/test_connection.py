from __future__ import annotations

import asyncio
import logging

import distributed
import pytest

from ddp_hydra.cluster import connection
from ddp_hydra.cluster.connection import Scheduler, load
from ddp_hydra.errors import ClusterError


def log(error: BaseException) -> None:
    """As Dask's `log_errors` does."""
    try:
        raise error
    except BaseException as raised:
        logging.getLogger("distributed.client").exception(raised)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), OSError("refused")])
def test_a_client_that_is_closed_while_its_scheduler_is_gone_says_nothing_of_it(error, caplog, monkeypatch):
    load()
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("distributed.client"), "propagate", True)
    log(error)
    assert caplog.messages == ([] if isinstance(error, asyncio.CancelledError) else ["refused"])


@pytest.fixture
def clients(monkeypatch):
    """What Dask raises, one after the other, when it is asked for a client; the rest of them connect."""
    errors: list[BaseException] = []

    def client(*args, **kwargs):
        if errors:
            raise errors.pop(0)
        return "connected"

    monkeypatch.setattr(distributed, "Client", client)
    monkeypatch.setattr(connection, "POLL_S", 0.01)
    monkeypatch.setattr(connection, "diagnose", lambda address, security: "")
    return errors


def test_a_scheduler_that_is_busy_for_a_moment_is_asked_again(clients):
    clients += [AssertionError(), OSError("timed out"), TypeError()]
    assert Scheduler("tcp://127.0.0.1:1").client() == "connected"
    assert clients == []


@pytest.mark.parametrize(("error", "said"), [(AssertionError(), "AssertionError"), (OSError("timed out"), "timed out")])
def test_one_that_stays_silent_is_named_with_what_dask_says(clients, monkeypatch, error, said):
    monkeypatch.setattr(connection, "RETRY_S", 0.0)
    clients += [error, error, error]
    with pytest.raises(ClusterError, match=f"the scheduler tcp://127.0.0.1:1 does not answer: {said}"):
        Scheduler("tcp://127.0.0.1:1").client()


def test_where_the_reason_is_known_nobody_is_asked_again(clients, monkeypatch):
    monkeypatch.setattr(connection, "diagnose", lambda address, security: f"nobody listens at {address}")
    clients += [OSError("refused"), OSError("refused")]
    with pytest.raises(ClusterError, match=r"nobody listens at tcp://127.0.0.1:1"):
        Scheduler("tcp://127.0.0.1:1").client()
    assert len(clients) == 1
