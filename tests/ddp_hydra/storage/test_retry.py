from __future__ import annotations

import errno

import pytest

from ddp_hydra import results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.errors import DiskFull
from ddp_hydra.storage import retry
from tests.support.clocks import set_time


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """How long was waited; no time passes else."""
    waited: list[float] = []
    set_time(monkeypatch, retry, monotonic=lambda: 1000.0 + sum(waited))
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    set_time(monkeypatch, results, sleep=waited.append)
    return waited


class Disk:
    """One that is full for a while."""

    def __init__(self, times: float, number: int = errno.ENOSPC) -> None:
        self.times, self.number, self.tries = times, number, 0

    def write(self, path) -> None:
        path.write_bytes(b"half of it")
        self.tries += 1
        if self.tries <= self.times:
            raise OSError(self.number, "No space left on device")
        path.write_bytes(b"all of it")


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    records = []
    results.connect(DirectSender(records.append, folder), retry_s=5.0)
    yield folder, records
    results.connect(None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_is_sent_when_there_is_room_again(spool, clock, capfd, number):
    folder, records = spool
    results.submit_file("a.bin", Disk(3, number).write)
    assert [path.read_bytes() for path in folder.iterdir()] == [b"all of it"]
    assert [(record.kind, record.data.size) for record in records] == [("file", 9)]
    said = capfd.readouterr().err
    assert f"the worker's temporary folder {folder} on host " in said
    assert "MiB free): trying again for up to 5 s; free some space there\nthere is room again, after 1 s" in said


def test_a_disk_that_stays_full_is_named_with_what_to_do_and_nothing_is_left_there(spool, clock):
    folder, records = spool
    with pytest.raises(DiskFull, match=rf"{folder} on host .*results.retry_s=5 s.*DASK_TEMPORARY_DIRECTORY"):
        results.submit_file("a.bin", Disk(1e9).write)
    assert (sum(clock), list(folder.iterdir()), records) == (pytest.approx(5.0), [], [])


def test_other_errors_are_not_waited_for(spool, clock):
    with pytest.raises(OSError, match="No space") as caught:
        results.submit_file("a.bin", Disk(1, errno.EIO).write)
    assert (type(caught.value), clock) == (OSError, [])
