"""Runs the loggers of a job, each in a process of its own, and keeps the ids of their runs for a resume."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_hydra.config import project
from ddp_hydra.config import validate as config
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.job.run_dir import is_resumed
from ddp_hydra.rank.environment import with_package
from ddp_hydra.rank.processes import kill_group
from ddp_hydra.record import Record
from ddp_hydra.storage.files import write_atomic
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.loggers import FAILED, FINISHED, KILLED, Answer, Order, RunInfo

RUNS = "loggers.json"
"""The file of a run directory with the runs at the services: {"mlflow": {"id": …, "url": …}}."""
AWAY_S = 3.0
"""How long the end of a job waits for a logger after its service did not answer."""
AWAY_POLL_S = 0.1
"""How often the end of a job looks whether a service is away."""
KILLED_S = 10.0
"""How long the end of a job waits after Ctrl-C, so that the services learn of it; a second Ctrl-C ends the wait."""
NOTICE_S = 2.0
"""How long the end of a job waits for loggers before it says so."""
JOIN_S = 5.0
MAX_RECORDS, MAX_BYTES = 20_000, 64 * 2**20
"""What waits for a logger; beyond it, the oldest records are dropped."""
KINDS = ("start", "metrics", "text", "image", "file", "log")
"""Kinds of records that loggers get."""

log = logging.getLogger(__name__)


class RecordBuffer(queue.Queue[bytes | str | None]):
    """Holds messages for one reader, up to a limit; then the oldest are dropped. `put` never waits; None ends it."""

    def __init__(self, max_messages: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self.max_messages, self.max_bytes = max_messages, max_bytes
        self.dropped = self._bytes = 0

    def _put(self, item: bytes | str | None) -> None:
        self.queue.append(item)
        self._bytes += len(item or b"")
        while len(self.queue) > self.max_messages or self._bytes > self.max_bytes:
            self._get()
            self.dropped += 1

    def _get(self) -> bytes | str | None:
        item = self.queue.popleft()
        self._bytes -= len(item or b"")
        return item


class LoggerProcess:
    """Runs a logger in a process of its own. It is a writer, none of whose methods fails or waits.

    `on_run` is called in another thread with the run's `id` and `url` at the service.
    """

    def __init__(
        self,
        name: str,
        order: Order,
        log_file: Path,
        on_run: Callable[[dict[str, str]], None],
        buffer: RecordBuffer | None = None,
    ) -> None:
        self.name, self.order, self.on_run, self.log_file = name, order, on_run, log_file
        self.buffer = buffer or RecordBuffer()
        self.has_failed = self.has_refused = False
        self.away_since: float | None = None
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._connection, its_end = Pipe()
        with log_file.open("ab") as output, its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddp_hydra.writers.loggers.process", str(its_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[its_end.fileno()],
                env=with_package(os.environ),
                start_new_session=True,  # a Ctrl-C in the terminal is for the job
            )
        self._threads = [
            threading.Thread(target=work, name=f"{name} {work.__name__}", daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def write(self, record: Record) -> None:
        if record.kind in KINDS and not self.has_failed:
            self.buffer.put(record.encode())

    def close(self) -> None:
        """Do nothing: the end of the records is not the end of the job; see `finish`."""

    def finish(self, status: str) -> None:
        self.buffer.put(status)
        self.buffer.put(None)

    def has_ended(self, until: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        return self.process.returncode is not None

    def wait(self, until: float) -> str:
        """Wait for the process until a time, and end it then; return why records are missing at the service."""
        try:
            is_late = not self.has_ended(until)
        finally:
            self.kill()
        if self.has_failed:
            return ""  # has been said
        if is_late:
            return "it had not taken everything when the job ended"
        if self.process.returncode and not self.has_refused:
            return f"its process ended with {self.process.returncode}"
        dropped = self.buffer.dropped
        return f"it was too slow, and {dropped} records were left out" if dropped else ""

    def kill(self) -> None:
        if self.process.poll() != 0:
            kill_group(self.process.pid)
            self.process.wait()
        self.buffer.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
        with contextlib.suppress(OSError):
            if self.log_file.stat().st_size == 0:
                self.log_file.unlink()

    def _send(self) -> None:
        """Give the process its messages; it blocks while the process is busy."""
        message: Order | bytes | str | None = self.order
        with contextlib.suppress(OSError):
            while message is not None:
                self._connection.send(message)
                message = self.buffer.get()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError), self._connection:
            while True:
                self._on_answer(self._connection.recv())

    def _on_answer(self, answer: Answer) -> None:
        reason = f"({answer.message}): the job goes on"
        match answer.kind:
            case "run" if answer.run is not None:
                self.on_run({"id": answer.run.id, "url": answer.run.url})
                for line in filter(None, (answer.run.url, answer.run.note)):
                    log.info("%s: %s", self.name, line)
            case "away":
                self.away_since = time.monotonic()
                log.warning("%s does not answer %s, and its records wait. %s", self.name, reason, answer.advice)
            case "back":
                self.away_since = None
                log.warning("%s answers again", self.name)
            case "warning":
                self.has_refused = True
                log.warning("%s did not take a record %s. See %s", self.name, reason, self.log_file)
            case "error":
                self.has_failed = True
                log.warning("%s gets no records %s. %s", self.name, reason, answer.advice)


@dataclass(frozen=True)
class LoggedJob:
    """Holds what loggers need to know of a job. It travels to a driver, so it has no paths.

    `earlier` are the runs at the services that it continues, as in `RUNS`.
    """

    name: str
    sweep: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, dict[str, str]] = field(default_factory=dict)


def describe(cfg: DictConfig, run_dir: Path, url: str = "") -> LoggedJob:
    """Describe a job to its loggers, where the command was typed. `url` is the place of results that go to a store."""
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    sweep = Path(str(HydraConfig.get().sweep.dir)) if is_sweep else None
    # Several jobs of a sweep may resume from one run; they are runs of their own.
    continues = cfg.resume and not cfg.results.new_logger_runs and (not is_sweep or is_resumed(run_dir, cfg.resume))
    earlier = read_runs(cfg.resume) if continues and cfg.results.loggers else {}
    name = short_name(url or str(run_dir.absolute()), 3 if is_sweep else 2)
    parameters = config.logged_parameters(cfg) if cfg.results.loggers else {}
    return LoggedJob(name, short_name(str(sweep.absolute())) if sweep else "", parameters, earlier)


def short_name(path: str, parts: int = 2) -> str:
    """Return the end of a path or a URL: "2026-08-01/12-00-00-123456"."""
    found = [part for part in PurePosixPath(path).parts[-parts:] if part not in ("/", "outputs", "multirun")]
    return "/".join(found)


def read_runs(resume: str) -> dict[str, dict[str, str]]:
    """Return the runs at the services of the run that `resume` names; {} if it has none that can be read."""
    try:
        return msgspec.json.decode(RunRef.named(resume).read(RUNS, timeout_s=10), type=dict[str, dict[str, str]])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, ConfigError) as error:
        log.warning("%s of %s cannot be read (%s): the loggers begin new runs", RUNS, resume, error)
        return {}


def save_runs(run_dir: Path, runs: Mapping[str, dict[str, str]]) -> None:
    try:
        write_atomic(run_dir / RUNS, (json.dumps(runs, indent=2) + "\n").encode())
    except RecordError as error:
        log.warning("a resumed job will begin new runs at its loggers: %s", error)


@contextmanager
def session(
    cfg: DictConfig, run_dir: Path, job: LoggedJob, packed: project.Project | None = None
) -> Iterator[list[LoggerProcess]]:
    """Run the loggers of a job inside the block, and tell them at its end how the job ended."""
    nodes = config.logger_nodes(cfg)
    if not nodes:
        yield []
        return
    config.check_loggers_installed(cfg)
    runs, lock = dict(job.earlier), threading.Lock()
    if packed is not None:  # a driver sees more: paths of its host, and the runs of the driver that it follows
        is_new = not cfg.resume or job.earlier or job.sweep or cfg.results.new_logger_runs
        runs |= ({} if is_new else read_runs(cfg.resume)) | read_runs(str(run_dir))
    if runs:
        save_runs(run_dir, runs)

    def note(name: str, run: dict[str, str]) -> None:
        with lock:
            runs[name] = run
            save_runs(run_dir, runs)

    senders: list[LoggerProcess] = []
    status = FAILED
    try:
        for name, node in nodes.items():
            roots: tuple[Path, ...] = ()
            if str(node["_target_"]).split(".")[0] in project.PACKAGES:
                roots = (packed.unpack(run_dir / ".project"),) if packed else project.layers()
            earlier = runs.get(name, {}).get("id", "")
            info = RunInfo(job.name, run_dir.absolute(), list(cfg.tags), job.sweep, job.params, earlier)
            order = Order(node, info, tuple(root.absolute() for root in roots), cfg.results.loggers_timeout_s)
            senders.append(LoggerProcess(name, order, run_dir / "logs" / f"{name}.log", partial(note, name)))
        yield senders
        status = FINISHED
    except KeyboardInterrupt:
        status = KILLED
        raise
    finally:
        end(senders, status, cfg.results.loggers_timeout_s)


def end(senders: list[LoggerProcess], status: str, timeout_s: float) -> None:
    """Tell all loggers how the job ended, and wait a limited time for all together; one Ctrl-C ends the wait."""
    began = time.monotonic()
    most_s = min(timeout_s, KILLED_S) if status == KILLED else timeout_s

    def limit(sender: LoggerProcess) -> float:
        away = sender.away_since
        return began + (most_s if away is None else min(most_s, max(0.0, away - began) + AWAY_S))

    for sender in senders:
        sender.finish(status)
    try:
        for sender in senders:
            limit_s = limit(sender) - began
            if limit_s > NOTICE_S and not sender.has_ended(began + NOTICE_S):
                log.info("waiting up to %g s for %s to send what it has; Ctrl-C ends that", limit_s, sender.name)
            # A library may take long until it knows that its service is away.
            while time.monotonic() < limit(sender) and not sender.has_ended(time.monotonic() + AWAY_POLL_S):
                pass
            if missing := sender.wait(limit(sender)):
                log.warning(
                    "%s lacks records of this job: %s. More time is given with results.loggers_timeout_s",
                    sender.name,
                    missing,
                )
    finally:
        for sender in senders:
            with contextlib.suppress(Exception):
                sender.kill()
