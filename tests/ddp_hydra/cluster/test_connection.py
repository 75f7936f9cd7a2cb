from __future__ import annotations

import asyncio
import getpass
import logging
import os
import socket
import ssl
import weakref
from types import SimpleNamespace

import distributed
import pytest

from ddp_hydra.cluster import connection
from ddp_hydra.cluster.connection import Scheduler, await_scheduler, diagnose, load
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
    said = set() if isinstance(error, asyncio.CancelledError) else {"refused"}  # other tests may have added handlers
    assert set(caplog.messages) == said


@pytest.mark.integration
def test_all_workers_are_known_though_the_clients_timer_asks_for_none_meanwhile(client2, monkeypatch):
    sync = distributed.Client.sync

    def late(self, call, *args, **options):
        answer = sync(self, call, *args, **options)
        sync(self, self._update_scheduler_info)  # as its timer does, before the caller goes on
        return answer

    monkeypatch.setattr(distributed.Client, "sync", late)
    assert not client2.scheduler_info(n_workers=-1)["workers"]
    assert len(connection.workers_of(client2)) == 2


def test_of_a_scheduler_that_is_gone_the_last_answer_counts():
    def gone(*_, **options):
        raise OSError

    last = {"workers": {"tcp://a:1": {}}}
    scheduler = SimpleNamespace(identity=None)
    client = SimpleNamespace(status="running", scheduler=scheduler, sync=gone, scheduler_info=lambda n_workers: last)
    assert connection.workers_of(client) == {"tcp://a:1": {}}
    client.status, client.scheduler = "closed", None
    assert connection.workers_of(client) == {"tcp://a:1": {}}


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 7"), OSError("No username set")])
def test_a_user_without_a_name_has_a_number(error, monkeypatch):
    def getuser():
        raise error

    monkeypatch.setenv("LOGNAME", "me")
    assert connection.user_name() == "me"
    monkeypatch.setattr(getpass, "getuser", getuser)
    assert connection.user_name() == str(os.getuid())


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
    monkeypatch.setattr(connection, "RETRY_S", 600.0)  # of a busy machine
    monkeypatch.setattr(connection, "diagnose", lambda address, security: "")
    return errors


def test_a_client_that_failed_is_gone_before_the_next_one_starts(monkeypatch):
    """Dask's client waits for a lock as it is collected, which the next one holds while it starts."""
    alive = []

    class Client:
        def __init__(self, *_, **__):
            self.itself = self
            alive.append(weakref.ref(self))
            if len(alive) == 1:
                raise OSError("timed out")
            assert alive[0]() is None

    monkeypatch.setattr(distributed, "Client", Client)
    monkeypatch.setattr(connection, "diagnose", lambda *_: "")
    monkeypatch.setattr(connection, "POLL_S", 0.0)
    monkeypatch.setattr(connection, "RETRY_S", 600.0)
    assert isinstance(Scheduler("tcp://127.0.0.1:1").client(), Client)


@pytest.mark.medium
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


@pytest.fixture
def listener(monkeypatch):
    """What each connection is answered, one after the other: None, or the error."""
    answers: list[OSError | None] = []
    monkeypatch.setattr(connection, "POLL_S", 0.0)
    monkeypatch.setattr(connection, "_is_greeted", lambda *_: answers.pop(0))
    return answers


SILENT = TimeoutError("timed out")
PLAIN = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")


@pytest.mark.parametrize("tls", [SILENT, PLAIN])  # it may answer when it is asked for TLS
def test_a_scheduler_that_is_too_busy_to_speak_is_asked_again_until_the_time_is_over(tls, listener):
    listener += [SILENT, tls, None]
    await_scheduler("tcp://127.0.0.1:1", None, timeout_s=60.0)
    listener += [SILENT, tls]
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1: what listens there is no Dask scheduler, or one"):
        await_scheduler("tcp://127.0.0.1:1", None, timeout_s=-1.0)


@pytest.fixture
def trusting():
    """Security that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return SimpleNamespace(get_connection_args=lambda role: {"ssl_context": context})


def test_one_that_speaks_tls_is_asked_again_too_and_one_that_does_not_is_not(listener, trusting):
    listener += [SILENT, PLAIN]
    with pytest.raises(ClusterError, match=r"does not speak TLS: give cluster\.address=tcp://\[::1\]:8786"):
        await_scheduler("tls://[::1]:8786", trusting, timeout_s=60.0)


def test_who_says_nothing_may_be_busy(monkeypatch, trusting):
    monkeypatch.setattr(connection, "PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for scheme in ("tcp", "tls"):
            address = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
            assert diagnose(address, trusting).startswith(f"cluster.address={address}: {connection.NO_SCHEDULER}")
