"""Programs that an operator would start in a terminal, such as `dask scheduler`, for the time of a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.warm_server import PATIENCE_S, wait_for

STOP_S = 15.0


@contextlib.contextmanager
def program(*command: object, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program beside the test; what it says is in `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=log.parent,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def dask_scheduler(folder: Path, *options: object) -> Iterator[Path]:
    """`dask scheduler` on a free port of loopback; yields its scheduler file."""
    file = folder / "scheduler.json"
    command = (
        sys.executable,
        "-m",
        "dask",
        "scheduler",
        "--host",
        options_host(options),
        "--port",
        0,
        "--no-dashboard",
    )
    with program(*command, "--scheduler-file", file, *options, log=folder / "scheduler.log"):
        deadline = time.monotonic() + PATIENCE_S
        while not (file.exists() and file.read_text().endswith("}")):  # Dask creates it before it writes it
            assert time.monotonic() < deadline, (folder / "scheduler.log").read_text()
            time.sleep(0.05)
        yield file


def options_host(options: tuple[object, ...]) -> str:
    """With TLS, the protocol belongs into the host."""
    return "tls://127.0.0.1" if "--tls-ca-file" in options else "127.0.0.1"


@contextlib.contextmanager
def dask_worker(folder: Path, file: Path, name: str, *options: object) -> Iterator[subprocess.Popen[bytes]]:
    """`dask worker` with a nanny, for one rank."""
    command = (sys.executable, "-m", "dask", "worker", "--nthreads", 1, "--memory-limit", 0, "--no-dashboard")
    where = ("--scheduler-file", file, "--host", options_host(options), "--local-directory", folder / name)
    with program(*command, *where, "--name", name, *options, log=folder / f"{name}.log") as process:
        yield process


def address_in(file: Path) -> str:
    return str(json.loads(file.read_text())["address"])


@contextlib.contextmanager
def killed_at_work(cli: Any, *words: str, **variables: str) -> Iterator[int]:
    """Run a command until its job trains, yield its process id, and kill it."""
    process = cli.start(*words, "trainer.epochs=100000", "data.delay_s=0.001", "hydra.run.dir=run", **variables)
    try:
        wait_for((cli.folder / "run" / "metrics.jsonl").exists, "a job at work")
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
