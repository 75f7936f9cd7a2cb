"""Measures the size of runs, and removes them: what a run or a sweep has written, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError, TakenOver
from ddp_hydra.job.remote.status import OWNER, FencedStore
from ddp_hydra.job.remote.uploader import is_active
from ddp_hydra.runs.describe import status_of
from ddp_hydra.runs.find import SWEEP, SweepJobs, Sweeps, places, run_dirs, stored_runs
from ddp_hydra.runs.run_files import LocalRunFiles, RunFiles, StoredRunFiles, is_run, reachable, yaml_value
from ddp_hydra.storage import manifest, urls
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.files import SUBMITTED
from ddp_hydra.writers.run_dir import LOCK, json_object, locked

KINDS = ("checkpoints", "logs", "other")
_LOGS = ("logs", "tensorboard", "profile")
_LAST = (SUBMITTED, ".hydra", "summary.json", "status.json", LOCK, OWNER)
"""Removed last, so that what is removed in part is still known as a run, and has an owner."""
_OF_RUN = re.compile(
    rf"\.hydra/(config|hydra|overrides|environment)\.yaml|metrics\.jsonl|(summary|status|tags|loggers)\.json|project\.zip|{OWNER}"
    rf"|{re.escape(urls.POINTER)}|{re.escape(SUBMITTED)}|{re.escape(LOCK)}"
    rf"|checkpoints/(manifest\.json|{manifest.FILES})"
    r"|logs/((rank-\d+|job|driver)\.log|slurm-\d+\.out)|tensorboard/(.+/)?events\.out\.tfevents\.[^/]+|\.resume/.+"
    r"|(checkpoints/|logs/|tensorboard/)?\.part-[0-9a-f]{12}(/[^/]+)?"
)
"""Files that a run writes, by their paths in its directory. The files of its ranks are in a list of their own."""
_OF_SWEEP = re.compile(
    r"sweep\.(json|csv|md|png)|seeds\.csv|multirun\.yaml|optimization_results\.yaml|cluster\.log|project\.zip"
    r"|(tensorboard/(.+/)?)?events\.out\.tfevents\.[^/]+|\.part-[0-9a-f]{12}|logs/slurm-\d+\.out"
)


def by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for name, size in sizes.items():
        top = name.partition("/")[0]
        kind = "checkpoints" if top == "checkpoints" else "logs" if top in (*_LOGS, "metrics.jsonl") else "other"
        found[kind] += size
    return found


def usage(roots: Sequence[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for place in places(roots, lambda root: RunRef.named(root).place):
        if urls.is_url(place):
            found |= {files.place: by_kind(files.sizes()) for files in stored_runs(place)}
        else:
            names = {name for name, _ in run_dirs(place)}
            seen: set[tuple[int, int]] = set()  # the jobs of a sweep share the file with their code
            found |= {name: by_kind(LocalRunFiles(name).sizes(without=names, seen=seen)) for name in sorted(names)}
    return found


@dataclass
class Removal:
    """What was removed, and what was not."""

    freed: int = 0
    left: list[str] = field(default_factory=list)


def count(run: str) -> int:
    return 1 if RunRef.own(run).is_stored and _stored_run(run) else len(removable(run))


def removable(run: str) -> list[Path]:
    folder = Path(RunRef.own(run).place)
    if folder.is_symlink():
        raise ConfigError(f"{run} is a link: give the folder itself, {os.path.realpath(folder)}")
    if not folder.is_dir():
        listed = text.after(text.meant_path(run), "type ddp-hydra runs ls, which lists the runs")
        raise ConfigError(f"{run}: there is no such folder{listed}")
    _refuse_closed(folder)
    names = set(os.listdir(folder))  # noqa: PTH208
    if SWEEP in names and (jobs := SweepJobs(str(folder))).objective.metric:
        if jobs.is_held():
            raise ConfigError(f"{run}: the sweep is running; end it first")
        return [Path(name) for name, _ in run_dirs(str(folder)) if is_ours(LocalRunFiles(name))]
    if not is_run(names) or not is_ours(LocalRunFiles(folder)):
        but = "it has files of such names, but ddp_hydra has not written them" if is_run(names) else ""
        raise ConfigError(
            f"{run} is not a run directory, nor the folder of a sweep; "
            f"{but or f'ddp-hydra runs ls {run} lists runs below it'}"
        )
    inner = [name for name, _ in run_dirs(str(folder)) if name != os.path.normpath(folder)]
    if inner:
        raise ConfigError(f"{run} holds other runs, too, such as {inner[0]}: remove these first")
    return [folder]


_LISTS = (SUBMITTED, f"{manifest.FOLDER}/{manifest.NAME}")
"""Files of a run that name others that it has written."""


def _refuse_closed(folder: Path) -> None:
    """Raise ConfigError if not all can be found that was written below the folder of a run or a sweep."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            advice = "let your user read it, or move it out of there"
            raise ConfigError(f"{error.filename}: {error.strerror}: nothing is removed: {advice}")

    for one, _, _ in os.walk(folder, onerror=refuse):
        for name in _LISTS:
            LocalRunFiles(one).refuse_closed(name)


def is_ours(files: RunFiles) -> bool:
    """Return whether ddp_hydra has written a run: many programs write a summary.json, and all of Hydra's a .hydra."""
    config, pointer = yaml_value(files.read(".hydra/config.yaml")), files.read(urls.POINTER)
    if isinstance(config, dict) and {"cluster", "dispatch", "results"} <= config.keys():
        return True
    if files.read(LOCK).startswith(b"process ") or urls.is_url(pointer.decode(errors="replace").strip()):
        return True
    first_line = files.read("metrics.jsonl").partition(b"\n")[0]
    return any(
        keys <= json_object(content).keys()
        for content, keys in (
            (files.read("summary.json"), {"status", "failure", "ddp_hydra"}),
            (files.read("status.json"), {"state", "time"}),
            (first_line, {"time", "attempt", "step"}),
        )
    )


def remove(run: str) -> Removal:
    """Remove what a run, or a sweep and its runs, have written, and the folders that are empty then.

    No link is followed or removed. Nobody can write a run while it is removed.
    """
    ref = RunRef.own(run)
    if ref.is_stored:
        return _remove_stored(run)
    folder, runs, removal = Path(ref.place), removable(run), Removal()
    is_sweep, sweeps = bool(SweepJobs(str(folder)).objective.metric), Sweeps()
    if is_sweep:
        from ddp_hydra.sweep.scheduler import sweep_locked  # it imports Dask
    try:
        with sweep_locked(folder) if is_sweep else nullcontext():
            for one in runs:
                if status_of(one) == "running":
                    raise ConfigError(f"{one} is running: end it first")
            for one in reversed(runs):  # those inside another one first
                if (one / OWNER).is_file():
                    _acquire(str(one.absolute()))
                with locked(one, "end it first"):  # one at a time: a process may not open files without end
                    _remove_files(one, written_by_run(LocalRunFiles(one)), removal)
                with contextlib.suppress(OSError):  # it is not empty, and so are not those above it
                    one.rmdir()
                    for parent in _parents_in_sweep(one, sweeps, is_sweep):
                        parent.rmdir()
            if is_sweep:
                _remove_files(folder, _OF_SWEEP.fullmatch, removal)
                with contextlib.suppress(OSError):
                    folder.rmdir()
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be removed: {error.strerror or error}") from None
    if folder.is_dir():
        removal.left = sorted(os.listdir(folder))  # noqa: PTH208
    return removal


def _parents_in_sweep(run: Path, sweeps: Sweeps, is_locked: bool) -> list[Path]:
    """Return the folders between a job and its sweep's, the deepest first; none while the sweep may make jobs there."""
    found = sweeps.of(str(run))
    if found is None or not (is_locked or not found[0].is_held()):
        return []
    sweep, job = found
    return [Path(sweep.folder, parent) for parent in Path(job).parents if parent.name]


def written_by_run(files: RunFiles) -> Callable[[str], object]:
    known = set(files.read(SUBMITTED).decode(errors="replace").split("\n"))
    known |= {f"logs/{name}.log" for name in _loggers(files)}
    with contextlib.suppress(ValueError):  # there is none, or it is broken
        entries = manifest.decode_manifest(files.read(f"{manifest.FOLDER}/{manifest.NAME}")).checkpoints
        known |= {
            str(file)
            for name, entry in entries.items()
            for file, _ in manifest.files_of(PurePosixPath(manifest.FOLDER, name), entry)
        }
    return lambda name: name in known or _OF_RUN.fullmatch(name)


def _loggers(files: RunFiles) -> set[str]:
    """Return the names of the loggers of a run: of its config, and of an earlier attempt with runs at services."""
    names, config = set(json_object(files.read("loggers.json"))), yaml_value(files.read(".hydra/config.yaml"))
    with contextlib.suppress(OmegaConfBaseException):  # of a broken file
        entries = OmegaConf.select(OmegaConf.create(config if isinstance(config, dict) else {}), "results.loggers")
        for entry in entries if isinstance(entries, ListConfig) else ():
            target = entry.get("_target_") if isinstance(entry, DictConfig) else entry
            names.add(str(target).rpartition(".")[2])
    return names


def _remove_files(folder: Path, is_written: Callable[[str], object], removal: Removal) -> None:
    sizes = {name: size for name, size in LocalRunFiles(folder).sizes().items() if is_written(name)}
    for name in sorted(sizes, key=_removal_order):
        (folder / name).unlink(missing_ok=True)
    removal.freed += sum(sizes.values())
    parents = {parent for name in sizes for parent in Path(name).parents if parent.name}
    for parent in sorted({*parents, *map(Path, (*_LOGS, "checkpoints"))}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # it is not empty
            (folder / parent).rmdir()


def _stored_run(url: str) -> StoredRunFiles:
    found = stored_runs(url)
    run = next((one for one in found if one.place == url.rstrip("/")), None)
    if run is None:
        raise ConfigError(f"{url} holds no run: give the URL that a run has printed; ddp-hydra runs ls {url} lists")
    if not is_ours(run):
        raise ConfigError(f"{url} is not a run: it has files of such names, but ddp_hydra has not written them")
    if len(found) > 1:
        other = next(one for one in found if one is not run)
        raise ConfigError(f"{url} holds other runs, too, such as {other.place}: remove these first")
    return run


def _remove_stored(url: str) -> Removal:
    files = _stored_run(url)
    sizes, is_written = files.sizes(), written_by_run(files)
    written = {name: size for name, size in sizes.items() if is_written(name)}
    with reachable():
        store = _acquire(url)
        try:
            for name in sorted({*written, OWNER}, key=_removal_order):
                store.delete(name)
        except TakenOver:
            raise _resumed(url) from None
    return Removal(sum(written.values()), sorted(sizes.keys() - written.keys()))


def _acquire(place: str) -> FencedStore:
    """Become the owner of a run that drivers write, so that none writes there meanwhile or later.

    The clock of a driver's host may be wrong, and its file system slow: so it is watched for some seconds.
    """
    store = FencedStore(urls.open_folder(place))
    owner = store.owner()
    if is_active(store):
        raise ConfigError(
            f"{place} is running: end it first, with ddp-hydra attach {shlex.quote(f'run={place}')} stop=true"
        )
    try:
        store.acquire(owner)
    except TakenOver:
        raise _resumed(place) from None
    return store


def _resumed(place: str) -> ConfigError:
    return ConfigError(f"{place}: another driver has resumed the run meanwhile")


def _removal_order(name: str) -> tuple[int, str]:
    top = name.partition("/")[0]
    return (_LAST.index(top) if top in _LAST else -1), name
