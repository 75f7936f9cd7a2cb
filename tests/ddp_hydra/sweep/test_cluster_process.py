"""The cluster of a sweep."""

from __future__ import annotations

import asyncio

import dask
import distributed  # noqa: F401 (brings its settings along)
from distributed.batched import BatchedSend

from ddp_hydra.sweep.scheduler import SHORT_LOGS


def test_few_messages_are_kept():
    assert all(map(dask.config.get, SHORT_LOGS)), "Dask has these settings"

    async def kept() -> int | None:
        return BatchedSend(interval="2ms").recent_message_log.maxlen

    with dask.config.set(SHORT_LOGS):
        assert asyncio.run(kept()) == 100
