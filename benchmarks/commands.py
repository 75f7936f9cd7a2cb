"""The two commands that are compared: a job of ddp_hydra, and a hand-written script under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONF = f"hydra.searchpath=['file://{ROOT}/benchmarks/conf']"
"""Override that adds the benchmarks' own configs to those of the checkout."""


def ddp_hydra(*overrides: str, run_dir: Path) -> float:
    """Run one job from scratch.

    Returns:
        When the command was given, in seconds since the epoch.
    """
    command = [sys.executable, "-m", "ddp_hydra", CONF, *overrides, f"hydra.run.dir={run_dir}"]
    with nobody_warm() as variables:
        return run(command, variables)


def torchrun(script: str, *arguments: str, ranks: int) -> float:
    """Run one of the scripts in peers/ under torchrun.

    Returns:
        When the command was given, in seconds since the epoch.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([*launcher, str(ROOT / "benchmarks" / "peers" / script), *arguments], {"OMP_NUM_THREADS": "1"})


def run(command: list[str], variables: Mapping[str, str]) -> float:
    """Run a command to its end; show what it said where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    begin = time.time()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return begin


@contextmanager
def nobody_warm() -> Iterator[dict[str, str]]:
    """Variables under which no warm server is found; at the end, wait for the one that came up to be gone."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield {"XDG_RUNTIME_DIR": folder}
        deadline = time.monotonic() + 30
        while any(Path(folder).rglob("*.sock")) and time.monotonic() < deadline:
            time.sleep(0.05)
