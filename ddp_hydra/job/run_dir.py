"""Keeps a run directory for one run, and the record of an earlier one there until another begins to train."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, read_write

from ddp_hydra.config import env_values, project, redact
from ddp_hydra.console.text import typed
from ddp_hydra.errors import CheckpointError, ConfigError, RecordError
from ddp_hydra.run_state import Best, Metrics, Summary
from ddp_hydra.storage.files import link_or_copy, prepared_path, replacing, write_atomic, writing
from ddp_hydra.storage.manifest import (
    BEST,
    FOLDER,
    CheckpointEntry,
    has_checkpoint,
    read_manifest,
    readable_steps,
)
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.storage.urls import POINTER
from ddp_hydra.writers.run_dir import last_metrics, locked, read_summary

HYDRA = ".hydra"
_held: dict[Path, dict[str, bytes]] = {}
"""The files that are held back for a job that has not begun to train, by its run directory: see `hold`."""


class RunDirCallback(Callback):
    """Refuses a run directory that holds another run, before Hydra writes its `.hydra` there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        run_dir = Path(str(config.hydra.run.dir))
        if config.get("dry_run"):  # it writes no `.hydra`: a run in this folder would lose its own
            with read_write(config.hydra):
                config.hydra.output_subdir = None
        try:
            is_there = run_dir.is_dir()
        except OSError:  # Hydra can't make it, and says why
            is_there = False
        if config.hydra.output_subdir is None or not is_there:
            return
        try:
            with locked(run_dir):
                refuse_other_run(run_dir, config.get("resume"))
        except (ConfigError, OSError) as error:  # Hydra turns exceptions of callbacks into warnings
            raise SystemExit(f"ddp_hydra: {error}") from None


def refuse_other_run(run_dir: Path, resume: str | None, is_stored: bool = True) -> None:
    """Refuse a run directory that holds the results of another run than that which the new one goes on from.

    A run that ended before it saved a checkpoint may start again in its folder. `is_stored`: the results of the new run
    go to a store, where its driver looks for another run itself.
    """
    summary = read_summary(run_dir)
    is_done = summary is not None and summary.status == "done"
    is_detached = summary is None and (run_dir / POINTER).exists() and not is_stored
    if (has_checkpoint(run_dir) or is_done or is_detached) and not is_resumed(run_dir, resume):
        raise ConfigError(
            f"{run_dir} holds another run: give hydra.run.dir=<folder>, or go on with it by {typed('resume', run_dir)}"
        )


def has_record(run_dir: Path) -> bool:
    """Return whether a run directory has the record of a run that has trained: a command may yet be refused there.

    The jobs of a sweep have theirs written anew, because the sweep reads how each has ended.
    """
    if sweep_dir(run_dir) is not None:
        return False
    if (summary := read_summary(run_dir)) is None:  # a pointer alone is of a detached run
        return has_checkpoint(run_dir) or (run_dir / POINTER).exists()
    return summary.status == "done" or summary.from_step is not None or has_checkpoint(run_dir)


def hold(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Hold files back until the job begins to train: those of an earlier run stay if it is refused before.

    They are in memory, by name relative to the run directory: a process that is killed leaves nothing of them.
    """
    _held.setdefault(run_dir.absolute(), {}).update(files)


def is_held(run_dir: Path) -> bool:
    return run_dir.absolute() in _held


def write_held(run_dir: Path) -> None:
    for name, content in _held.get(run_dir.absolute(), {}).items():
        with contextlib.suppress(*([RecordError] if name == project.ARCHIVE else [])):  # no job fails for want of it
            write_atomic(prepared_path(run_dir, name), content, durable=False)
    _held.pop(run_dir.absolute(), None)


@contextlib.contextmanager
def earlier_kept(run_dir: Path) -> Iterator[None]:
    """Keep the record of an earlier run in a run directory until a job in the block begins to train."""
    try:
        if has_record(run_dir):
            hold(run_dir, {})
        yield
    finally:
        _held.pop(run_dir.absolute(), None)


def hydra_files(run_dir: Path) -> dict[str, bytes]:
    """Return the files that Hydra has made of a job, by name, also where they are held back."""
    folder, held = run_dir / HYDRA, _held.get(run_dir.absolute(), {})
    found = {path.name: content for name, content in held.items() if (path := run_dir / name).parent == folder}
    return found or {path.name: path.read_bytes() for path in sorted(folder.glob("*.yaml"))}


def remove_unused(run_dir: Path, output_subdir: str | None) -> None:
    """Remove a run directory in which Hydra has written its files and no job anything: of a dry run, or a mistake."""
    with contextlib.suppress(OSError):
        of_hydra = run_dir / str(output_subdir)
        if run_dir.resolve() == Path.cwd():
            return
        if [path.name for path in run_dir.iterdir()] == [of_hydra.name]:
            known = {"config.yaml", "hydra.yaml", "overrides.yaml", Path(env_values.FILE).name}
            if not {path.name for path in of_hydra.iterdir()} <= known:
                return
            shutil.rmtree(of_hydra)
        run_dir.rmdir()  # the system refuses this for a folder that holds anything


def is_resumed(run_dir: Path, resume: str | None) -> bool:
    """Return whether `resume=` names the run of a run directory: itself, or the results that it points to."""
    if not resume:
        return False
    named, pointed = RunRef.own(resume), RunRef.named(run_dir)
    if named.is_stored:
        return named.folder == pointed.folder
    given = Path(named.place).resolve()
    return any(given == own or own in given.parents for own in (run_dir.resolve(), Path(pointed.place).resolve()))


def keep_project(run_dir: Path, packed: project.Project) -> None:
    """Keep the code and the configs of a run in its directory, unless a config holds a secret.

    The jobs of a sweep share one file, which is in the sweep's folder, too. No job fails because that can't be written.
    """
    own = run_dir / project.ARCHIVE
    shared = (sweep_dir(run_dir) or run_dir) / project.ARCHIVE
    source, target = shared, own
    with contextlib.suppress(RecordError):
        if shared == own or not _holds(shared, packed.archive):
            if any(redact.secret_line(text) for text in project.texts(packed)):
                return
            if is_held(run_dir):
                hold(run_dir, {project.ARCHIVE: packed.archive})
                return
            write_atomic(own, packed.archive, durable=False)
            source, target = own, shared
        if shared != own:
            with writing(target), replacing(target, durable=False) as part:
                link_or_copy(source, part)


def keep_environment(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Keep the values of a job's config that the environment has given; see `env_values`."""
    if values or (run_dir / env_values.FILE).exists():
        content = env_values.encoded(values)
        if is_held(run_dir):
            hold(run_dir, {env_values.FILE: content})
        else:
            write_atomic(prepared_path(run_dir, env_values.FILE), content, durable=False)


def kept_environment(run: str, cfg: DictConfig) -> dict[str, Any]:
    """Return what `keep_environment` has kept of a run, and `cfg` writes alike; nothing where it can't be read."""
    with contextlib.suppress(OSError, ConfigError):
        place = RunRef.named(run)
        values = env_values.decoded(place.read(env_values.FILE))
        return env_values.written_alike(values, place.read(f"{HYDRA}/config.yaml"), cfg)
    return {}


def sweep_dir(run_dir: Path) -> Path | None:
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    folder = Path(HydraConfig.get().sweep.dir).resolve()
    return folder if folder in run_dir.resolve().parents else None


def _holds(path: Path, content: bytes) -> bool:
    try:
        return not path.is_symlink() and path.read_bytes() == content
    except OSError:
        return False


def saved_step(run_dir: Path) -> int | None:
    return next((entry.step or 0 for entry in readable_steps(run_dir / FOLDER).values()), None)


def add_saved(summary: Summary, run_dir: Path, is_stored: bool) -> None:
    """Add to a summary what the run's checkpoints tell: the best one, and metrics that were not measured again.

    A run that fails, or is refused as it is resumed in its folder, has them, too. `is_stored`: they are in a store.
    """
    if not is_stored and not has_checkpoint(run_dir):  # what is left of a manifest is another run's
        return
    # It may have gone on from an earlier checkpoint than its newest one.
    until = None if summary.from_step is None else max(summary.from_step, summary.steps or 0)
    steps = readable_steps(run_dir / FOLDER).values()
    newest = next((entry for entry in steps if until is None or (entry.step or 0) <= until), None)
    summary.metrics = {**_metrics_of(newest), **summary.metrics}
    if summary.objective is None and (before := read_summary(run_dir)) is not None:
        summary.objective = before.objective
    with contextlib.suppress(CheckpointError):
        best = read_manifest(run_dir / FOLDER).get(BEST)
        value = best.metrics.get(summary.objective.metric) if best and summary.objective else None
        if best and best.step is not None and value is not None:
            summary.best = Best(best.step, value)


@dataclass(frozen=True)
class Measured:
    """Says how far a run is, and the last values of its metrics up to there."""

    steps: int | None = None
    samples: float | None = None
    metrics: Metrics = field(default_factory=dict)


def goes_on(run_dir: Path, resume: str | None, is_stored: bool) -> bool:
    """Return whether a job goes on with the run in its own folder.

    `is_stored`: the run is in a store, and what it has left there, but for its checkpoints, was downloaded.
    """
    return bool(resume) and (is_stored or has_checkpoint(run_dir))


def measured_until(run_dir: Path, step: int, known: Sequence[Measured]) -> Measured:
    """Return what a run has measured up to the step of a checkpoint; what it has measured later is done again.

    Args:
        known: what it had measured when its processes or attempts ended, the newest first.
    """
    for found in known:
        if found.steps == step:
            return found
    before = next((found.metrics for found in known if found.steps is not None and found.steps < step), {})
    steps = readable_steps(run_dir / FOLDER).values()
    entry = next((entry for entry in steps if entry.step == step), None)
    metrics = {**before, **last_metrics(run_dir, step), **_metrics_of(entry)}  # means over an epoch win over a line's
    samples = entry.samples if entry else None
    return Measured(step, None if samples is None else int(samples), metrics)


def _metrics_of(entry: CheckpointEntry | None) -> dict[str, float | None]:
    return {name: value for name, value in (entry.metrics if entry else {}).items() if value is not None}


def full_disk_advice(run_dir: Path, shown_dir: str) -> str:
    step = saved_step(run_dir)
    saved = "nothing was saved before" if step is None else f"step {step} is saved"
    again = "start it again" if step is None else f"go on with {typed('resume', shown_dir)}"
    free = shutil.disk_usage(run_dir).free
    return f"{saved}; {free:,} bytes are free in {run_dir}: free some space there, then {again}"
