"""Runs a Dask scheduler, or many of its workers, in one process that ends with its stdin.

`python -m benchmarks.scale_workers` is a scheduler, and prints its address; `... tcp://host:port n` is `n` workers.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack

import dask
from distributed import Scheduler, Worker

from ddp_hydra.cluster.connect import QUIET


async def scheduler() -> None:
    """Serve as a scheduler."""
    async with Scheduler(host="127.0.0.1", dashboard_address="127.0.0.1:0") as served:
        print(served.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def workers(address: str, n: int) -> None:
    """Serve as `n` workers of one thread each."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with AsyncExitStack() as stack:
            here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "local_directory": folder}
            all_of_them = [Worker(address, nthreads=1, memory_limit=0, **here) for _ in range(n)]
            await asyncio.gather(*(stack.enter_async_context(worker) for worker in all_of_them))
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with dask.config.set(QUIET):
        asyncio.run(workers(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else scheduler())
