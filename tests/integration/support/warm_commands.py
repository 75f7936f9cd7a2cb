"""Run commands as forks of one process that has imported what they import, and so spend no time on imports.

A fork does what `python -m MODULE` does, in a session, a folder and an environment of its own. What is read from the
environment when Python starts (PYTHON…) has to be left to a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import dask
from hydra.core.plugins import Plugins

PRELOAD = (
    "ddp_hydra.cli.main", "ddp_hydra.cli.commands", "ddp_hydra.cli.inference", "ddp_hydra.job.run",
    "ddp_hydra.job.run", "ddp_hydra.sweep.launcher", "ddp_hydra.training.loop", "distributed.deploy.local",
    "tensorboard.summary.writer", "torch._dynamo",
)  # fmt: skip


class WarmCommands:
    def __init__(self, folder: Path) -> None:
        self.address = folder / "warm_commands"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.address))
            listener.listen()
            command = [sys.executable, "-m", __name__, str(listener.fileno())]
            self.server = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)

    def close(self) -> None:
        self.server.communicate()
        self.address.unlink()

    def run(
        self,
        module: str,
        arguments: tuple[str, ...],
        folder: Path,
        variables: dict[str, str],
        timeout_s: float,
        fork_workers: bool,
    ) -> subprocess.CompletedProcess[str]:
        request = {
            "module": module,
            "arguments": arguments,
            "folder": str(folder),
            "variables": variables,
            "fork_workers": fork_workers,
        }
        with (
            socket.socket(socket.AF_UNIX) as connection,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            connection.connect(str(self.address))
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [out.fileno(), err.fileno()])
            with connection.makefile("r") as answers:
                pid = int(answers.readline())
                try:
                    connection.settimeout(timeout_s)
                    exit_code = int(answers.readline())
                except BaseException as error:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                    for file in (out, err):
                        file.seek(0)
                        error.add_note(file.read())
                    raise
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess([module, *arguments], exit_code, out.read(), err.read())


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a process for each command, until stdin ends. Returns in such a process, with what it shall run."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            return become_command(connection, listener)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def become_command(connection: socket.socket, listener: socket.socket) -> dict[str, Any]:
    """Fork once more: one process waits for the end of the command, the other becomes it and returns its request."""
    content, files, *_ = socket.recv_fds(connection, 2**20, 2)
    while not content.endswith(b"\n"):
        content += connection.recv(2**20)
    if pid := os.fork():
        connection.sendall(b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    listener.close()
    os.setsid()
    for number, file in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *files), strict=True):
        os.dup2(file, number)
        os.close(file)
    return dict(json.loads(content))


def run(request: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    dask.config.refresh()
    sys.argv = [request["module"], *request["arguments"]]
    if request["fork_workers"]:
        fork_workers()
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork_workers() -> None:
    """Start the fork server of multiprocessing, which starts Dask's workers, as one more fork with all modules."""

    def fork(path: bytes, arguments: list[str], fds: list[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return spawn(path, arguments, fds)
        if pid := os.fork():
            return pid
        for number in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *fds}:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(number)  # above all the end of the pipe whose closing tells it to end
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)

    spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = spawn


def main() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    Plugins.instance()  # looks through all packages of plugins
    gc.collect()
    gc.freeze()  # keeps the garbage collector of a fork from touching, and so copying, the shared pages
    assert threading.active_count() == 1, threading.enumerate()
    exit_code = run(serve(socket.socket(fileno=int(sys.argv[1]))))
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(exit_code)  # to take torch apart would touch, and so copy, all that the fork shares


if __name__ == "__main__":
    main()
