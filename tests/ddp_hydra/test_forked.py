from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time

import pytest

from ddp_hydra import forked


@pytest.mark.medium
def test_it_is_searched_for_again_only_after_a_pause():
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    forked.resume_garbage()
    # Threads of other tests may let permanent objects go meanwhile, so the count may fall.
    assert gc.get_freeze_count() <= frozen
    new = [[] for _ in range(10_000)]
    gc.disable()
    try:
        assert not gc.isenabled()
    finally:
        forked.resume_garbage()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(new) / 2


IGNORING = """
import os, signal, time
from ddp_hydra import forked

forked.ignore_signals()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
codes = set()
for _ in range(300):
    if not (pid := os.fork()):
        time.sleep(300)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(codes)
"""


def test_a_process_that_ignores_signals_has_forks_that_heed_them_from_their_first_moment_on():
    done = subprocess.run([sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=200)
    assert done.stdout == "{-15}\n", done.stderr


SLOW = """
import socket, sys, time

time.sleep(0.3)

def main():
    theirs = socket.socket(fileno=int(sys.argv[1]))
    theirs.sendall(b"here")
    theirs.recv(1)  # until the test is over: Python's own end has no handlers
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.4])
def test_a_program_is_not_ended_by_a_signal_of_the_group_while_it_starts(tmp_path, monkeypatch, delay_s):
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ours, program = forked.start_program("slow")
    with ours:
        time.sleep(delay_s)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            program.send_signal(number)
        assert ours.recv(9) == b"here"
    assert program.wait(60) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
