from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddp_hydra import results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.record import Record


@pytest.fixture
def sent(tmp_path) -> Iterator[list[Record]]:
    """Make this process rank 3 of attempt 1, and list the records as their reader gets them."""
    records: list[Record] = []
    spool = tmp_path / "spool"
    spool.mkdir()
    results.connect(DirectSender(records.append, spool), rank=3, attempt=1)
    yield records
    results.connect(None)
