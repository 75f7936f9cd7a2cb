"""Faults on purpose, on the client's side."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from ddp_hydra.job.fault_writer import FaultWriter, corrupt
from ddp_hydra.rank import fault_injection
from ddp_hydra.record import Metrics, Record


def metrics(step: int, attempt: int = 0, rank: int = 0) -> Record:
    return Record(Metrics({}), rank, step, 1.0, attempt)


@pytest.fixture
def inject(tmp_path):
    ended = []

    def make(*texts: str) -> FaultWriter:
        writer = FaultWriter(fault_injection.parse(texts), tmp_path, lambda: ended.append("scheduler"))
        writer.ended = ended
        return writer

    return make


def test_a_fault_strikes_once_from_its_step_on_in_its_attempt(inject):
    writer = inject("scheduler,step=5,attempt=1")
    for record in (metrics(4, 1), metrics(9, 0), metrics(9, 1, rank=1)):
        writer.write(record)
    assert writer.ended == []
    for step in (7, 8, 9):
        writer.write(metrics(step, 1))
    assert writer.ended == ["scheduler"]


def test_faults_of_ranks_are_left_to_them(inject):
    assert inject("kill,rank=0,step=1", "nan", "hang").pending == []


def test_a_full_disk_lasts_its_time(inject, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ddp_hydra.job.fault_writer.time.monotonic", lambda: now[0])
    writer = inject("disk,step=2,seconds=3")
    writer.write(metrics(1))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as caught:
            writer.write(metrics(2))
        assert caught.value.errno == errno.ENOSPC
    now[0] += 3.1
    writer.write(metrics(2))


def test_an_interrupt_is_a_real_one(inject):
    with pytest.raises(KeyboardInterrupt):
        inject("interrupt,step=1").write(metrics(1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_damage_shows_under_all_names_of_a_checkpoint(tmp_path):
    step, last = tmp_path / "step-000001.pt", tmp_path / "last.pt"
    step.write_bytes(bytes(1000))
    last.hardlink_to(step)
    corrupt(last)
    assert step.read_bytes() == last.read_bytes()
    assert sum(step.read_bytes()) == 255
    corrupt(Path(tmp_path / "none.pt"))
