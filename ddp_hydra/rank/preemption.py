"""A worker that is shut down lets its ranks finish first.

SIGTERM comes before a machine is taken away (a spot instance, a drained node, the end of a batch job): to the nanny,
which closes its worker, or to every process of the host. Dask closes a worker's plugins before its connections, so that
is the time to have the gang make a checkpoint and to let it travel home.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import Any
from urllib.parse import urlsplit

from distributed import Worker, WorkerPlugin

from ddp_hydra.rank import inbox, outbox

NAME = "ddp_hydra-farewell"
GRACE_S = 7.0
"""`dask worker` waits 8 s for its workers to close, then kills them."""
SEND_S = 0.5


class Farewell(WorkerPlugin):
    """Holds up the closing of a worker until its ranks have ended and their files are fetched.

    Where the worker has lost its scheduler, nobody would fetch them: the ranks end at once.
    """

    async def teardown(self, worker: Worker) -> None:
        """Called by Dask when the worker closes."""
        stream = worker.batched_stream
        if stream is not None and not stream.closed():
            deadline = time.monotonic() + GRACE_S
            told = inbox.tell_all({"preempted": True})
            while told and time.monotonic() < deadline and (inbox.has_any(told) or outbox.waiting(worker)):
                await asyncio.sleep(0.05)
            if told:
                await _sent(stream, until=time.monotonic() + SEND_S)
        inbox.tell_all({"stop": True})  # Dask would wait for their tasks for half a minute


async def _sent(stream: Any, until: float) -> None:
    """Wait until the last words of the ranks are on their way: a worker that is killed takes along what is not."""
    await asyncio.sleep(0.01)  # what another thread has said is handed to the stream by this loop
    while (stream.buffer or stream.next_deadline) and not stream.closed() and time.monotonic() < until:
        await asyncio.sleep(0.01)


def prepare(worker: Worker) -> None:
    """Make a worker say farewell; called from the thread of a task."""
    worker.loop.add_callback(_prepare, worker)


async def _prepare(worker: Worker) -> None:
    if NAME in worker.plugins:
        return
    await worker.plugin_add(plugin=Farewell(), name=NAME)
    if urlsplit(worker.scheduler.address).hostname in ("127.0.0.1", "::1"):
        logging.getLogger("distributed.worker").addFilter(is_news)
    # Under a nanny, SIGTERM would end the worker where it stands. Handlers of others are left alone.
    if worker.nanny and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(_die_slowly(worker)))


def is_news(record: logging.LogRecord) -> bool:
    """Whether a worker shall say it: not that a heartbeat got lost, for its scheduler ends with the command."""
    return "Failed to communicate with scheduler during heartbeat" not in str(record.msg)


async def _die_slowly(worker: Worker) -> None:
    await Farewell().teardown(worker)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
