"""Starts a driver. This runs on a worker, called by the client."""

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
from ddp_hydra.job.remote.job_spec import JobSpec, Place
from ddp_hydra.rank.fork_client import without_dasks_limits

SAID_BYTES = 2000


async def start(order: JobSpec, dask_worker: Any = None) -> dict[str, Any]:
    """Start a driver, and wait until it has begun.

    The driver outlives this worker, which Dask may restart at any time, but not the scheduler.

    Args:
        order: what it shall do.
        dask_worker: given by Dask.

    Returns:
        `error`, a sentence; or `client`, its id at the scheduler, and its `pid`.
    """
    scratch = str(Path(dask_worker.local_directory).parent)
    place = Place(dask_worker.scheduler.address, dask_worker.security, scratch)
    return await asyncio.to_thread(_start, pickle.dumps((order, place)))


def _start(order: bytes) -> dict[str, Any]:
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
    threading.Thread(target=process.wait, daemon=True, name=f"driver {process.pid}").start()  # no zombie of it stays
    with process.stdout, process.stderr:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(order)
        answer = process.stdout.readline()
        said = b"" if answer else process.stderr.read()[-SAID_BYTES:]
    try:
        return dict(json.loads(answer))
    except ValueError:
        return {"error": f"the driver could not be started: {said.decode(errors='replace').strip()}"}
