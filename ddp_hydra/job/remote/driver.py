"""`python -m ddp_hydra.job.remote.driver`: a job without its command, on the host of a worker.

What it shall do comes through stdin. A line of JSON on stdout says that it has begun, or why it cannot; what is said
from then on goes to logs/driver.log among the results.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connect import Scheduler
from ddp_hydra.errors import DdpHydraError, SchedulerLost
from ddp_hydra.job.remote.fence import Below, Fenced
from ddp_hydra.job.remote.job_spec import JobSpec, Place
from ddp_hydra.job.remote.messages import EventChannel, Watch, stops
from ddp_hydra.job.remote.scratch import Scratch
from ddp_hydra.job.remote.status import LOST, SUMMARY, Status
from ddp_hydra.job.remote.supervisor import is_over, keep, let_go
from ddp_hydra.job.remote.uploader import Uploader, claim, go_on
from ddp_hydra.storage import results_root
from ddp_hydra.storage.manifest import FOLDER
from ddp_hydra.writers.base import Writer

log = logging.getLogger(__name__)


def main() -> None:
    """Read an order, begin, and run the job to its end."""
    from setproctitle import setproctitle

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    connect.load()
    order, place = pickle.load(sys.stdin.buffer)  # noqa: S301, of the worker that has started us
    setproctitle(f"ddp_hydra driver {order.url}")
    try:
        with begun(order, place) as driver, driver.kept():
            tell(client=driver.client.id, pid=os.getpid())
            driver.run()
    except AlreadyEnded:
        tell(client="", pid=os.getpid())
    except (DdpHydraError, OSError) as error:
        tell(error=str(error))


class AlreadyEnded(Exception):
    """The run that is to be gone on with has come to its end."""


def tell(**answer: Any) -> None:
    """Answer the worker that has started us; it listens once."""
    print(json.dumps(answer), flush=True)  # noqa: T201


@contextlib.contextmanager
def begun(order: JobSpec, place: Place) -> Iterator[Driver]:
    """All that a run needs, and nothing of it is left at the end.

    Raises:
        ConfigError: the store cannot be written.
        ClusterError: the scheduler does not answer.
        OSError: this host's disk cannot be written, or the store is not reachable.
    """
    scheduler = Scheduler(place.scheduler, _of_client(place.security), order.sweep)
    status = Status(place.scheduler, order.project.sha256, order.lives)
    there = Fenced(results_root.folder(order.url))
    if not order.again:
        claim(there, status, order.hydra)
    elif is_over(there, order.plain["dispatch"]["lost_timeout_s"]):
        raise AlreadyEnded
    scratch = Scratch(place.scratch)
    try:
        with scheduler.client() as client:
            connect.use_existing(scheduler)
            driver = Driver(order, scratch, there, status, client)
            if order.again:
                driver.take_over()
            yield driver
    finally:
        scratch.remove()


class Driver:
    """A job on its way, and what of it is in the store.

    Args:
        order: what to do.
        scratch: where to write.
        there: where to bring that.
        status: of the run.
        client: connected to the scheduler.
    """

    def __init__(self, order: JobSpec, scratch: Scratch, there: Fenced, status: Status, client: Any) -> None:
        self.order, self.scratch, self.there, self.status, self.client = order, scratch, there, status, client
        self.run_dir = scratch.path / "run"
        self.run_dir.mkdir()
        self.state = "running"
        self.channel = EventChannel(client, order.name) if order.client else None
        self.uploader = Uploader(self.run_dir, there, status, lambda: self.end("it was asked for"), self.end)

    def take_over(self) -> None:
        """Go on with the run of a driver that is lost."""
        if go_on(self.there, self.status, self.run_dir):
            self.order = replace(self.order, resume=self.order.url)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Have the scheduler start another driver should this one be lost inside the block."""
        if not self.order.lives:
            yield
            return
        self.client.run_on_scheduler(keep, self.client.id, self.order)
        yield
        if self.state == LOST:
            return
        with contextlib.suppress(Exception):  # a scheduler that is gone keeps nobody
            self.client.run_on_scheduler(let_go, self.client.id)

    def run(self) -> None:
        """Run the job, and see its results home."""
        self.log()
        cfg = self.cfg()
        with contextlib.ExitStack() as stack:
            if self.order.client:
                self.client.subscribe_topic(stops(self.order.name), lambda _: interrupt())
                watch = Watch(self.client, self.order.client, lambda: self.end("the command that has begun it is gone"))
                stack.callback(watch.close)
            self.uploader.start()
            self.state, said = self.job(cfg)
            # From now on a signal means that nothing is to be waited for.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: self.uploader.give_up())
            missing = self.uploader.finish(cfg.results.retry_s, self.state, said)
        if self.there.lost:
            self.state, said = "failed", missing
        elif missing and self.state != LOST:
            kept = self.scratch.keep()
            self.state = "failed"
            said = f"{said}\nresults are not all in {self.order.url}: {missing}; they are in {kept}"
            log.error("%s", said)
        if self.channel:
            self.channel.say(state=self.state, said=said, summary=self.summary())
            self.channel.forget()

    def job(self, cfg: DictConfig) -> tuple[str, str]:
        """Run the job; returns how it ended, and what is to be said of it."""
        from ddp_hydra.job import explain, local, summary
        from ddp_hydra.job import run as job

        order = self.order
        writers: list[Writer] = [self.status, self.channel] if self.channel else [self.status]
        remote = local.RemoteContext(
            order.project,
            order.plain,
            order.cwd,
            order.url,
            order.kept,
            writers,
            self.uploader.bring_curves,
            self.status.note_attempts,
            Below(self.there, FOLDER),
        )
        try:
            job.run(cfg, self.run_dir, order.overrides, remote)
            return "done", summary.closing_lines(self.summary(), order.url)
        except KeyboardInterrupt as error:
            return "interrupted", str(error) or "interrupted"
        except Exception as error:
            said = explain.explain(error)
            print(said, file=sys.stderr)  # noqa: T201
            # Not the run has failed, but our link: another driver may follow, and goes on.
            is_cut = isinstance(error, SchedulerLost) or self.client.status != "running"
            return LOST if is_cut and order.lives else "failed", said

    def end(self, why: str) -> None:
        """Have the job save what it has, and end."""
        log.warning("the run ends: %s", why)
        interrupt()

    def cfg(self) -> DictConfig:
        """The job's config, as for a job that is typed here and has its checkpoints copied to the store."""
        plain = self.order.plain
        results = {**plain["results"], "handler": "client", "root": None, "mirror": self.order.url}
        return OmegaConf.create({**plain, "results": results, "detach": False, "resume": self.resume() or None})

    def resume(self) -> str:
        """The checkpoint to go on from; one that was sent here is ours, and moves to where we are."""
        given = self.order.resume
        if f"/{self.order.name}/" not in given:
            return given
        target = self.run_dir / ".resume" / Path(given).name
        target.parent.mkdir()
        shutil.move(given, target)
        gang = Path(given).parents[2]
        assert gang.name == self.order.name
        shutil.rmtree(gang, ignore_errors=True)
        return str(target)

    def summary(self) -> dict[str, Any]:
        """summary.json, as the job has written it."""
        try:
            return dict(json.loads((self.run_dir / SUMMARY).read_text()))
        except (OSError, ValueError):
            return {}

    def log(self) -> None:
        """Send to logs/driver.log what is printed and logged from now on; the command hears the log, too."""
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
        if self.channel:
            logging.root.addHandler(self.channel)


def interrupt() -> None:
    """Do as Ctrl-C does: the first asks for a good end, the second ends at once. From any thread."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


def _of_client(security: Any) -> Any:
    """The security of a worker's own connections, for a client on its host."""
    from distributed import Security

    if security is None or not security.tls_ca_file:
        return security
    return Security(
        require_encryption=security.require_encryption,
        tls_ca_file=security.tls_ca_file,
        tls_ciphers=security.tls_ciphers,
        tls_client_cert=security.tls_worker_cert,
        tls_client_key=security.tls_worker_key,
        extra_conn_args=security.extra_conn_args,
    )


if __name__ == "__main__":
    main()
