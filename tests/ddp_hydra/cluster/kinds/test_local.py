from __future__ import annotations

import logging
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.cluster.kinds.local import Local
from ddp_hydra.rank import dask_preload


class Cluster:
    """A cluster without processes, whose nannies have something to say when it closes."""

    def __init__(self, loop: Any, begin: str = "", end: str = "") -> None:
        assert loop.asyncio_loop.is_running()
        self.end = end
        if begin:
            raise KeyboardInterrupt

    def close(self) -> None:
        if self.end:
            logging.getLogger("distributed.worker").error("cancelled")
            raise KeyboardInterrupt
        nannies = logging.getLogger("distributed.nanny")
        nannies.warning("Worker process still alive after 4.0 seconds, killing")
        nannies.warning("something else")


def local(monkeypatch, **arguments: Any) -> Local:
    made = Local(OmegaConf.create({"_target_": f"{__name__}.Cluster", **arguments}))
    monkeypatch.setattr(made, "instantiate", lambda target, given: Cluster(**given))
    return made


def test_workers_that_take_long_to_end_are_not_worth_a_word_when_the_job_is_over(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    with local(monkeypatch).open():
        logging.getLogger("distributed.nanny").warning("Worker process still alive after 4.0 seconds, killing")
    said = list(dict.fromkeys(caplog.messages))  # other tests may have added handlers
    assert said == ["Worker process still alive after 4.0 seconds, killing", "something else"]


def test_an_interrupt_while_workers_are_started_leaves_no_loop(monkeypatch):
    manager = local(monkeypatch, begin="badly")
    with pytest.raises(KeyboardInterrupt), manager.open():
        pass
    assert not manager.arguments["loop"].asyncio_loop.is_running()


def test_an_interrupt_while_the_cluster_is_closed_leaves_no_loop_and_no_traceback(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    manager = local(monkeypatch, end="badly")
    with pytest.raises(KeyboardInterrupt), manager.open():
        pass
    assert not manager.arguments["loop"].asyncio_loop.is_running()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("arguments", "protocol"),
    [
        ({}, None),
        ({"processes": True}, None),
        ({"processes": False}, "tcp://"),
        ({"processes": False, "security": True}, "tls://"),
        ({"processes": False, "protocol": "ws://"}, "ws://"),
    ],
)
def test_workers_in_this_process_have_addresses_of_a_real_host(monkeypatch, arguments, protocol):
    manager = local(monkeypatch, **arguments)
    monkeypatch.setattr(manager, "instantiate", lambda target, given: Cluster(given["loop"]))
    with manager.open():
        assert manager.arguments.get("protocol") == protocol


@pytest.mark.parametrize(("nanny", "in_client"), [(None, True), ("tcp://127.0.0.1:1", False)])
def test_only_a_process_of_its_own_ignores_signals_for_the_worker(monkeypatch, nanny, in_client):
    ignored: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: ignored.append(number))
    monkeypatch.setattr(dask_preload, "in_client", False)
    dask_preload.dask_setup(SimpleNamespace(nanny=nanny))
    assert dask_preload.in_client is in_client
    assert ignored == ([] if in_client else [signal.SIGINT, signal.SIGHUP])
