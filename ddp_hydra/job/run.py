"""One config -> one finished run directory."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import ddp_hydra
from ddp_hydra.cluster import connect
from ddp_hydra.config import checkpoint_config, project, targets, unknown_keys
from ddp_hydra.config import schema as configs
from ddp_hydra.console.plural import counted
from ddp_hydra.console.signals import SECOND, held_back
from ddp_hydra.console.text import message_of, traceback_of
from ddp_hydra.dispatch import inline, torchrun
from ddp_hydra.errors import (
    CheckpointError,
    ConfigError,
    DdpHydraError,
    Interrupted,
    JobFailed,
    RecordError,
    RunFailed,
)
from ddp_hydra.heartbeat import REASONS
from ddp_hydra.job import bottleneck, global_batch
from ddp_hydra.job import run_dir as run_dirs
from ddp_hydra.job.fault_writer import RehearsalWriter, end_scheduler
from ddp_hydra.job.global_batch import Batch, share_out
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.results import Record, finite
from ddp_hydra.storage import fetch_checkpoint, results_root
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.writers import ResultsHandler, Writer, default_writers

log = logging.getLogger(__name__)
TRAIN = "ddp_hydra.training.loop:train"
"""By name: importing it here would import torch."""


@dataclass(frozen=True)
class Guest:
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


def run(cfg: DictConfig, run_dir: Path, overrides: Sequence[str] = (), guest: Guest | None = None) -> float | None:
    """Train one job.

    Args:
        cfg: the composed config.
        run_dir: where its results go.
        overrides: what it was composed with, for TensorBoard's HParams tab.
        guest: where it was typed elsewhere.

    Returns:
        The objective's last value, for sweepers.

    Raises:
        DdpHydraError: the config can't be a job, no cluster came up, or the gang failed.
        Interrupted: the job was asked to end, or its time was up; its state is saved.
    """
    if cfg.dry_run:
        check(cfg)
        plain = configs.plain(cfg)
        packed_project(cfg, plain)
        _dry_run(plain)
        return None
    with run_dirs.locked(run_dir):
        if guest is None:
            run_dirs.refuse_another(run_dir, cfg.resume)
        print(f"ddp_hydra  ->  {guest.url if guest else _short(run_dir)}", flush=True)  # noqa: T201
        if cfg.results.handler is configs.Handler.rank0:
            connect.load()
            from ddp_hydra.job.remote import client

            return client.run(cfg, run_dir, overrides)
        return train(cfg, run_dir, overrides, guest)


def train(cfg: DictConfig, run_dir: Path, overrides: Sequence[str], guest: Guest | None) -> float | None:
    """Train a job whose results are written by this process; see `run`."""
    where = guest.url if guest else _short(run_dir)
    with summarised(run_dir, cfg, where) as summary, ExitStack() as stack:
        check(cfg)
        with held_back():
            from ddp_hydra.writers import hparams  # a config that is refused need not wait for TensorBoard

        stack.enter_context(hparams.session(run_dir, overrides))
        plain = guest.plain if guest else configs.plain(cfg)
        kept = guest.kept if guest else checkpoint_config.of(cfg)
        files = {"resume": find_resume(cfg, run_dir)} if cfg.resume else {}
        if (weights := find_weights(cfg)) is not None:
            files["weights"], plain["model"]["weights"], kept["model"]["weights"] = weights, None, None
        packed = guest.project if guest else packed_project(cfg, plain)
        summary["project"] = packed.sha256
        if cfg.trainer.profile_steps:
            summary["profile"] = "profile/table.md"
        job = Job(run_dir, cfg, plain, files, summary, guest, kept)
        spec = torchrun.place(cfg.cluster)
        here = spec is not None or connect.is_inline(cfg.cluster)
        value = read_value(job.run_here(spec or inline.ALONE) if here else job.run_on_dask(packed))
        summary |= {**value, "metrics": finite(value["metrics"])}
        if value["interrupted"]:
            raise Interrupted(f"{_why(value['interrupted'], value['steps'])}: go on with resume={where}")
        summary["status"] = "done"
    print(closing_lines(summary, where))  # noqa: T201
    return value["metrics"].get(plain["objective"]["metric"])


def packed_project(cfg: DictConfig, plain: dict[str, Any]) -> project.Project:
    """Pack the project space, once the ranks are known to find in it what the config names."""
    root = project.find()
    targets.check(plain, root, connect.is_local(cfg.cluster) or connect.is_inline(cfg.cluster))
    return project.pack(root)


def check(cfg: DictConfig) -> None:
    """Refuse what no job can mean."""
    unknown_keys.check(cfg)
    configs.check(cfg)
    fault_injection.parse(cfg.faults)


def read_value(value: Any) -> dict[str, Any]:
    """Read what `train` returned; it comes from a rank, so nothing in it is trusted.

    Raises:
        RecordError: it is something else.
    """
    try:
        counts = {name: int(value[name]) for name in ("steps", "samples", "bad_samples")}
        speeds = {name: float(value[name]) for name in ("train_s", "samples_per_s")}
        metrics, data = (
            {str(name): float(number) for name, number in value[part].items()} for part in ("metrics", "data")
        )
        peak_memory = int(value["peak_memory"])
        slowest = {str(name): float(number) for name, number in value["slowest"].items()}
        reason = REASONS[REASONS.index(value["interrupted"])]
        if finite(speeds) != speeds or finite(data) != data or not {"wait_s", "wait"} <= data.keys():
            raise ValueError(speeds, data)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise RecordError(f"rank 0 returned what no training returns: {value!r:.200} ({error!r:.100})") from None
    insight = {"peak_memory": peak_memory, "slowest": finite(slowest)}
    return {**counts, **speeds, "metrics": metrics, "data": data, **insight, "interrupted": reason}


def find_resume(cfg: DictConfig, run_dir: Path) -> Path:
    """The checkpoint that `resume` means, brought here where it is in a bucket."""
    run = results_root.find(cfg.resume)
    if results_root.is_url(run):
        folder = run_dir / ".resume"
        folder.mkdir(parents=True, exist_ok=True)
        return fetch_checkpoint.fetch_checkpoint(run, folder, retry_s=cfg.results.retry_s).absolute()
    return find_checkpoint(run).absolute()


def find_weights(cfg: DictConfig) -> Path | None:
    """The file that `model.weights` means, or the best checkpoint of a run directory; None where it is only a name.

    Raises:
        CheckpointError: it looks like a path, and there is nothing.
    """
    if (given := weights_path(cfg)) is None:
        return None
    path = Path(given).expanduser()
    if path.is_dir():
        return find_checkpoint(path, "best").absolute()
    if not path.is_file():
        raise CheckpointError(f"model.weights={given}: there is no such file, nor a run directory")
    return path.absolute()


def weights_path(cfg: DictConfig) -> str | None:
    """Return `model.weights` where it looks like a path."""
    given = cfg.model.get("weights") if isinstance(cfg.model, DictConfig) else None
    is_path = isinstance(given, str) and ({"/", os.sep} & set(given) or given.endswith((".pt", ".pth")))
    return given if is_path else None


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
            raise Interrupted(f"rank {spec.rank}: {_why(value['interrupted'], value['steps'])}")


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
        guest: where it was typed elsewhere.
        kept: what checkpoints keep of the config; None: all but the cluster.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: DictConfig,
        plain: dict[str, Any],
        files: dict[str, Path],
        summary: dict[str, Any],
        guest: Guest | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.run_dir, self.cfg, self.plain, self.files, self.summary = run_dir, cfg, plain, files, summary
        self.guest, self.kept = guest, kept
        self.where = guest.url if guest else _short(run_dir)
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
        if self.guest:
            more = {"before_mirror": self.guest.before_mirror, "mirror_store": self.guest.checkpoints}
        writers = default_writers(
            self.run_dir, fetch, keep=results.keep_checkpoints, mirror=results.mirror, **settings, **more
        )
        writers += self.guest.writers if self.guest else ()
        wanted = fault_injection.parse(self.cfg.faults)
        if wanted:
            writers.insert(0, RehearsalWriter(wanted, self.run_dir, lambda: end_scheduler(client)))
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
                cwd=self.guest.cwd if self.guest else "",
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
        plain["data"]["batch_size"], plain["trainer"]["accumulate"] = batch.size, batch.parts
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
        first = Batch(self.plain["data"]["batch_size"], self.plain["trainer"]["accumulate"])
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
        if self.guest:
            self.guest.note_attempts(self.attempts(gang))
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


@contextmanager
def summarised(run_dir: Path, cfg: DictConfig, where: str = "") -> Iterator[dict[str, Any]]:
    """Write summary.json at the end, however it comes.

    Args:
        run_dir: of the job.
        cfg: of the job.
        where: the results are, as their user would type it.
    """
    begin, where = time.time(), where or _short(run_dir)
    summary: dict[str, Any] = {
        "status": "failed", "tags": list(cfg.tags), "restarts": 0, "steps_lost": 0, "failure": None
    }  # fmt: skip
    try:
        yield summary
    except BaseException as error:
        _note_end(summary, error)
        _finish(run_dir, summary, begin, error)
        if isinstance(error, KeyboardInterrupt) and not error.args:  # at once, without another checkpoint
            step = run_dirs.saved_step(run_dir)
            error.args = () if step is None else (f"interrupted; step {step} is saved: go on with resume={where}",)
        if run_dirs.is_full(error):
            error.add_note(run_dirs.once_there_is_room(run_dir, where))
        raise
    _finish(run_dir, summary, begin)


def _note_end(summary: dict[str, Any], error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        summary["status"] = "interrupted"
    elif isinstance(error, RunFailed):  # elsewhere, whose summary says how
        pass
    elif isinstance(error, JobFailed):
        summary["failure"] = error.failure.as_dict()
    elif isinstance(error, Exception):
        nobody = dict.fromkeys(("rank", "host", "attempt", "step"))
        trace = "" if isinstance(error, DdpHydraError) else traceback_of(error)
        told = {"message": message_of(error), "place": "", "traceback": trace}
        summary["failure"] = {"kind": type(error).__name__, **nobody, **told}


def _finish(run_dir: Path, summary: dict[str, Any], begin: float, error: BaseException | None = None) -> None:
    summary |= {"started": begin, "wall_s": time.time() - begin, "ddp_hydra": ddp_hydra.__version__}
    try:
        run_dirs.write_summary(run_dir, summary)
    except ConfigError as unwritten:
        if error is None:
            raise
        if not run_dirs.is_full(error):  # why it failed is more important
            error.add_note(str(unwritten))


def closing_lines(summary: dict[str, Any], where: str) -> str:
    """What is said of a job that is done.

    Args:
        summary: of the job.
        where: its results are.
    """
    metrics = summary["metrics"]
    names = ("train/loss", "val/loss", "val/accuracy")
    shown = [f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None]
    speed = f"{summary['samples_per_s']:,.0f} samples/s"
    steps = summary["steps"]
    lines = [
        f"done: {counted(steps, 'step')} in {summary['train_s']:.1f} s, {', '.join([speed, *shown])}  ->  {where}",
        bottleneck.describe(summary["data"], summary["train_s"], steps),
        bottleneck.describe_slowest(summary["slowest"], steps),
        f"profile: {where}/{summary['profile']}, and a trace of each rank beside it (ui.perfetto.dev)"
        if summary.get("profile")
        else None,
    ]
    return "\n".join(filter(None, lines))


def _why(reason: str, steps: int) -> str:
    said = {
        "interrupt": "interrupted",
        "time_limit": "the time of trainer.time_limit_s is up",
        "preemption": "a worker is being shut down (SIGTERM)",
    }
    return f"{said[reason]}; saved at step {steps}"


def _short(path: Path) -> str:
    relative = os.path.relpath(path, project.typed_in())
    return str(path) if relative.startswith("..") else relative


def _dry_run(plain: dict[str, Any]) -> None:
    """Build model and data and make one step, in this process."""

    def show(record: Record) -> None:
        for line in record.data.get("lines", ()):
            print(line)  # noqa: T201

    inline.run("ddp_hydra.training.dry_run:dry_run", plain, on_record=show)
