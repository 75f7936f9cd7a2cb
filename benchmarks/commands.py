"""Runs the two commands that are compared: a job of ddp_hydra, and a hand-written script under torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
CONF = f"hydra.searchpath=['file://{ROOT}/benchmarks/conf']"
"""Override that adds the benchmarks' own configs to the checkout's."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What torchrun would set anyway, with a warning."""
END_S = 20.0
"""How long a command may take to end after Ctrl-C."""


def ddp_hydra(*overrides: str, run_dir: Path) -> float:
    """Run one job from scratch.

    Returns:
        When the command was given, in seconds since the epoch.
    """
    with nobody_warm() as variables:
        return run(job(*overrides, run_dir=run_dir), variables)


def torchrun(script: str, *arguments: str, ranks: int) -> float:
    """Run one of the scripts in peers/ under torchrun.

    Returns:
        When the command was given, in seconds since the epoch.
    """
    return run(by_hand(script, *arguments, ranks=ranks), ONE_THREAD)


def job(*overrides: str, run_dir: Path) -> list[str]:
    """Return the command of a job."""
    return [sys.executable, "-m", "ddp_hydra", CONF, *overrides, f"hydra.run.dir={run_dir}"]


def by_hand(script: str, *arguments: str, ranks: int, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command of a script in peers/ under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    return [sys.executable, *launcher, str(ROOT / "benchmarks" / "peers" / script), *arguments]


def run(command: list[str], variables: Mapping[str, str]) -> float:
    """Run a command to its end; print its output if it fails."""
    begin = time.time()
    done = subprocess.run(command, cwd=ROOT, env=with_ours(variables), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return begin


def with_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


class Running:
    """Runs a command in the background and reads its output. A `with` block ends it and all that it has started.

    Args:
        command: what to run.
        variables: added to the environment.
    """

    def __init__(self, command: list[str], variables: Mapping[str, str]) -> None:
        self.command = command
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=with_ours(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is ours to pass on
        )
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line))

    def said(self, pattern: str, since: float) -> float | None:
        """Return when it first printed `pattern` after a time, in seconds since the epoch."""
        return next((at for at, line in self.lines if at >= since and re.search(pattern, line)), None)

    def fail(self, why: str) -> NoReturn:
        """End the benchmark, and print the last output of the command."""
        said = "".join(line for _, line in self.lines[-60:])
        sys.exit(f"{' '.join(self.command)}\n{said[-4000:]}\n{why}")

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        started: list[psutil.Process] = []
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGINT)
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.process.kill()
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a process id that was given away again
                    process.kill()
            self.process.wait()


@contextmanager
def nobody_warm(keep_warm_s: float = 0) -> Iterator[dict[str, str]]:
    """Yield variables under which no warm fork server is found; at the end, wait until the one that started is gone.

    Args:
        keep_warm_s: how long that one stays after a job.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield {"XDG_RUNTIME_DIR": folder, "DDP_HYDRA_KEEP_WARM_S": str(keep_warm_s)}
        deadline = time.monotonic() + 30
        while any(Path(folder).rglob("*.sock")) and time.monotonic() < deadline:
            time.sleep(0.05)
