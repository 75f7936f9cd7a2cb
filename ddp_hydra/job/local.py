"""A job whose results this process writes: on Dask, or here."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.config import project
from ddp_hydra.config import schema as configs
from ddp_hydra.console.signals import SECOND
from ddp_hydra.dispatch import inline
from ddp_hydra.errors import CheckpointError, Interrupted
from ddp_hydra.job import global_batch
from ddp_hydra.job import run_dir as run_dirs
from ddp_hydra.job.checks import check
from ddp_hydra.job.fault_writer import FaultWriter, end_scheduler
from ddp_hydra.job.global_batch import Batch, share_out
from ddp_hydra.job.resume import weights_path
from ddp_hydra.job.summary import read_value, shown_path, why_stopped
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.results import Record, finite
from ddp_hydra.storage import results_root
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.writers.base import Writer
from ddp_hydra.writers.default import default_writers
from ddp_hydra.writers.handler import ResultsHandler

log = logging.getLogger(__name__)
TRAIN = "ddp_hydra.training.loop:train"
"""By name: importing it here would import torch."""


@dataclass(frozen=True)
class RemoteContext:
    """What a job brings along that is run elsewhere than where it was typed.

    Args:
        project: its packed project space.
        plain: its config as plain values, as it was composed.
        cwd: the folder where it was typed.
        url: what its run directory is called to its user.
        kept: what its checkpoints keep of the config.
        writers: to get its records, too.
        before_mirror: called before checkpoints are brought to its bucket.
        note_attempts: called with those that have failed, when another begins.
        checkpoints: the store to copy them to.
    """

    project: project.Project
    plain: dict[str, Any]
    cwd: str
    url: str
    kept: dict[str, Any]
    writers: Sequence[Writer]
    before_mirror: Callable[[], None]
    note_attempts: Callable[[list[dict[str, Any]]], None]
    checkpoints: results_root.Store


def follow(cfg: DictConfig, spec: RankSpec) -> None:
    """Be a rank other than 0 that a launcher has started: rank 0 runs the job.

    Raises:
        DdpHydraError: this rank has failed.
        Interrupted: the job was asked to end.
    """
    if not cfg.dry_run:
        check(cfg)
        plain = configs.plain(cfg)
        if weights_path(cfg) is not None:  # rank 0 reads them
            plain["model"]["weights"] = None
        value = read_value(inline.run(TRAIN, plain, on_record=inline.ignore, spec=spec, **how_here(cfg))[0])
        if value["interrupted"]:
            raise Interrupted(f"rank {spec.rank}: {why_stopped(value['interrupted'], value['steps'])}")


def how_here(cfg: DictConfig) -> dict[str, Any]:
    """Settings of a rank in this process."""
    timeouts = {"timeout_s": cfg.dispatch.timeout_s, "wait_timeout_s": cfg.cluster.get("wait_timeout_s")}
    how = {"threads": cfg.trainer.threads, "backend": backend(cfg), **timeouts}
    return {**how, "retry_s": cfg.results.retry_s}


def backend(cfg: DictConfig) -> str:
    """Return the ranks' backend: gloo where they compute on the CPU, so that they leave the GPUs alone."""
    # A driver's config has plain values, others have enums.
    given, device = (getattr(one, "value", one) for one in (cfg.dispatch.backend, cfg.trainer.device))
    return "gloo" if given == "auto" and device == "cpu" else str(given)


class Job:
    """A job on its way: its writers, and the two ways to run it.

    Args:
        run_dir: where its results go.
        cfg: the composed config.
        plain: the same as plain values, for the ranks.
        files: files of the client that rank 0 needs: "resume", a checkpoint; "weights", to begin with.
        summary: filled while it runs.
        remote: where it was typed elsewhere.
        kept: what checkpoints keep of the config; None: all but the cluster.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: DictConfig,
        plain: dict[str, Any],
        files: dict[str, Path],
        summary: dict[str, Any],
        remote: RemoteContext | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.run_dir, self.cfg, self.plain, self.files, self.summary = run_dir, cfg, plain, files, summary
        self.remote, self.kept = remote, kept
        self.where = remote.url if remote else shown_path(run_dir)
        self.give_up = threading.Event()
        self.begun = time.monotonic()
        self.first_attempt = run_dirs.next_attempt(run_dir)
        self.earlier_attempts = run_dirs.read_summary(run_dir).get("attempts") or []
        self.first_world_size = 0
        self.first_step = 0
        self.saved = False

    @contextmanager
    def handler(self, fetch: Any, client: Any = None) -> Iterator[ResultsHandler]:
        """The consumer of this job's records. An interrupt ends its waiting for a full disk or a failing bucket."""
        results = self.cfg.results
        settings = {"retry_s": results.retry_s, "give_up": self.give_up}
        more: dict[str, Any] = {}
        if self.remote:
            more = {"before_mirror": self.remote.before_mirror, "mirror_store": self.remote.checkpoints}
        writers = default_writers(
            self.run_dir, fetch, keep=results.keep_checkpoints, mirror=results.mirror, **settings, **more
        )
        writers += self.remote.writers if self.remote else ()
        wanted = fault_injection.parse(self.cfg.faults)
        if wanted:
            writers.insert(0, FaultWriter(wanted, self.run_dir, lambda: end_scheduler(client)))
        with ResultsHandler(writers, **settings) as handler:
            try:
                yield handler
            except KeyboardInterrupt:
                self.give_up.set()
                raise
            finally:
                self.note(handler)

    def run_here(self, spec: RankSpec) -> dict[str, Any]:
        """Run as rank 0 in this process."""
        self.summary["world_size"] = spec.world_size
        with self.handler(lambda record, target: inline.fetch(record.data, target)) as handler:
            paths = {name: str(path) for name, path in self.files.items()}
            more = {"files": paths, "kept": self.kept, "attempt": self.first_attempt, **how_here(self.cfg)}
            notice = partial(self.notice, trains=True)
            return inline.run(TRAIN, self.plain, on_record=handler.handle, spec=spec, notice=notice, **more)[0]

    def run_on_dask(self, packed: project.Project) -> dict[str, Any]:
        """Run as a gang on a Dask cluster."""
        from ddp_hydra.cluster import preflight

        pip = preflight.check_requirements(self.cfg.cluster.get("pip") or ())
        with connect.connect(self.cfg.cluster, self.run_dir / "logs") as client:
            from ddp_hydra.dispatch.gang import Gang

            settings = OmegaConf.to_container(self.cfg.dispatch, enum_to_str=True)
            assert isinstance(settings, dict)
            ports = settings.pop("port_range")
            settings["backend"] = backend(self.cfg)
            gang = Gang(
                client,
                name="job",
                project=packed,
                pip=pip,
                threads=self.cfg.trainer.threads,
                sweep=connect.sweep(),
                on_give_up=self.give_up.set,
                first_attempt=self.first_attempt,
                goes_on=self.goes_on,
                retry_s=self.cfg.results.retry_s,
                port_range=(ports[0], ports[1]) if ports else None,
                cwd=self.remote.cwd if self.remote else "",
                **{str(name): value for name, value in settings.items()},
            )
            with self.handler(gang.fetch, client) as handler:
                gang.on_record = lambda record: self.on_record(record, handler, gang)
                gang.interrupts.notice = lambda: self.notice(gang.trains)
                try:
                    return gang.run_attempts(self.call)[0]
                finally:
                    self.summary |= {
                        "world_size": gang.world_size,
                        "restarts": gang.attempt.number - self.first_attempt if gang.attempt else 0,
                        "attempts": self.attempts(gang),
                    }

    def notice(self, trains: bool) -> str:
        """What is said when the user wants to end.

        Args:
            trains: whether the ranks are in their loop.
        """
        doing = (
            "a checkpoint is saved at the next step" if trains else "no step is being done, so nothing is to be saved"
        )
        return f"{doing}, then the job ends. {SECOND}. Run directory: {self.where}"

    def call(self, number: int, world_size: int) -> Any:
        """What attempt `number` runs on `world_size` ranks: the same job, from its last complete checkpoint."""
        from ddp_hydra.dispatch.call import Call

        plain, kept = copy.deepcopy(self.plain), {"kept": self.kept}
        if plain["trainer"]["time_limit_s"] is not None:
            plain["trainer"]["time_limit_s"] = max(0.0, plain["trainer"]["time_limit_s"] - self.spent_s())
        if number == self.first_attempt:
            self.first_world_size = world_size
            return Call(TRAIN, (plain,), kept, files=self.files)
        batch = self.batch(world_size)
        plain["data"]["batch_size"], plain["trainer"]["gradient_accumulation_steps"] = batch.size, batch.parts
        return Call(TRAIN, (plain,), kept, files=self.last_files())

    def last_files(self) -> dict[str, Path]:
        """What to go on from: this job's last whole checkpoint, or else what it began with."""
        if self.saved:  # in a run directory that is used again, others' may lie, too
            try:
                return {"resume": find_checkpoint(self.run_dir).absolute()}
            except CheckpointError as error:
                log.warning("from the beginning again: %s", error)
        return self.files

    def spent_s(self) -> float:
        """Time since the job began."""
        return time.monotonic() - self.begun

    def batch(self, world_size: int) -> Batch:
        """Return what each rank computes in a step, so that the global batch stays what it was, where that can be."""
        first = Batch(self.plain["data"]["batch_size"], self.plain["trainer"]["gradient_accumulation_steps"])
        if world_size == self.first_world_size:
            return first
        shared = share_out(first, self.first_world_size, world_size)
        log.warning("%s", global_batch.describe(first, self.first_world_size, world_size, shared))
        return shared

    def on_record(self, record: Record, handler: ResultsHandler, gang: Any) -> None:
        """Write a record; where an attempt goes on, count what it has to do again."""
        handler.handle(record)
        self.saved |= record.data.get("checkpoint") is not None
        if record.kind != "start":
            return
        if self.remote:
            self.remote.note_attempts(self.attempts(gang))
        begin = record.step or 0
        if gang.restarts.ended:
            self.summary["steps_lost"] += max(0, gang.restarts.ended[-1].steps_done - begin)
        else:
            self.first_step = begin

    def attempts(self, gang: Any) -> list[dict[str, Any]]:
        """Return the attempts that have failed, also those of an earlier process."""
        return [*self.earlier_attempts, *(attempt.as_dict() for attempt in gang.restarts.ended)]

    def goes_on(self, steps_done: int) -> str:
        """Return where the next attempt begins, in words.

        Args:
            steps_done: by the last one.
        """
        saved = run_dirs.saved_step(self.run_dir) if self.saved else None
        begin = self.first_step if saved is None else saved
        again = max(0, steps_done - begin)
        return f", from step {begin}" + (f" ({again} step{'s' if again > 1 else ''} again)" if again else "")

    def note(self, handler: ResultsHandler) -> None:
        """Keep what is known so far, for the summary of a job that fails."""
        self.summary |= {
            "steps": handler.step,
            "samples": handler.samples,
            "metrics": finite(handler.metrics),
        }
