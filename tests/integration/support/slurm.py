"""`sbatch`, `squeue` and `scancel` that run batch jobs as processes of this machine: `python slurm.py sbatch <script>`.

What runs is a file each in $SLURM_STANDIN: <job id> holds the process id. Where there is a file `full`, jobs stay
pending; where there is one called `refuses`, sbatch says what is in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "squeue", "scancel")
PENDING = "0"


def sbatch(folder: Path, script: str) -> None:
    if (folder / "refuses").exists():
        sys.exit((folder / "refuses").read_text())
    for job in itertools.count(100):  # several may be submitted at once
        copy = folder / f"{job}.sh"  # the caller removes his
        with contextlib.suppress(FileExistsError), copy.open("x") as file:
            file.write(Path(script).read_text())
            break
    if (folder / "full").exists():
        (folder / str(job)).write_text(PENDING)
    else:
        with (folder / f"{job}.log").open("w") as log:
            out = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            process = subprocess.Popen(["bash", str(copy)], env={**os.environ, "SLURM_JOB_ID": str(job)}, **out)
        (folder / str(job)).write_text(str(process.pid))
    print(f"Submitted batch job {job}")


def squeue(folder: Path, *options: str) -> None:
    """List jobs, for `--noheader --jobs=1,2 --format=%i %T %R`."""
    (wanted,) = (option.partition("=")[2].split(",") for option in options if option.startswith("--jobs="))
    assert "--format=%i %T %R" in options, options
    for job in wanted:
        if not (folder / job).exists():
            continue
        pid = (folder / job).read_text()
        if pid == PENDING:
            print(f"{job} PENDING (Resources)")
        elif alive(int(pid)):
            print(f"{job} RUNNING node1")


def scancel(folder: Path, *jobs: str) -> None:
    """End jobs: kindly, then by force."""
    for job in jobs:
        pid = (folder / job).read_text()
        (folder / job).unlink()
        if pid != PENDING:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGTERM)
            deadline = time.monotonic() + 10
            while alive(int(pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)


def alive(pid: int) -> bool:
    import psutil  # only here: the client waits but some seconds for the other answers

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def running(folder: Path) -> list[str]:
    jobs = [path for path in folder.iterdir() if path.name.isdigit()]
    return [job.name for job in jobs if (pid := job.read_text()) != PENDING and alive(int(pid))]


def install(folder: Path) -> None:
    for command in COMMANDS:
        path = folder / command
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {command} "$@"\n')
        path.chmod(0o755)


if __name__ == "__main__":
    {"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[sys.argv[1]](
        Path(os.environ["SLURM_STANDIN"]), *sys.argv[2:]
    )
