"""Turns a fork of the fork server into a rank."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any, NoReturn

from ddp_hydra import forked
from ddp_hydra.rank.processes import RANK_PID


def become_rank(request: dict[str, Any], fds: list[int]) -> NoReturn:
    def run() -> int:
        forked.begin()
        for fd in fds:
            os.set_inheritable(fd, False)
        control, output, shared_status, launch_file, *listener = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if request["affinity"]:
            with contextlib.suppress(OSError):  # an administrator has taken those cores away
                os.sched_setaffinity(0, request["affinity"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ[RANK_PID] = str(os.getpid())  # by which the server knows what the rank leaves behind
        tempfile.tempdir = None  # the server's folder for temporary files may be that of another command
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        from ddp_hydra.rank import process

        its_listener = listener[0] if listener else None
        code = process.main(request["title"], launch_file, control, shared_status, its_listener)
        forked.end()
        return code

    forked.run_and_exit(run)
