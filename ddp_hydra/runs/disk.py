"""Measures the size of runs, and removes them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddp_hydra.errors import ConfigError, TakenOver
from ddp_hydra.job.remote.fence import OWNER, FencedStore
from ddp_hydra.job.remote.uploader import is_active
from ddp_hydra.runs.describe import status_of
from ddp_hydra.runs.find import SWEEP, SweepJobs, run_dirs, stored_runs
from ddp_hydra.runs.run_files import LocalRunFiles, StoredRunFiles, is_run, reachable
from ddp_hydra.storage import urls
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.run_dir import LOCK, locked

KINDS = ("checkpoints", "logs", "other")
_LOGS = ("logs", "tensorboard", "profile")
_LAST = (".hydra", "summary.json", "status.json", LOCK, OWNER)
"""Removed last, so that what is removed in part is still known as a run, and has an owner."""


def by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for name, size in sizes.items():
        top = name.partition("/")[0]
        kind = "checkpoints" if top == "checkpoints" else "logs" if top in (*_LOGS, "metrics.jsonl") else "other"
        found[kind] += size
    return found


def usage(roots: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the bytes of each kind for each run below some folders and URLs, by run."""
    found: dict[str, dict[str, int]] = {}
    for root in roots:
        ref = RunRef.named(root)
        place = ref.place
        if ref.is_stored:
            found |= {files.place: by_kind(files.sizes()) for files in stored_runs(place)}
        elif Path(place).is_dir():
            names = {name for name, _ in run_dirs(place)}
            seen: set[tuple[int, int]] = set()  # the jobs of a sweep share the file with their code
            found |= {name: by_kind(LocalRunFiles(name).sizes(without=names, seen=seen)) for name in sorted(names)}
        else:
            raise ConfigError(f"{root}: there is no such folder: give one that holds runs, outputs, or a URL")
    return found


def count(run: str) -> int:
    return 1 if RunRef.own(run).is_stored and _stored_run(run) else len(removable(run))


def removable(run: str) -> list[Path]:
    folder = Path(RunRef.own(run).place)
    if folder.is_symlink():
        raise ConfigError(f"{run} is a link: give the folder itself, {os.path.realpath(folder)}")
    if not folder.is_dir():
        raise ConfigError(f"{run}: there is no such folder")
    names = set(os.listdir(folder))  # noqa: PTH208
    if SWEEP in names:
        if SweepJobs(str(folder)).is_held():
            raise ConfigError(f"{run}: the sweep is running; end it first")
        return [Path(name) for name, _ in run_dirs(str(folder))]
    if not is_run(names):
        raise ConfigError(
            f"{run} is not a run directory, nor the folder of a sweep; ddp-hydra runs ls {run} lists runs below it"
        )
    inner = [name for name, _ in run_dirs(str(folder)) if name != os.path.normpath(folder)]
    if inner:
        raise ConfigError(f"{run} holds other runs, too, such as {inner[0]}: remove these first")
    return [folder]


def remove(run: str) -> int:
    """Remove a run, or the folder of a sweep with its runs, and return the bytes that are freed.

    No link is followed: a link inside is removed itself. Nobody can write a run while it is removed.
    """
    ref = RunRef.own(run)
    if ref.is_stored:
        return _remove_stored(run)
    folder, runs = Path(ref.place), removable(run)
    for one in runs:
        if status_of(one) == "running":
            raise ConfigError(f"{one} is running: end it first")
    freed = sum(LocalRunFiles(folder).sizes().values())
    try:
        for one in reversed(runs):  # those inside another one first
            if (one / OWNER).is_file():
                _acquire(str(one.absolute()))
            with locked(one, "end it first"):  # one at a time: a sweep may have more jobs than a process may open files
                _remove_run(one)
        if folder not in runs:
            shutil.rmtree(folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be removed: {error.strerror or error}") from None
    return freed


def _remove_run(run_dir: Path) -> None:
    for name in sorted(os.listdir(run_dir), key=_removal_order):  # noqa: PTH208
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        run_dir.rmdir()


def _stored_run(url: str) -> StoredRunFiles:
    found = stored_runs(url)
    run = next((one for one in found if one.place == url.rstrip("/")), None)
    if run is None:
        raise ConfigError(f"{url} holds no run: give the URL that a run has printed; ddp-hydra runs ls {url} lists")
    if len(found) > 1:
        other = next(one for one in found if one is not run)
        raise ConfigError(f"{url} holds other runs, too, such as {other.place}: remove these first")
    return run


def _remove_stored(url: str) -> int:
    sizes = _stored_run(url).sizes()
    with reachable():
        store = _acquire(url)
        try:
            for name in sorted({*sizes, OWNER}, key=_removal_order):
                store.delete(name)
        except TakenOver:
            raise _resumed(url) from None
    return sum(sizes.values())


def _acquire(place: str) -> FencedStore:
    """Become the owner of a run that drivers write, so that none writes there meanwhile or later.

    The clock of a driver's host may be wrong, and its file system slow: so it is watched for some seconds.
    """
    store = FencedStore(urls.open_folder(place))
    owner = store.owner()
    if is_active(store):
        raise ConfigError(f"{place} is running: end it first, with ddp-hydra attach run={place} stop=true")
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
