"""Signals, and output that nobody reads."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddp_hydra import heartbeat
from ddp_hydra.console.signals import SIGNALS, Interrupts, LastingFile, handled, held_back
from ddp_hydra.dispatch import inline


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def strike(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_for_a_good_end_and_the_second_ends_at_once(number):
    interrupts = Interrupts()
    with interrupts.caught(), interrupts.deferred():
        strike(number)
        assert interrupts.wanted
        with pytest.raises(KeyboardInterrupt):
            strike(number)
    with interrupts.caught():
        assert not interrupts.wanted, "a wish of the run before is forgotten"
        with pytest.raises(KeyboardInterrupt):
            strike(number)  # nothing is to be saved
        with interrupts.deferred():
            strike(number)
        with pytest.raises(KeyboardInterrupt):
            strike(number)  # nobody could answer the first one any more


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "SIGHUP")])
def test_the_first_signal_is_answered_in_a_sentence_at_once(number, name, capfd):
    interrupts = Interrupts(lambda: "a checkpoint is saved")
    with interrupts.caught(), interrupts.deferred():
        strike(number)
    assert capfd.readouterr().err == f"{name}: a checkpoint is saved\n"


def test_nohup_keeps_what_it_wants():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled(signal.default_int_handler), Interrupts().caught():
            strike(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_a_job_each_signal_is_an_exception_that_tidies_up(number):
    before = handlers()
    with pytest.raises(KeyboardInterrupt), handled(signal.default_int_handler):
        strike(number)
    assert handlers() == before


def test_a_signal_that_is_held_back_comes_later():
    reached = []

    def run():
        with held_back():
            signal.raise_signal(signal.SIGINT)  # to this thread: another one of the tests' process would hear it
            reached.append("the end of the block")
        reached.append("what follows")

    with handled(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        run()
    assert reached == ["the end of the block"]


def strike_another_thread(number=signal.SIGINT):
    thread = threading.Thread(target=signal.raise_signal, args=(number,))
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # as in threads that were there before
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    thread.join()


def test_a_signal_that_is_held_back_comes_also_where_the_block_fails():
    def fail():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("no")

    with pytest.raises(KeyboardInterrupt) as raised, held_back():
        fail()
    assert isinstance(raised.value.__context__, ValueError)


def test_a_signal_that_another_thread_gets_is_held_back_too():
    reached, heard = [], []

    def run():
        with held_back():
            strike_another_thread()
            reached.append("the end of the block")
        reached.append("what follows")

    before = handlers()
    with handled(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        run()
    assert (reached, handlers()) == (["the end of the block"], before)
    with handled(lambda number, frame: heard.append(number)):  # a handler of the user's
        run()
    assert (heard, reached[1:]) == ([signal.SIGINT], ["the end of the block", "what follows"])


def test_a_handler_that_is_set_while_signals_are_held_back_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with held_back():
            signal.signal(signal.SIGINT, strike)
        assert signal.getsignal(signal.SIGINT) is strike
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.integration
@pytest.mark.parametrize("number", SIGNALS)
def test_before_there_is_anything_to_tidy_up_a_signal_ends_the_program_in_a_line(number):
    program = (
        "import os, ddp_hydra.console.signals as i; i.leave_at_once(lambda: print('tidy', flush=True))\n"
        f"try: os.kill(os.getpid(), {int(number)})\n"
        "except BaseException: print('an import took it for something else')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "tidy\n", "interrupted\n")


@pytest.mark.integration
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_file_that_is_closed_is_taken_by_no_other_file(closed, tmp_path):
    program = (
        "import socket, subprocess, sys; from ddp_hydra.console.signals import open_standard_files\n"
        "open_standard_files()\n"
        "print('out'); print('err', file=sys.stderr); sys.stdin.read()\n"
        "found = socket.socket().fileno() > 2, subprocess.run(['cat']).returncode\n"
        f"open({str(tmp_path / 'found')!r}, 'w').write(str(found))\n"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {closed}"
    assert subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, check=False).returncode == 0
    assert (tmp_path / "found").read_text() == "(True, 0)"


def test_afterwards_signals_do_what_they_did_before():
    before = handlers()
    interrupts = Interrupts()
    with interrupts.caught():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), interrupts.caught(), interrupts.deferred():
        raise ZeroDivisionError
    assert not interrupts.is_deferring
    with Interrupts().caught(graceful=False):
        assert handlers() == before


def test_outside_the_main_thread_signals_are_left_alone():
    before, found = handlers(), []

    def run():
        with Interrupts().caught():
            found.append(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


# -- inline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", heartbeat.UNREADY)
def test_inline_before_the_loop_an_interrupt_ends_at_once(phase):
    heartbeat.connect(None)
    heartbeat.at(phase, 0)
    with inline.FinishOnInterrupt().caught(), pytest.raises(KeyboardInterrupt):
        strike()
    assert heartbeat.here().finish == 0
    heartbeat.connect(None)


def test_inline_in_the_loop_an_interrupt_asks_it_to_finish_and_a_second_ends_at_once():
    heartbeat.connect(None)
    heartbeat.at("forward", 3)
    with inline.FinishOnInterrupt().caught():
        strike()
        assert heartbeat.REASONS[heartbeat.here().finish] == "interrupt"
        with pytest.raises(KeyboardInterrupt):
            strike()
    heartbeat.connect(None)


PROGRAM = """
import logging, sys
from ddp_hydra.console.signals import lasting
with lasting():
    logging.basicConfig(stream=sys.stderr)
    print("first", flush=True)
    print("heard", file=sys.stderr)
    input()
    for number in range(10_000):
        print(number)
    logging.warning("not heard")
    print("not heard", file=sys.stderr, end="")
open(sys.argv[1], "w").write("to its end")
"""


@pytest.mark.integration
@pytest.mark.parametrize("unbuffered", [False, True])
def test_nobody_who_reads_is_no_reason_to_fail(unbuffered, tmp_path):
    """As with `| head -1`."""
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, *["-u"] * unbuffered, "-c", PROGRAM, str(done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert (program.stdout.readline(), program.stderr.readline()) == (b"first\n", b"heard\n")
        program.stdout.close()
        program.stderr.close()
        program.stdin.write(b"\n")
        program.stdin.close()
        assert program.wait() == 0
    assert done.read_text() == "to its end"


def test_all_is_written_where_somebody_reads():
    program = (
        "import sys; from ddp_hydra.console.signals import lasting\n"
        "with lasting(): print('é' * 100_000); sys.exit('bye')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env={**os.environ, "PYTHONUTF8": "1"}, check=False
    )
    assert (ended.returncode, ended.stdout.decode(), ended.stderr) == (1, "é" * 100_000 + "\n", b"bye\n")


@pytest.mark.parametrize("call", ["with lasting(): print(text)", "printed(text + chr(10))"])
def test_a_character_that_the_terminal_lacks_is_written_by_its_number(call):
    program = f"text = 'pr\\u00e9cision \\u00b1 0.1 \\u2026'\nfrom ddp_hydra.console.signals import *\n{call}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert ended.stdout == b"pr\\xe9cision \\xb1 0.1 \\u2026\n", ended.stderr


def test_what_a_test_has_put_in_the_place_of_stdout_stays_there(capsys):
    from ddp_hydra.console.signals import lasting

    with lasting():
        print("here")
    assert capsys.readouterr().out == "here\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_disk_is_noted_and_a_reader_who_has_gone_is_not(unbuffered):
    program = (
        "import sys; from ddp_hydra.console.signals import lasting, unwritten\n"
        "with lasting(): print('x'); print(unwritten(), file=sys.stderr)"
    )
    words = [sys.executable, *["-u"] * unbuffered, "-c", program]
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as pipe:
        said = [subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=True).stderr for out in (full, pipe)]
    assert said == [b"[Errno 28] No space left on device\n", b"None\n"]


def test_a_closed_terminal_is_a_reader_who_has_gone():
    user, terminal = os.openpty()
    try:
        file = LastingFile(terminal)
        os.close(user)
        assert (file.write(b"x"), file.failed) == (1, None)
    finally:
        os.close(terminal)
