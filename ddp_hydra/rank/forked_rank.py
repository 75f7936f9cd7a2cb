"""Turns a fork of the fork server into a rank."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

from ddp_hydra import forked


def become_rank(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Turn this fork into a rank with its own output, cores and environment, and run it."""

    def run() -> int:
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
        return process.main(request["title"], launch_file, control, shared_status, its_listener)

    forked.run_and_exit(run)
