"""The command's part of a remote run: start a driver, and show its messages."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import ValidationError, convert
from msgspec.structs import asdict, replace
from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.config import checkpoint_config, objective, schema
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.console.text import printable, typed
from ddp_hydra.dispatch import workers
from ddp_hydra.errors import ClusterError, ConfigError, RecordError, RunFailed
from ddp_hydra.job import job_config, loggers
from ddp_hydra.job.remote import start_driver
from ddp_hydra.job.remote.start_driver import DriverSpec, liveness_watched, stop_topic
from ddp_hydra.job.remote.status import ENDED, LOST, STOP, conclude, read
from ddp_hydra.job.run_dir import hold, hydra_files, is_held, write_held
from ddp_hydra.job.summary import summarised
from ddp_hydra.rank import outbox
from ddp_hydra.record import Record, Start
from ddp_hydra.run_state import Status, Summary
from ddp_hydra.storage import Store, urls
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.handler import ResultsHandler
from ddp_hydra.writers.run_dir import FIELDS, STATUS, SUMMARY, StatusWriter, json_object

START_S = 120.0
"""How long a driver may take to start."""
END_S = 10.0
"""How long a driver may take to end after a second Ctrl-C."""

log = logging.getLogger(__name__)
Messages = queue.SimpleQueue[Any]


class StartedDriver(NamedTuple):
    """Identifies a driver: its job, the id of its client at the scheduler, and the worker that has started it."""

    spec: DriverSpec
    client: str
    worker: str


def run_remote_job(
    cfg: DictConfig, run_dir: Path, overrides: Sequence[str], rank_settings: dict[str, Any]
) -> float | None:
    """Run a job whose results go to `results.root`; the local run directory gets only a summary and the URL."""
    if cfg.detach:
        with started_driver(cfg, run_dir, overrides, rank_settings) as (_, driver):
            _print_commands("the run goes on by itself", driver.spec.url)
        return None
    messages: Messages = queue.SimpleQueue()
    with (
        summarised(run_dir, cfg) as summary,
        started_driver(cfg, run_dir, overrides, rank_settings, messages) as (client, driver),
    ):
        print(f"results: {driver.spec.url}")  # noqa: T201
        summary.results = driver.spec.url  # also where the end is not waited for
        message, end = Follower(client, driver, messages, run_dir, summary).follow()
        summary.update({**asdict(end), "results": driver.spec.url})
        conclude(end.status, message)
    return end.metrics.get(objective.metric_and_direction(cfg)[0])


@contextlib.contextmanager
def started_driver(
    cfg: DictConfig,
    run_dir: Path,
    overrides: Sequence[str],
    rank_settings: dict[str, Any],
    messages: Messages | None = None,
) -> Iterator[tuple[Any, StartedDriver]]:
    """Start a driver on the cluster of a config; without `messages`, which get its own, it outlives this command."""
    check(cfg)
    config = schema.resolved(cfg)
    packed = job_config.packed_project(cfg, config)
    url = urls.address(cfg.results.root, run_dir)
    is_resumed = bool(cfg.resume) and RunRef.named(cfg.resume).store().url == RunRef.own(url).store().url
    name = f"driver-{secrets.token_hex(6)}"
    with connect.connect(cfg.cluster, run_dir / "logs") as client:
        if messages is not None:
            client.subscribe_topic(name, lambda event: messages.put(event[1]))
        worker = _choose_worker(client)
        spec = DriverSpec(
            name=name,
            url=url,
            config=config,
            saved_config=checkpoint_config.stored_config(cfg),
            overrides=tuple(overrides),
            project=packed,
            hydra_files=hydra_files(run_dir),
            cwd=os.getcwd(),  # noqa: PTH109
            client=None if messages is None else client.id,
            sweep=connect.sweep(),
            logged=loggers.describe(cfg, run_dir, url),
            rank_settings=rank_settings,
            resume=_send_checkpoint(client, worker, name, cfg.resume),
            is_resumed=is_resumed,
            max_restarts=cfg.dispatch.max_restarts if cfg.detach else 0,
            expected=connect.expected_workers(cfg.cluster),
        )
        run_dir.mkdir(parents=True, exist_ok=True)
        pointer, before = run_dir / urls.POINTER, None
        if is_held(run_dir):
            hold(run_dir, {urls.POINTER: f"{url}\n".encode()})
        else:
            before = pointer.read_bytes() if pointer.exists() else None
            pointer.write_text(url + "\n")
        try:
            driver = _start(client, worker, spec)
        except ConfigError:  # nothing has started
            if before is not None:
                pointer.write_bytes(before)
            elif not is_held(run_dir):
                pointer.unlink()
            with contextlib.suppress(OSError):
                workers.WorkerCaller(client).call(worker, outbox.clear, name)
            raise
        except (ClusterError, KeyboardInterrupt):
            if cfg.detach:
                write_held(run_dir)
                _print_commands("the run may have started, and goes on by itself then", url)
            raise
        if cfg.detach:  # what becomes of it is not known here
            write_held(run_dir)
        yield client, driver
        if messages is not None and client.status == "running":
            client.unsubscribe_topic(name)


def _print_commands(what: str, url: str) -> None:
    run = shlex.quote(f"run={url}")
    print(f"{what}; results: {url}")  # noqa: T201
    print(f"look at it:  ddp-hydra attach {run}")  # noqa: T201
    print(f"end it:      ddp-hydra attach {run} stop=true")  # noqa: T201


def check(cfg: DictConfig) -> None:
    job_config.check(cfg)
    if connect.is_inline(cfg.cluster):
        raise ConfigError("results.handler=cluster needs a cluster, and cluster=inline is none: leave one of them out")
    stays = cfg.cluster.get("keep") or connect.is_remote(cfg.cluster)
    if cfg.detach and (connect.is_local(cfg.cluster) or not stays):
        raise ConfigError("detach=true needs a cluster that stays: give cluster=remote cluster.address=tcp://host:8786")


def _choose_worker(client: Any) -> str:
    workers = workers_of(client)
    running = [address for address, worker in workers.items() if worker.get("status", "running") == "running"]
    if not running:
        raise ClusterError("the cluster has no worker that runs, so there is no host for the run: bring up workers")
    return random.choice(running)  # noqa: S311


def _send_checkpoint(client: Any, worker: str, name: str, resume: str | None) -> str:
    """Send a checkpoint of this machine to the driver's host, and return its path there.

    A path that does not exist here is returned as it is, because it may exist there.
    """
    if not resume:
        return ""
    run = RunRef.named(resume)
    if run.is_stored or not Path(run.place).exists():
        return run.place
    path = find_checkpoint(run.place).absolute()
    try:
        return workers.send(workers.WorkerCaller(client), worker, name, 0, path)
    except OSError as error:
        raise ClusterError(f"the checkpoint {path} could not be sent to worker {worker}: {error}") from None


def _start(client: Any, worker: str, spec: DriverSpec) -> StartedDriver:
    try:
        answer = client.sync(client._run, start_driver.start, spec, workers=[worker], callback_timeout=START_S)[worker]
    except (OSError, TimeoutError, KeyError) as error:
        raise ClusterError(f"worker {worker} did not start the run: {str(error) or type(error).__name__}") from None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"worker {worker}: {error}: install the version of ddp-hydra there that this machine has"
        ) from None
    if "error" in answer:
        raise ConfigError(f"on worker {worker}: {printable(str(answer['error']))}")
    return StartedDriver(spec, str(answer["client"]), worker)


class Follower:
    """Shows a driver's messages, asks it to stop when the user presses Ctrl-C, and keeps a status.json for sweeps.

    `summary` is told where the job begins: it is written also where the end is not waited for.
    """

    def __init__(self, client: Any, driver: StartedDriver, messages: Messages, run_dir: Path, summary: Summary) -> None:
        from ddp_hydra.writers.progress import ProgressWriter

        self.client, self.driver, self.messages = client, driver, messages
        self.run_dir, self.summary = run_dir, summary
        self.handler = ResultsHandler([StatusWriter(run_dir), ProgressWriter()])
        self.interrupts = Interrupts()

    def follow(self) -> tuple[str, Summary]:
        watched = liveness_watched(self.client, self.driver.client, lambda: self.messages.put(None))
        with watched, self.interrupts.caught(), self.handler:
            try:
                with self.interrupts.deferred():
                    return self._receive_all()
            except KeyboardInterrupt:  # a second Ctrl-C: end at once
                self._ask_to_stop()
                return self._receive_all(until=time.monotonic() + END_S)

    def _ask_to_stop(self) -> None:
        self.client.log_event(stop_topic(self.driver.spec.name), b"stop")

    def _receive_all(self, until: float | None = None) -> tuple[str, Summary]:
        is_stopping = until is not None
        while until is None or time.monotonic() < until:
            if self.interrupts.wanted and not is_stopping:
                is_stopping = True
                self._ask_to_stop()
            try:
                message = self.messages.get(timeout=0.2)
            except queue.Empty:
                if self.client.status != "running":
                    raise ClusterError(
                        f"the connection to the scheduler is lost: go on with {typed('resume', self.driver.spec.url)}"
                    ) from None
                continue
            if message is None:
                again = typed("resume", self.driver.spec.url)
                raise ClusterError(f"the run's driver, of {self.driver.worker}, is gone: go on with {again}")
            if (end := self._handle(message)) is not None:
                return end
        raise KeyboardInterrupt(f"the end of the run was not waited for; see {self.driver.spec.url}")

    def _handle(self, message: Any) -> tuple[str, Summary] | None:
        try:
            if "record" in message:
                record = Record.decode(message["record"])
                if isinstance(record.data, Start):
                    self.summary.from_step = record.step or 0
                    write_held(self.run_dir)
                self.handler.handle(record)
            elif "line" in message:
                log.log(int(message["level"]), "%s", printable(str(message["line"])))
            else:
                return printable(str(message["message"])), msgspec.convert(message["summary"], Summary)
        except (KeyError, TypeError, ValueError, RecordError) as error:
            log.warning("a message of the driver cannot be read: %.200r (%s)", message, error)
        return None


POLL_S = 1.0
METRICS = "metrics.jsonl"
TAIL_BYTES = 128 * 1024
"""How much of the metrics is read each time."""
RESTART_FACTOR = 4
"""A driver that is restarted when lost may be silent this many times as long."""


class Attached:
    """Follows one run; a driver that has not updated its status for `lost_timeout_s` is considered lost."""

    def __init__(self, store: Store, lost_timeout_s: float) -> None:
        from ddp_hydra.writers.progress import ProgressWriter

        self.store, self.lost_timeout_s = store, lost_timeout_s
        self.handler = ResultsHandler([ProgressWriter(restarts=True)])
        self.status = Status()
        self.updated = self.looked = time.monotonic()
        self.size, self.attempt = 0, -1
        self.newest: tuple[float, ...] = (-1.0, 0.0)  # attempt and time of what was read

    def begin(self) -> None:
        found = read(self.store)
        if found is None:
            raise ConfigError(f"there is no run of results.handler=cluster in {self.store.url}: it has no {STATUS}")
        self.status = found
        if found.state == "starting":
            log.info("the run is starting, or waits for workers")

    def stop(self) -> None:
        if self.status.state not in ENDED:
            self.store.put(STOP, b"stop\n")
            log.info("the run is asked to save a checkpoint and to end")

    def follow(self) -> None:
        with self.handler:
            while True:
                has_ended = self.store.size_or_none(SUMMARY) is not None
                self.read_status()
                self.show_metrics()
                if has_ended:
                    break
                self.check_driver()
                time.sleep(POLL_S)
        conclude(self.status.state, printable(self.status.message))

    def check_driver(self) -> None:
        """Raise if the driver is silent for too long; that is longer if the scheduler restarts it when it is lost."""
        timeout_s = self.lost_timeout_s * (RESTART_FACTOR if self.status.max_restarts else 1)
        if self.looked - self.updated <= timeout_s:
            return
        again = typed("resume", self.store.url)
        if self.status.state == LOST:
            raise RunFailed(printable(f"{self.status.message}\nno other driver has followed; {again} goes on"))
        silent = f"process {self.status.pid} on {self.status.host}, has not updated its status for {timeout_s:g} s"
        raise RunFailed(printable(f"the run's driver, {silent}: go on with {again}"))

    def read_status(self) -> None:
        status = read(self.store)
        self.looked = time.monotonic()  # from now on nothing is known of the driver
        if status is not None and status.time != self.status.time:
            self.updated = self.looked
            self.status = status

    def show_metrics(self) -> None:
        """Show the metrics of rank 0 that are new; the first time, the last validation and what came last.

        Where a run starts again, or another one begins in its folder, the file loses lines. So its tail is read each
        time, and a line is new by its attempt and time.
        """
        size = self.store.size_or_none(METRICS) or 0
        if size == self.size or self.status.start is None:
            return
        is_first, self.size = not self.size, size
        content: bytes = self.store.get_range(METRICS, max(0, size - TAIL_BYTES), size)
        lines = [line for line in map(json_object, content.split(b"\n")[:-1]) if line and not line.get("rank")]
        lines = [line for line in lines if any(new > old for new, old in zip(_when(line), self.newest, strict=True))]
        for line in lines:
            self.newest = tuple(map(max, self.newest, _when(line)))
        if is_first and lines:
            self.show_start(step=lines[-1].get("step"))
            validated = [line for line in lines[:-1] if any(name.startswith("val/") for name in line)]
            lines = [*validated[-1:], lines[-1]]
        for line in lines:
            self.show_line(line)

    def show_start(self, step: Any = None) -> None:
        if (start := self.status.start) is not None:
            self.attempt = start.attempt
            self.handler.handle(replace(start, rank=0))
            if isinstance(step, int):  # the time that is left is estimated from there
                self.handler.handle(replace(start, rank=0, step=step))

    def show_line(self, line: dict[str, Any]) -> None:
        values = {name: value for name, value in line.items() if name not in FIELDS and isinstance(value, int | float)}
        data = {"kind": "metrics", "metrics": values, "epoch": line.get("epoch"), "samples": line.get("samples")}
        attempt = line.get("attempt") or 0
        if attempt != self.attempt and self.status.start is not None and self.status.start.attempt == attempt:
            self.show_start()
        content = {"data": data, "rank": line.get("rank") or 0, "step": line.get("step"), "attempt": attempt}
        try:
            self.handler.handle(convert(content, Record))
        except (ValidationError, RecordError) as error:
            log.warning("%s", printable(str(error)))


def _when(line: dict[str, Any]) -> tuple[float, ...]:
    return tuple(value if isinstance(value := line.get(name), int | float) else 0.0 for name in ("attempt", "time"))
