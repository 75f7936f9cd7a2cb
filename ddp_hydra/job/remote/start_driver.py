"""Starts the driver of a remote run on a worker, and another when it is lost; carries what it and its command say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distributed import fire_and_forget, get_worker, secede
from distributed.protocol.pickle import dumps

from ddp_hydra.cluster import scheduler_plugin
from ddp_hydra.cluster.connection import BySource
from ddp_hydra.config.project import Project
from ddp_hydra.errors import ConfigError, RunFailed
from ddp_hydra.job.loggers import LoggedJob
from ddp_hydra.job.remote.uploader import is_lost
from ddp_hydra.rank import outbox
from ddp_hydra.rank.environment import of_job, with_package, without_dasks_limits
from ddp_hydra.rank.task import PickledCall
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.storage import urls

STDERR_BYTES = 2000
"""How much of stderr an error message contains."""
TRIES = 10
PAUSE_S = 5.0
"""How often a driver is tried to be started, and the seconds between."""
ANSWER_S = 5.0
"""Seconds that a scheduler may take to answer."""
POLL_S = 0.5
GONE_S = 3.0
"""A client that is not connected to the scheduler for so long is gone."""


@dataclass(frozen=True)
class DriverSpec:
    """Describes a job to a driver. It is sent through Dask and a pipe, and never written to a disk.

    Args:
        name: of the driver, which is also the topic of its messages.
        saved_config: the config as checkpoints contain it.
        client: the id of the command's client at the scheduler; None: the run goes on without the command.
        sweep: the sweep that workers are reserved for.
        resume: the checkpoint to resume from, as the worker finds it; "" for none.
        is_resumed: it resumes the run that has left its results there.
        max_restarts: how many more drivers may follow, each when the one before is lost.
        is_restart: whether another driver has run this job before.
        rank_settings: what Hydra's part of the config says of the ranks.
        expected: how many workers the command has waited for; None: no number was asked for.
    """

    name: str
    url: str
    config: dict[str, Any]
    saved_config: dict[str, Any]
    overrides: tuple[str, ...]
    project: Project
    hydra_files: dict[str, bytes]
    cwd: str
    client: str | None
    sweep: str
    logged: LoggedJob
    resume: str = ""
    is_resumed: bool = False
    max_restarts: int = 0
    is_restart: bool = False
    rank_settings: dict[str, Any] = field(default_factory=dict)
    expected: int | None = None


async def start(spec: DriverSpec, dask_worker: Any = None) -> dict[str, Any]:
    """Start a driver, and wait until it answers. Runs on a worker, called by the client.

    It is no task: all slots may be taken by ranks. The driver outlives this worker, which Dask may restart at any time.
    The answer has `error`, a message, or `client`, the id of its client at the scheduler.
    """
    return await asyncio.to_thread(_start, spec, dask_worker)


def _start(spec: DriverSpec, worker: Any) -> dict[str, Any]:
    try:
        outbox.secure(worker.local_directory)  # the driver works next to it, and imports code from there
    except ConfigError as error:
        return {"error": str(error)}
    place = worker.scheduler.address, worker.security, str(Path(worker.local_directory).parent)
    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_hydra.job.remote.driver"],
        env=with_package(without_dasks_limits(os.environ)) | of_job(spec.rank_settings.get("variables") or {}),
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
            pickle.dump((spec, *place), process.stdin)
        answer = process.stdout.readline()
        errors = b"" if answer else process.stderr.read()[-STDERR_BYTES:]
    try:
        return dict(json.loads(answer))
    except ValueError:
        return {"error": f"the driver could not be started: {errors.decode(errors='replace').strip()}"}


def submit_guard(client: Any, spec: DriverSpec) -> Any:
    """Have a worker start another driver if this one, whose client is given, is lost. The task outlives the client."""
    next_spec = replace(spec, max_restarts=spec.max_restarts - 1, is_restart=True)
    call = pickle.dumps(PickledCall(guard, (next_spec, client.id)))
    key = f"{spec.name}-guard-{secrets.token_hex(4)}"
    future = client.submit(pickle.loads, call, key=key, pure=False, retries=TRIES)
    fire_and_forget(future)
    return future


def guard(spec: DriverSpec, driver: str) -> None:
    """Start a driver once the one before is lost. A task: Dask runs it on another worker when its own is lost."""
    secede()  # the slot is for ranks
    worker = get_worker()
    try:
        silence_s = spec.config["dispatch"]["lost_timeout_s"]
        if is_lost(urls.open_folder(spec.url), partial(_is_connected, worker, driver, silence_s)):
            answer = _start(spec, worker)
            if "error" in answer:
                raise RunFailed(f"the driver of {spec.url} is lost, and another can't be started: {answer['error']}")
    except Exception:
        time.sleep(PAUSE_S)  # before Dask tries again
        raise


def _is_connected(worker: Any, client: str, silence_s: float) -> bool:
    """Ask a worker's scheduler whether it hears of a client; True where it doesn't answer."""
    function, args = dumps(BySource(scheduler_plugin.is_connected)), dumps((client, silence_s))
    call = worker.scheduler.run_function(function=function, args=args, kwargs=dumps({}))
    try:
        answer = asyncio.run_coroutine_threadsafe(call, worker.loop.asyncio_loop).result(ANSWER_S)
    except (OSError, TimeoutError):
        return True
    return bool(answer.get("result", True))


def stop_topic(driver: str) -> str:
    return f"{driver}-stop"


class EventChannel(logging.Handler):
    """Sends the driver's records and log lines to the command. It is a writer and a logging handler."""

    def __init__(self, client: Any, driver: str) -> None:
        super().__init__(logging.INFO)
        self._client, self._topic = client, driver

    def send(self, **message: Any) -> None:
        if self._client.status == "running":
            self._client.log_event(self._topic, message)

    def write(self, record: Record) -> None:
        if record.rank == 0 and isinstance(record.data, Start | Metrics):
            self.send(record=record.encode())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.send(line=record.getMessage(), level=record.levelno)
        except Exception:
            self.handleError(record)  # as every handler does: a message that can't be made stops nobody

    def delete_topics(self) -> None:
        if self._client.status == "running":
            topics = [self._topic, stop_topic(self._topic)]
            self._client.run_on_scheduler(BySource(scheduler_plugin.delete_topics), topics)


@contextlib.contextmanager
def liveness_watched(client: Any, other: str, on_gone: Callable[[], None]) -> Iterator[None]:
    """Watch whether another client is connected to the scheduler; `on_gone` is called in a thread, once it isn't."""
    end = threading.Event()

    def watch() -> None:
        seen = time.monotonic()
        while not end.wait(POLL_S):
            try:
                is_there = client.run_on_scheduler(BySource(scheduler_plugin.is_connected), other)
            except Exception:  # the scheduler does not answer; the job itself notices its loss
                is_there = True
            now = time.monotonic()
            if is_there:
                seen = now
            elif now - seen > GONE_S:
                on_gone()
                return

    thread = threading.Thread(target=watch, name="liveness watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
