"""`python -m ddp_hydra.job.remote.driver`: run a job without its command, on the host of a worker.

The job comes through stdin. One line of JSON on stdout says that the driver has started, or why it cannot. What is
printed or logged afterwards goes to logs/driver.log among the results.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
from distributed.scheduler import KilledWorker
from msgspec import to_builtins
from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler, diagnose, load
from ddp_hydra.config.hydra_compat import config_of
from ddp_hydra.errors import ClusterError, DdpHydraError, SchedulerLost
from ddp_hydra.job.remote.start_driver import DriverSpec, EventChannel, liveness_watched, stop_topic, submit_guard
from ddp_hydra.job.remote.status import HEARTBEAT_S, LOST, STOP, DriverStatus, FencedStore
from ddp_hydra.job.remote.uploader import AlreadyEnded, Uploader, acquire_run, resume_run
from ddp_hydra.job.run_dir import HYDRA, hold, write_held
from ddp_hydra.run_state import FailureEntry, Objective, Summary
from ddp_hydra.storage import urls
from ddp_hydra.storage.files import scratch_folder
from ddp_hydra.writers.handler import Writer
from ddp_hydra.writers.run_dir import STATUS, encode_status, read_summary

log = logging.getLogger(__name__)
SCRATCH = "ddp_hydra-run-"


def main() -> None:
    from setproctitle import setproctitle

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    load()
    # from the worker that has started this process
    spec, address, security, scratch_root = pickle.load(sys.stdin.buffer)  # noqa: S301
    setproctitle(f"ddp_hydra driver {spec.url}")
    scheduler = Scheduler(address, _client_security(security), spec.sweep, expected=spec.expected)
    try:
        with open_runner(spec, scheduler, scratch_root) as runner:
            if spec.max_restarts:
                runner.guard()
            answer(client=runner.client.id)
            runner.run()
            if runner.state == LOST:
                runner.await_scheduler(scheduler)
    except AlreadyEnded:
        answer(client="")
    except (DdpHydraError, OSError) as error:
        answer(error=str(error))


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)  # noqa: T201


@contextlib.contextmanager
def open_runner(spec: DriverSpec, scheduler: Scheduler, scratch_root: str) -> Iterator[RemoteJobRunner]:
    """Acquire the store, a temporary folder and a client, and give back the last two at the end of the block."""
    objective = msgspec.convert(spec.config["objective"], Objective)
    more = {"objective": objective, "tags": [str(tag) for tag in spec.config["tags"]]}
    status = DriverStatus(scheduler.address, spec.project.sha256, spec.max_restarts, **more)
    store = FencedStore(urls.open_folder(spec.url))
    with scratch_folder(SCRATCH, scratch_root) as scratch, scheduler.client() as client:
        connect.use_existing(replace(scheduler, connected=client))  # one client: if it's gone, so is the gang
        runner = RemoteJobRunner(spec, scratch, store, status, client)
        if spec.is_restart:
            runner.take_over()
        else:
            own_dir = runner.run_dir if spec.is_resumed else None
            acquire_run(store, status, spec.hydra_files, bool(spec.sweep) or spec.is_resumed, own_dir)
        yield runner


class RemoteJobRunner:
    """Runs one job in a temporary folder and uploads its results."""

    def __init__(self, spec: DriverSpec, scratch: Path, store: FencedStore, status: DriverStatus, client: Any) -> None:
        self.spec, self.scratch, self.store, self.status, self.client = spec, scratch, store, status, client
        self.run_dir = scratch / "run"
        self.run_dir.mkdir()
        self.state = "running"
        self.channel = EventChannel(client, spec.name) if spec.client else None

    @cached_property
    def uploader(self) -> Uploader:
        """Return the uploader, which begins with the files and checkpoints of the driver before, once they are here."""
        return Uploader(self.run_dir, self.store, self.status, interrupt)

    def take_over(self) -> None:
        if resume_run(self.store, self.status, self.run_dir):
            self.spec = replace(self.spec, resume=self.spec.url)
        if self.spec.is_resumed:  # the driver before has not put them if it was lost before it began to train
            hold(self.run_dir, {f"{HYDRA}/{name}": content for name, content in self.spec.hydra_files.items()})
            write_held(self.run_dir)

    def guard(self) -> None:
        self.guarding = submit_guard(self.client, self.spec)
        self.guarding.add_done_callback(self.guard_again)

    def guard_again(self, future: Any) -> None:
        """Replace a guard that Dask has dropped, as it does when some of its workers were lost. Called by Dask."""
        if self.state != "running" or self.client.status != "running":
            return
        if future.cancelled() or isinstance(error := future.exception(), KilledWorker):
            self.guard()
        elif error is not None:
            log.warning("no other driver will follow if this one is lost: %s", error)

    def await_scheduler(self, scheduler: Scheduler) -> None:
        """Wait for a scheduler that is gone, and have another driver started by a worker of the next one."""
        until = time.monotonic() + self.spec.config["dispatch"]["restart_wait_s"]
        while time.monotonic() < until and not self.uploader.give_up.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError, ClusterError):
                self.store.put(
                    STATUS, encode_status(self.status.content())
                )  # raises TakenOver if another driver goes on
                if self.store.size_or_none(STOP) is not None:
                    self.uploader.finish_run(0, "failed", self.status.now.message)
                    return
                if not diagnose(scheduler.address, scheduler.security):
                    with scheduler.client() as client:
                        submit_guard(client, self.spec)
                    return

    def run(self) -> None:
        self.redirect_output()
        self.store.warn_if_unconditional()
        cfg = self.config()
        with contextlib.ExitStack() as stack:
            if self.spec.client:
                self.client.subscribe_topic(stop_topic(self.spec.name), lambda _: interrupt("it was asked for"))
                on_gone = partial(interrupt, "the command that has begun it is gone")
                stack.enter_context(liveness_watched(self.client, self.spec.client, on_gone))
            self.uploader.start()
            before = read_summary(self.run_dir)
            self.state, message = self.run_job(cfg)
            # From now on, a signal means that the upload is not to be retried.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: self.uploader.give_up.set())
            missing = self.uploader.finish_run(cfg.results.retry_s, self.state, message)
        if self.store.lost:
            self.state, message = "failed", missing
        elif missing and self.state != LOST:
            kept = keep(self.scratch)
            self.state = "failed"
            message = f"{message}\nresults are not all in {self.spec.url}: {missing}; they are in {kept}"
            log.error("%s", message)
        if self.channel:
            summary = read_summary(self.run_dir)
            if summary is None or summary == before:  # of an earlier run: this one has ended before it began to train
                summary = Summary(status=self.state, failure=FailureEntry(message=message))
            summary.status = self.state
            self.channel.send(message=message, summary=to_builtins(summary))
            self.channel.delete_topics()

    def run_job(self, cfg: DictConfig) -> tuple[str, str]:
        from ddp_hydra.job.run import RemoteContext, run_job
        from ddp_hydra.job.summary import closing_lines, explain

        spec = self.spec
        writers: list[Writer] = [self.status, self.channel] if self.channel else [self.status]
        remote = RemoteContext(spec=spec, writers=writers, status=self.status.now)
        try:
            run_job(cfg, self.run_dir, spec.overrides, remote)
            summary = read_summary(self.run_dir)
            assert summary is not None
            return summary.status, closing_lines(summary, spec.url)
        except KeyboardInterrupt as error:
            return "interrupted", str(error) or "interrupted"
        except Exception as error:
            message = explain(error)
            print(message, file=sys.stderr)  # noqa: T201
            # If only our link to the scheduler failed, another driver may resume the run.
            is_cut = isinstance(error, SchedulerLost) or self.client.status != "running"
            return LOST if is_cut and spec.max_restarts else "failed", message

    def config(self) -> DictConfig:
        config = self.spec.config
        results = {**config["results"], "handler": "client", "root": None, "mirror": None}
        return config_of({**config, "results": results, "detach": False, "resume": self.resume_from() or None})

    def resume_from(self) -> str:
        given = self.spec.resume
        if f"/{self.spec.name}/" not in given:  # where files are that the command has sent to a worker
            return given
        if not Path(given).exists():
            log.warning("the checkpoint to resume from was on the host of the first driver, which is lost")
            return given
        target = self.run_dir / ".resume" / Path(given).name
        target.parent.mkdir()
        shutil.move(given, target)
        inbox = Path(given).parents[2]
        assert inbox.name == self.spec.name
        shutil.rmtree(inbox, ignore_errors=True)
        return str(target)

    def redirect_output(self) -> None:
        path = self.run_dir / "logs" / "driver.log"
        path.parent.mkdir(exist_ok=True)
        sys.stdout.flush()
        with path.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
        logging.root.setLevel(logging.INFO)
        logging.root.addHandler(handler)
        logging.getLogger("paramiko").setLevel(logging.WARNING)  # it tells of each connection
        if self.channel:
            logging.root.addHandler(self.channel)


def interrupt(reason: str) -> None:
    """Send Ctrl-C to the main thread: the first asks for a checkpoint and an end, the second ends at once."""
    log.warning("the run ends: %s", reason)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


def _client_security(security: Any) -> Any:
    """Return the security of a worker for a client, which shows the worker's certificate."""
    if security is not None and security.tls_ca_file:
        security = copy.copy(security)
        security.tls_client_cert, security.tls_client_key = security.tls_worker_cert, security.tls_worker_key
    return security


def keep(path: Path) -> str:
    """Keep a temporary folder for the user, under a name that is never cleaned up; return its path."""
    kept = path.with_name(path.name.replace(SCRATCH, "ddp_hydra-kept-"))
    path.rename(kept)
    return str(kept)


if __name__ == "__main__":
    main()
