"""The cluster of a sweep."""

from __future__ import annotations

import asyncio

import dask
import distributed  # noqa: F401 (brings its settings along)
import pytest
from distributed.batched import BatchedSend

from ddp_hydra.sweep.scheduler import SHORT_LOGS


@pytest.mark.parametrize("key", SHORT_LOGS)
def test_dask_has_the_settings_that_keep_logs_short(key):
    assert dask.config.get(key)


def test_few_messages_are_kept():
    async def kept() -> int | None:
        return BatchedSend(interval="2ms").recent_message_log.maxlen

    with dask.config.set(SHORT_LOGS):
        assert asyncio.run(kept()) == 100
