"""Does the work of a process that was forked."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


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
