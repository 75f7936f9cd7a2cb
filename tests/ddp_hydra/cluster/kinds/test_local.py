from __future__ import annotations

import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.cluster.kinds.local import Local


class Cluster:
    """A cluster without processes, whose nannies have something to say when it closes."""

    def __init__(self, loop: Any, begin: str = "") -> None:
        assert loop.asyncio_loop.is_running()
        if begin:
            raise KeyboardInterrupt

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: Any) -> None:
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
    assert caplog.messages == ["Worker process still alive after 4.0 seconds, killing", "something else"]


def test_an_interrupt_while_workers_are_started_leaves_no_loop(monkeypatch):
    manager = local(monkeypatch, begin="badly")
    with pytest.raises(KeyboardInterrupt), manager.open():
        pass
    assert not manager.arguments["loop"].asyncio_loop.is_running()
