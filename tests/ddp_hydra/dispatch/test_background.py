from __future__ import annotations

import contextlib
import signal
import threading
from concurrent.futures import CancelledError

import pytest

from ddp_hydra.console.signals import Interrupts
from ddp_hydra.dispatch.background import Running, recorded
from ddp_hydra.record import Metrics, Record
from ddp_hydra.run_state import AttemptEntry, Status, Summary
from ddp_hydra.writers.run_dir import read_summary


def test_a_ctrl_c_is_not_forgotten_where_the_wait_for_the_ranks_times_out(monkeypatch):
    stop = threading.Event()

    def run():
        stop.wait()
        raise KeyboardInterrupt

    running = Running(run, stop, 1, Interrupts(notice=str), graceful=True, run_dir=None)
    try:
        with pytest.raises(TimeoutError, match="they go on"):
            running.result(timeout=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(running._ended, "wait", lambda timeout: signal.raise_signal(signal.SIGINT))
            with pytest.raises(TimeoutError, match="they are ending"):
                running.result(timeout=0.0)
        assert stop.is_set()
    finally:
        stop.set()
    with pytest.raises(CancelledError):
        running.result()


EARLIER = {"loss": 0.5, "val/loss": 0.75}


def test_another_call_keeps_what_the_earlier_ones_have_left(tmp_path):
    def call(number: int, metrics: dict[str, float], error: str) -> Summary:
        told = {"world_size": 2, "begun": 1, "attempts": [AttemptEntry(attempt=number)]}
        status = Status()
        with (
            pytest.raises(OSError, match=error) if error else contextlib.nullcontext(),
            recorded(tmp_path, None, 0.0, threading.Event(), lambda: told, status) as write,
        ):
            assert [one.attempt for one in status.attempts] == list(range(number))
            assert status.metrics == (EARLIER if number else {})
            for step in range(1, 15) if metrics else ():
                write(Record(Metrics(metrics, samples=step * 8), step=step, attempt=number))
            if error:
                raise OSError(error)
        return read_summary(tmp_path)

    call(0, EARLIER, "disk gone")
    found = call(1, {}, "a typo")
    assert (found.status, found.steps, found.samples, found.metrics) == ("failed", 14, 112, EARLIER)
    found = call(2, {"loss": 0.25}, "")
    assert (found.status, found.metrics) == ("done", EARLIER | {"loss": 0.25})
    assert ([one.attempt for one in found.attempts], found.restarts) == ([0, 1, 2], 2)
