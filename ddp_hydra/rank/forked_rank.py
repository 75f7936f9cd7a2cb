"""Turns a fork of the fork server into a rank."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any, NoReturn


def become_rank(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Turn this fork into a rank with its own output, cores and environment, and run it."""
    code = 1
    try:
        control, output, shared_status, launch_file, *listener = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if request["affinity"]:
            with contextlib.suppress(OSError):  # an administrator has taken those cores away
                os.sched_setaffinity(0, request["affinity"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        from ddp_hydra.rank import process

        its_listener = listener[0] if listener else None
        code = process.main(request["title"], launch_file, control, shared_status, its_listener)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
