from __future__ import annotations

import os
import sys

import pytest

from ddp_hydra.dispatch import inline
from ddp_hydra.rank import fault_injection, torchrun


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


@pytest.mark.medium
def test_other_threads_of_the_program_meet_no_launcher_and_may_set_variables_meanwhile(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("SET_MEANWHILE", "before")
    before = dict(os.environ)

    def look() -> bool:
        os.environ["SET_MEANWHILE"] = "now"
        return torchrun.is_here() or os.environ["WORLD_SIZE"] != "1"

    assert inline.run(look, on_record=lambda record: None) == [False]
    assert dict(os.environ) == {**before, "SET_MEANWHILE": "now"}
