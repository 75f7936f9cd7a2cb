"""Start a driver's process. This runs on a worker, called by the client or the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ddp_hydra
from ddp_hydra.job.remote.job_spec import DriverContext, JobSpec
from ddp_hydra.rank.fork_environment import without_dasks_limits

STDERR_BYTES = 2000
"""How much of stderr an error message contains."""


async def start(spec: JobSpec, dask_worker: Any = None) -> dict[str, Any]:
    """Start a driver, and wait until it answers.

    The driver outlives this worker, which Dask may restart at any time, but not the scheduler.

    Args:
        spec: the job.
        dask_worker: given by Dask.

    Returns:
        `error`, a message; or `client`, the id of its client at the scheduler, and its `pid`.
    """
    scratch = str(Path(dask_worker.local_directory).parent)
    context = DriverContext(dask_worker.scheduler.address, dask_worker.security, scratch)
    return await asyncio.to_thread(_start, pickle.dumps((spec, context)))


def _start(pickled: bytes) -> dict[str, Any]:
    environment = without_dasks_limits(os.environ)
    path = [str(Path(ddp_hydra.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_hydra.job.remote.driver"],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # The thread waits for the process, so that it does not stay as a zombie.
    threading.Thread(target=process.wait, daemon=True, name=f"driver {process.pid}").start()
    with process.stdout, process.stderr:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickled)
        answer = process.stdout.readline()
        errors = b"" if answer else process.stderr.read()[-STDERR_BYTES:]
    try:
        return dict(json.loads(answer))
    except ValueError:
        return {"error": f"the driver could not be started: {errors.decode(errors='replace').strip()}"}
