from __future__ import annotations

import asyncio
import logging

import pytest

from ddp_hydra.cluster.connection import load


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
