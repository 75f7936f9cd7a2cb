from __future__ import annotations

import signal
import threading
from concurrent.futures import CancelledError

import pytest

from ddp_hydra.console.signals import Interrupts
from ddp_hydra.dispatch.background import Running


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
