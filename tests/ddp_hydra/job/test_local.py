"""What a job does with the records of its ranks."""

from __future__ import annotations

import pytest

from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.fault_injection import InterruptWriter
from ddp_hydra.record import Metrics, Record, Text


def metrics(step: int, attempt: int = 0) -> Record:
    return Record(Metrics({}), 0, step, 1.0, attempt)


def test_an_interrupt_on_purpose_comes_once_from_its_step_on_in_its_attempt(capsys):
    writer = InterruptWriter(fault_injection.parse(["interrupt,step=5,attempt=1"]))
    for record in (metrics(4, 1), metrics(9, 0), Record(Text("a", "b"), 0, 9, 1.0, 1)):
        writer.write(record)
    with pytest.raises(KeyboardInterrupt):
        writer.write(metrics(6, 1))
    assert "fault on purpose: Fault(kind='interrupt'" in capsys.readouterr().out
    writer.write(metrics(7, 1))
    writer.close()
