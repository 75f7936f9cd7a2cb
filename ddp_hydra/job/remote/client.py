"""The command's part of a run whose results go to shared storage: it has a driver started, and shows what it says."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.config import checkpoint_config, objective, redact
from ddp_hydra.config import schema as configs
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.console.text import plain as harmless
from ddp_hydra.dispatch import file_transfer
from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError, Interrupted, RecordError, RunFailed
from ddp_hydra.job import checks
from ddp_hydra.job.remote import messages as channel
from ddp_hydra.job.remote import start_driver
from ddp_hydra.job.remote.job_spec import JobSpec
from ddp_hydra.job.summary import summarised
from ddp_hydra.rank import outbox
from ddp_hydra.results import Record
from ddp_hydra.storage import results_root
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.writers.handler import ResultsHandler

START_S = 120.0
"""How long a driver may take to begin."""
END_S = 10.0
"""How long a driver may take to end after a second Ctrl-C."""

log = logging.getLogger(__name__)
Messages = queue.SimpleQueue[Any]


@dataclass(frozen=True)
class Driver:
    """A driver that has begun.

    Args:
        name: also the topic of what it says.
        url: of the results.
        client: its id at the scheduler.
        worker: the worker that has started it.
    """

    name: str
    url: str
    client: str
    worker: str


def run(cfg: DictConfig, run_dir: Path, overrides: Sequence[str]) -> float | None:
    """Run a job whose results go to `results.root`.

    Args:
        cfg: the composed config.
        run_dir: of this machine; it keeps no more than a summary and the URL.
        overrides: what it was composed with.

    Returns:
        The objective's last value; None for a run that goes on without us.

    Raises:
        DdpHydraError: as `job.run`, or the driver could not begin.
        Interrupted: as `job.run`.
    """
    if cfg.detach:
        _detach(cfg, run_dir, overrides)
        return None
    messages: Messages = queue.SimpleQueue()
    with summarised(run_dir, cfg) as summary, begun(cfg, run_dir, overrides, messages) as (client, driver):
        print(f"results: {driver.url}")  # noqa: T201
        end = Follower(client, driver, messages, run_dir).follow()
        summary |= {**end.summary, "status": end.state, "results": driver.url}
        if end.state == "interrupted":
            raise Interrupted(end.said)
        if end.state != "done":
            raise RunFailed(end.said)
    print(end.said)  # noqa: T201
    return _number(end.summary.get("metrics", {}).get(objective.of(cfg)[0]))


def _detach(cfg: DictConfig, run_dir: Path, overrides: Sequence[str]) -> None:
    with begun(cfg, run_dir, overrides) as (_, driver):
        print(f"the run goes on by itself; results: {driver.url}")  # noqa: T201
        print(f"look at it:  python -m ddp_hydra attach run={driver.url}")  # noqa: T201
        print(f"end it:      python -m ddp_hydra attach run={driver.url} stop=true")  # noqa: T201


@contextlib.contextmanager
def begun(
    cfg: DictConfig, run_dir: Path, overrides: Sequence[str], messages: Messages | None = None
) -> Iterator[tuple[Any, Driver]]:
    """Have a driver begin, on the cluster of a config.

    Args:
        cfg: the composed config.
        run_dir: of this machine.
        overrides: what it was composed with.
        messages: gets what the driver says; None: the driver goes on without us.

    Yields:
        A client of the cluster, and the driver.

    Raises:
        DdpHydraError: it could not begin; the message says what to do.
    """
    check(cfg)
    plain = configs.plain(cfg)
    packed = checks.packed_project(cfg, plain)
    url = results_root.address(cfg.results.root, run_dir)
    name = f"driver-{secrets.token_hex(6)}"
    with connect.connect(cfg.cluster, run_dir / "logs") as client:
        if messages is not None:
            client.subscribe_topic(name, lambda event: messages.put(event[1]))
        worker = _some_worker(client)
        order = JobSpec(
            name,
            url,
            plain,
            checkpoint_config.of(cfg),
            tuple(overrides),
            packed,
            redact.hydra_files(run_dir / ".hydra"),
            os.getcwd(),  # noqa: PTH109
            None if messages is None else client.id,
            connect.sweep(),
            _send_resume(client, worker, name, cfg.resume),
            lives=cfg.dispatch.max_restarts if cfg.detach else 0,
        )
        try:
            driver = _begin(client, worker, order)
        except DdpHydraError:
            with contextlib.suppress(OSError):
                file_transfer.call(client, worker, outbox.clear, name)
            raise
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / results_root.POINTER).write_text(url + "\n")
        yield client, driver
        if messages is not None and client.status == "running":
            client.unsubscribe_topic(name)


def check(cfg: DictConfig) -> None:
    """Refuse what cannot be a run of a driver."""
    checks.check(cfg)
    if connect.is_inline(cfg.cluster):
        raise ConfigError("results.handler=cluster needs a cluster, and cluster=inline is none: leave one of them out")
    stays = cfg.cluster.get("keep") or cfg.cluster.get("_target_") == f"{connect.Remote.__module__}.Remote"
    if cfg.detach and (connect.is_local(cfg.cluster) or not stays):
        raise ConfigError(
            f"detach=true: the cluster {cfg.cluster.get('_target_')} ends with this command, and the run would end "
            "with it: give a cluster that stays, cluster=remote cluster.address=tcp://host:8786, or leave detach out"
        )


def _some_worker(client: Any) -> str:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    running = [address for address, found in workers.items() if found.get("status", "running") == "running"]
    if not running:
        raise ClusterError("the cluster has no worker that runs, so there is no host for the run: bring up workers")
    return random.choice(running)  # noqa: S311


def _send_resume(client: Any, worker: str, name: str, resume: str | None) -> str:
    """Bring a checkpoint of this machine to the driver's host; what is not here may be there."""
    run = results_root.find(resume) if resume else ""
    if not run or results_root.is_url(run) or not Path(run).exists():
        return run
    path = find_checkpoint(run).absolute()
    try:
        return file_transfer.send(client, worker, name, 0, path)
    except OSError as error:
        raise ClusterError(f"worker {worker} could not be given the checkpoint {path}: {error}") from None


def _begin(client: Any, worker: str, order: JobSpec) -> Driver:
    try:
        answer = client.sync(client._run, start_driver.start, order, workers=[worker], callback_timeout=START_S)[worker]
    except (OSError, TimeoutError, KeyError) as error:
        raise ClusterError(f"worker {worker} did not start the run: {str(error) or type(error).__name__}") from None
    except (ImportError, AttributeError) as error:
        raise ClusterError(
            f"worker {worker} knows no results.handler=cluster ({error}): install there the ddp-hydra that is here"
        ) from None
    if "error" in answer:
        raise ConfigError(f"on worker {worker}: {harmless(str(answer['error']))}")
    return Driver(order.name, order.url, str(answer["client"]), worker)


@dataclass
class End:
    """How a run ended.

    Args:
        state: done, failed or interrupted.
        said: what its user is told.
        summary: of the run.
    """

    state: str
    said: str
    summary: dict[str, Any] = field(default_factory=dict)


class Follower:
    """Shows what a driver says, and has it end when the user wants to.

    Args:
        client: of the cluster.
        driver: that has begun.
        messages: what the driver says.
        run_dir: gets a status.json, for sweeps.
    """

    def __init__(self, client: Any, driver: Driver, messages: Messages, run_dir: Path) -> None:
        from ddp_hydra.writers.progress import ProgressWriter
        from ddp_hydra.writers.status import StatusWriter

        self.client, self.driver, self.messages = client, driver, messages
        self.handler = ResultsHandler([StatusWriter(run_dir), ProgressWriter()])
        self.interrupts = Interrupts()

    def follow(self) -> End:
        """Show the run until it has ended.

        Raises:
            ClusterError: the scheduler or the driver is gone.
            KeyboardInterrupt: the user did not want to wait for its end.
        """
        watch = channel.Watch(self.client, self.driver.client, lambda: self.messages.put(None))
        try:
            with self.interrupts.caught(), self.handler:
                try:
                    with self.interrupts.deferred():
                        return self._listen()
                except KeyboardInterrupt:  # a second one: at once
                    self._stop()
                    return self._listen(until=time.monotonic() + END_S)
        finally:
            watch.close()

    def _stop(self) -> None:
        self.client.log_event(channel.stops(self.driver.name), b"stop")

    def _listen(self, until: float | None = None) -> End:
        asked = until is not None
        while until is None or time.monotonic() < until:
            if self.interrupts.wanted and not asked:
                asked = True
                self._stop()
            try:
                message = self.messages.get(timeout=0.2)
            except queue.Empty:
                if self.client.status != "running":
                    raise ClusterError(
                        "the connection to the scheduler is lost, and the run ends: go on with "
                        f"resume={self.driver.url} once it is back"
                    ) from None
                continue
            if message is None:
                raise ClusterError(
                    f"the driver of the run is gone, that worker {self.driver.worker} had started (killed, out of "
                    f"memory, or its host is gone): go on with resume={self.driver.url}"
                )
            if (end := self._hear(message)) is not None:
                return end
        raise KeyboardInterrupt(f"not waited for its end; see {self.driver.url}")

    def _hear(self, message: Any) -> End | None:
        try:
            said = json.loads(message)
            if "record" in said:
                self.handler.handle(Record.decode(said["record"]))
            elif "line" in said:
                log.log(int(said["level"]), "%s", harmless(str(said["line"])))
            else:
                return End(str(said["state"]), harmless(str(said["said"])), dict(said["summary"]))
        except (KeyError, TypeError, ValueError, RecordError) as error:
            log.warning("the driver said what makes no sense: %r (%s)", message[:200], error)
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
