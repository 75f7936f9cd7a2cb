"""Lets ranks finish when their worker is shut down.

Before a machine is taken away (a spot instance, a drained node, the end of a batch job), SIGTERM is sent to the nanny,
which closes its worker, or to every process of the host. Dask closes a worker's plugins before its connections. In that
time the gang writes a checkpoint and the client fetches it.
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

NAME = "ddp_hydra-preemption"
GRACE_S = 7.0
"""Seconds that ranks may take to finish. `dask worker` kills workers that have not closed after 8 s."""
SEND_S = 0.5
"""Seconds that the last records may take to be sent."""


class PreemptionPlugin(WorkerPlugin):
    """Delays the closing of a worker until its ranks have ended and their files are fetched.

    If the worker has lost its scheduler, nobody would fetch the files, so the ranks end at once.
    """

    async def teardown(self, worker: Worker) -> None:
        """Wait for the ranks; called by Dask when the worker closes."""
        stream = worker.batched_stream
        if stream is not None and not stream.closed():
            deadline = time.monotonic() + GRACE_S
            tasks = inbox.send_to_worker(worker.address, {"preempted": True})
            while tasks and time.monotonic() < deadline and (inbox.has_any(tasks) or outbox.has_files(worker)):
                await asyncio.sleep(0.05)
            if tasks:
                await _wait_until_sent(stream, until=time.monotonic() + SEND_S)
        inbox.send_to_worker(worker.address, {"stop": True})  # Dask would wait half a minute for their tasks


async def _wait_until_sent(stream: Any, until: float) -> None:
    """Wait until the last records of the ranks are sent: a worker that is killed loses the others."""
    await asyncio.sleep(0.01)  # this loop hands the records of other threads to the stream
    while (stream.buffer or stream.next_deadline) and not stream.closed() and time.monotonic() < until:
        await asyncio.sleep(0.01)


def prepare(worker: Worker) -> None:
    """Install the plugin on a worker; called from the thread of a task."""
    worker.loop.add_callback(_prepare, worker)


async def _prepare(worker: Worker) -> None:
    if NAME in worker.plugins:
        return
    await worker.plugin_add(plugin=PreemptionPlugin(), name=NAME)
    if urlsplit(worker.scheduler.address).hostname in ("127.0.0.1", "::1"):
        for name in ("distributed.worker", "distributed.worker.state_machine"):
            logging.getLogger(name).addFilter(is_worth_logging)
    # Under a nanny, SIGTERM would end the worker at once. Other programs' handlers are left alone.
    if worker.nanny and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(_finish_and_die(worker)))


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop messages about lost heartbeats and cancelled tasks: a local cluster ends with the command."""
    return not any(words in str(record.msg) for words in ("scheduler during heartbeat", "Async instruction for"))


async def _finish_and_die(worker: Worker) -> None:
    await PreemptionPlugin().teardown(worker)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
