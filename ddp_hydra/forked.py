"""Does the work of a process that was forked."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ddp_hydra.console.signals import SIGNALS, held_back

END_S = 60
"""How long the threads and exit handlers of user code may take, in seconds."""


def begin() -> None:
    """Leave to the parent what it has registered for its own end."""
    gc.freeze()  # also tells the objects of the parent from those that are made from now on
    atexit._clear()
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


_IGNORED: dict[int, object] = {}
"""Signals that this process ignores, and the handlers that its forks have."""


def ignore_signals() -> None:
    """Ignore what a terminal or a scheduler sends to a whole group. What this process starts gets it as usual."""
    for number in SIGNALS:
        signal.signal(number, _do_nothing)  # SIG_IGN would be inherited, also through exec
        signal.siginterrupt(number, False)
        _IGNORED[number] = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _do_nothing(*_: object) -> None:
    pass


_of_thread = threading.local()


def _hold_signals() -> None:
    # One that comes before the fork has its handlers would be lost.
    _of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if _IGNORED else None


def _release_signals() -> None:
    if _of_thread.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _of_thread.mask)


def _heed_signals() -> None:
    for number, handler in _IGNORED.items():
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, handler)  # type: ignore[arg-type]
    _IGNORED.clear()
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_heed_signals)


def end() -> None:
    """Do what Python does at its end, for user code: `os._exit` follows, which skips the parent's handlers and this."""

    def give_up(*_: object) -> NoReturn:
        names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"]
        waits = f"threads that still run: {', '.join(names)}" if names else "an exit handler that still runs"
        os.write(2, f"this process ends after {END_S} s without {waits}\n".encode(errors="replace"))
        os._exit(1)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(END_S)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Of sockets to processes that this one has started.
    if folder := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)
    logging.shutdown()
    standard = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    files = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase) and one not in standard]
    for file in sorted(files, key=_depth):
        try:
            file.close()
        except Exception as error:
            print(f"{getattr(file, 'name', file)} was not written to its end: {error}", file=sys.stderr)  # noqa: T201
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.alarm(0)


def _depth(file: io.IOBase) -> int:
    """Return a number that is lower for a file that writes into others: it is closed before them."""
    if isinstance(file, io.TextIOBase):
        return 0
    if isinstance(file, io.RawIOBase):
        return 3
    return 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.BytesIO) else 1


@contextmanager
def children_end() -> Iterator[None]:
    """End a child that user code forks in this block where the block ends: what follows is the parent's to do."""
    owner, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == owner:
            raise
        code = 1
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        elif isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)  # noqa: T201
        else:
            traceback.print_exc()
    if os.getpid() != owner:
        end()
        os._exit(code)


def start_program(module: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the `main` of a module as a program of its own. Return a socket to it, and the program.

    The program finds the number of its socket in sys.argv. It ends when the other end is closed, and by no signal that
    goes to the whole group.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        begun = f"from {__name__} import heed_no_group; heed_no_group(); from {module} import main; main()"
        command = [sys.executable, "-c", begun, str(theirs.fileno())]
        path = os.pathsep.join(filter(None, sys.path))
        with held_back(SIGNALS):  # the program inherits it, until it ignores them
            program = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path})
    return ours, program


def heed_no_group() -> None:
    """Ignore the signals of a group in a program that begins with them blocked."""
    ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Do some work, and end this process with the exit code that it returns; 1 after an error, which is printed.

    What the parent has on its stack and in `atexit` is the parent's to do.
    """
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


# -- Python's search for garbage: in imports, it takes a quarter of the time, and finds 8 MiB that may stay


def resume_garbage(searches: bool = False) -> None:
    """Search again, if `gc.disable` has paused it.

    All objects that exist now count as permanent: later searches do not walk through them, and searches in forks do not
    touch, and so copy, their pages.

    Args:
        searches: search once before that, which takes 0.15 s.
    """
    if not gc.isenabled():
        if searches:
            with held_back():
                gc.collect()
        gc.freeze()
        gc.enable()
