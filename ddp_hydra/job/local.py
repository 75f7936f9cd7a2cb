"""Runs a job whose results this process writes: on a Dask cluster, or in this process."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.config.project import Project
from ddp_hydra.console.signals import SECOND
from ddp_hydra.dispatch import inline
from ddp_hydra.errors import CheckpointError
from ddp_hydra.job.job_config import gang_settings, ranks_per_worker
from ddp_hydra.job.run_dir import saved_step
from ddp_hydra.job.summary import shown_path
from ddp_hydra.rank import fault_injection, torchrun
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.results import finite
from ddp_hydra.run_state import Status, Summary
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.writers.handler import ResultsHandler, Writer, default_writers
from ddp_hydra.writers.run_dir import next_attempt, read_summary

if TYPE_CHECKING:  # these import Dask
    from ddp_hydra.dispatch.gang import Gang
    from ddp_hydra.job.remote.start_driver import DriverSpec

log = logging.getLogger(__name__)
TRAIN = "ddp_hydra.training.loop:train"
"""The function that ranks run; a name, because importing it here would import torch."""


class InterruptWriter:
    """Gives this process a Ctrl-C on purpose, when the metrics of a step arrive: `+fault=interrupt,step=20`."""

    def __init__(self, faults: Sequence[fault_injection.Fault]) -> None:
        self.pending = list(faults)

    def write(self, record: Record) -> None:
        for fault in self.pending:
            is_its_attempt = fault.attempt in (record.attempt, -1)
            if isinstance(record.data, Metrics) and is_its_attempt and (record.step or 0) >= fault.step:
                self.pending.remove(fault)
                print(f"fault on purpose: {fault}", flush=True)  # noqa: T201
                os.kill(os.getpid(), signal.SIGINT)
                return

    def close(self) -> None:
        self.pending = []


@dataclass(frozen=True)
class RemoteContext:
    """Connects a job to the driver that runs it.

    Args:
        spec: the job as the command has sent it.
        writers: further writers that get the job's records.
        status: what is known of the run; the job adds its failed attempts.
    """

    spec: DriverSpec
    writers: Sequence[Writer]
    status: Status


@dataclass(eq=False, repr=False)
class Job:
    """Runs one job and writes its results.

    Args:
        run_dir: where its results are written.
        cfg: the composed config.
        config: the same as plain values, for the ranks.
        files: files of the client that rank 0 needs, by name: "resume", a checkpoint; "weights", to start with.
        summary: filled in while the job runs.
        remote: the driver's part, if a driver runs the job.
        saved_config: the config as checkpoints contain it; None for all of it but the cluster.
        loggers: further writers, which get each record last.
    """

    run_dir: Path
    cfg: DictConfig
    config: dict[str, Any]
    files: dict[str, Path]
    summary: Summary
    remote: RemoteContext | None = None
    saved_config: dict[str, Any] | None = None
    loggers: Sequence[Writer] = ()

    def __post_init__(self) -> None:
        self.shown_dir = self.remote.spec.url if self.remote else shown_path(self.run_dir)
        self.give_up = threading.Event()
        self.begun = time.monotonic()
        self.first_attempt = next_attempt(self.run_dir)
        self.earlier_attempts = (read_summary(self.run_dir) or Summary(status="failed")).attempts
        self.first_world_size = 0
        self.first_step = 0
        self.steps_before: list[int] = []  # done by the attempt before, in another process
        _, hosts, run_dir = torchrun.read_memory()
        if run_dir == str(self.run_dir.absolute()):  # torchrun may have started it before, with more hosts
            self.steps_before = [attempt.steps_done for attempt in self.earlier_attempts[-1:]]
            self.first_world_size = self.cfg.dispatch.ranks or hosts * int(ranks_per_worker(self.cfg))
        self.saved = False
        self.status = Status(objective=self.summary.objective, tags=self.summary.tags, attempts=self.earlier_attempts)

    @contextmanager
    def handler(self, fetch: Any) -> Iterator[ResultsHandler]:
        """Open the writers of this job.

        An interrupt inside the block also ends their waiting for a full disk or a bucket that does not answer.
        """
        results = self.cfg.results
        settings = {"retry_s": results.retry_s, "give_up": self.give_up}
        kept = {"keep": results.keep_checkpoints, "keep_every": results.keep_every}
        writers = default_writers(self.run_dir, fetch, **kept, mirror=results.mirror, status=self.status, **settings)
        if faults := [fault for fault in fault_injection.parse(self.cfg.faults) if fault.kind == "interrupt"]:
            writers.append(InterruptWriter(faults))
        writers += self.remote.writers if self.remote else ()
        writers += self.loggers
        with ResultsHandler(writers, **settings) as handler:
            try:
                yield handler
            except KeyboardInterrupt:
                self.give_up.set()
                raise
            finally:
                self.summarise(handler)

    def run_here(self) -> dict[str, Any]:
        self.summary.world_size = 1
        fault_injection.check_ranks(self.cfg.faults, 1)
        for key in ("ranks", "ranks_per_worker"):
            if (given := self.cfg.dispatch[key]) not in (None, 1, "auto"):
                log.warning("dispatch.%s=%s has no effect with cluster=inline, which has one rank", key, given)
        with self.handler(inline.fetch) as handler:
            return inline.run(
                TRAIN,
                self.config,
                on_record=partial(self.on_record, handler=handler),
                notice=partial(self.interrupt_notice, trains=True),
                files={name: str(path) for name, path in self.files.items()},
                kept=self.saved_config,
                attempt=self.first_attempt,
                settings=gang_settings(self.cfg),
            )[0]

    def watch(self, gang: Gang, handler: ResultsHandler, restarts: Callable[[], int]) -> dict[str, Any]:
        try:
            value: dict[str, Any] = gang.run_attempts(
                self.call,
                lambda record: self.on_record(record, handler, gang),
                first_attempt=self.first_attempt,
                notice=lambda: self.interrupt_notice(gang.trains),
                goes_on=self.describe_restart,
                on_give_up=self.give_up.set,
            )[0]
            return value
        finally:
            self.summary.world_size, self.summary.restarts = gang.world_size, restarts()
            self.summary.attempts = [*self.earlier_attempts, *gang.restarts.ended]

    def run_on_dask(self, packed: Project, stop: threading.Event | None = None) -> dict[str, Any]:
        from ddp_hydra.cluster import preflight

        pip = preflight.check_requirements(self.cfg.cluster.get("pip") or ())
        with connect.connect(self.cluster_config, self.run_dir / "logs") as client:
            from ddp_hydra.dispatch.gang import Gang

            cwd = self.remote.spec.cwd if self.remote else ""
            settings = gang_settings(self.cfg, name="job", pip=pip, cwd=cwd)
            gang = Gang(client, project=packed, stop=stop, settings=settings)
            with self.handler(gang.fetch) as handler:
                return self.watch(
                    gang, handler, lambda: gang.attempt.number - self.first_attempt if gang.attempt else 0
                )

    @property
    def cluster_config(self) -> DictConfig:
        """Return the config of the cluster; its workers are processes where a fault strikes one."""
        strikes = any(fault.kind in fault_injection.OF_WORKERS for fault in fault_injection.parse(self.cfg.faults))
        if strikes and self.cfg.cluster.get("processes") is False:
            return DictConfig(OmegaConf.merge(self.cfg.cluster, {"processes": True}))
        return self.cfg.cluster

    def interrupt_notice(self, trains: bool) -> str:
        doing = (
            "a checkpoint is saved at the next step" if trains else "no step is being done, so nothing is to be saved"
        )
        return f"{doing}, then the job ends. {SECOND}. Run directory: {self.shown_dir}"

    def call(self, number: int, world_size: int) -> Any:
        """Return the call of an attempt's ranks: the same job, resumed from its last whole checkpoint."""
        from ddp_hydra.dispatch.call import Call

        config, settings = copy.deepcopy(self.config), dict[str, Any](kept=self.saved_config)
        if config["trainer"]["time_limit_s"] is not None:
            config["trainer"]["time_limit_s"] = max(0.0, config["trainer"]["time_limit_s"] - self.elapsed_s())
        self.first_world_size = self.first_world_size or world_size
        if number == self.first_attempt:
            fault_injection.check_ranks(self.cfg.faults, self.cfg.dispatch.ranks or world_size)
        if number == self.first_attempt and world_size == self.first_world_size:
            return Call(TRAIN, (config,), settings, files=self.files)
        settings["first_ranks"] = self.first_world_size
        return Call(TRAIN, (config,), settings, files=self.resume_files())

    def resume_files(self) -> dict[str, Path]:
        if self.saved:  # otherwise an earlier run has left the checkpoints in the run directory
            try:
                return {"resume": find_checkpoint(self.run_dir).absolute()}
            except CheckpointError as error:
                log.warning("from the beginning again: %s", error)
        return self.files

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun

    def on_record(self, record: Record, handler: ResultsHandler, gang: Any = None) -> None:
        ended = gang.restarts.ended if gang else []
        if isinstance(record.data, Start):
            self.status.attempts = [*self.earlier_attempts, *ended]
            if self.remote:
                self.remote.status.attempts = self.status.attempts
        handler.handle(record)
        # A checkpoint of several parts is saved when the last one has come.
        self.saved = self.saved or (
            record.checkpoint is not None and saved_step(self.run_dir) == record.checkpoint.step
        )
        if not isinstance(record.data, Start):
            return
        self.summary.from_step = begin = record.step or 0
        before = [attempt.steps_done for attempt in ended[-1:]] or self.steps_before
        if before:
            self.summary.steps_lost += max(0, before[0] - begin)
        if not ended:
            self.first_step = begin

    def describe_restart(self, steps_done: int) -> str:
        saved = saved_step(self.run_dir) if self.saved else None
        begin = self.first_step if saved is None else saved
        again = max(0, steps_done - begin)
        return f", from step {begin}" + (f" ({again} step{'s' if again > 1 else ''} again)" if again else "")

    def summarise(self, handler: ResultsHandler) -> None:
        self.summary.steps, self.summary.samples = handler.step, handler.samples
        self.summary.metrics = finite(handler.metrics)
