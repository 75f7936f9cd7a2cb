from __future__ import annotations

import sys

import pytest

from ddp_hydra.dispatch import inline
from ddp_hydra.rank import fault_injection


@pytest.mark.medium
def test_a_fault_strikes_in_its_attempt_only_as_on_dask():
    def load() -> str:
        fault_injection.activate(["raise,at=load"])("load", 1)
        return "done"

    with pytest.raises(RuntimeError, match="a fault on purpose"):
        inline.run(load, on_record=lambda record: None)
    assert inline.run(load, on_record=lambda record: None, attempt=1) == ["done"]
    fault_injection.install(0, 0, {})


@pytest.mark.medium
def test_later_errors_of_the_process_are_not_those_of_a_rank():
    before = sys.excepthook
    inline.run(int, on_record=lambda record: None)
    assert sys.excepthook is before
