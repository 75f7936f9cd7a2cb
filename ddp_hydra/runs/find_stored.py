"""Find the runs below a URL, and return their rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ddp_hydra.errors import ConfigError
from ddp_hydra.runs import status
from ddp_hydra.runs.describe import Row, read_both, row_of
from ddp_hydra.runs.run_files import StoredRun, reachable
from ddp_hydra.storage import results_root
from ddp_hydra.storage.results_root import ResultsFolder

_THREADS = 16


def rows(url: str) -> list[Row]:
    """Return the rows of all runs below a URL.

    Raises:
        ConfigError: the store does not answer, or may not be read.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(row, runs(url)))


def runs(url: str) -> list[StoredRun]:
    """Return all runs below a URL, from one listing.

    Raises:
        ConfigError: the store does not answer, or may not be read.
    """
    root = results_root.open_folder(url)
    try:
        with reachable():
            objects = dict(root.objects())
    except FileNotFoundError as error:
        raise ConfigError(f"{error}: check the URL") from None
    found: dict[str, dict[str, int]] = {}
    for name in objects:
        folder, _, file = name.rpartition("/")
        if file in ("status.json", "summary.json"):
            found.setdefault(folder, {})
        elif folder.rpartition("/")[2] == ".hydra":
            found.setdefault(folder.removesuffix(".hydra").rstrip("/"), {})
    for name, size in objects.items():
        folder = name
        while folder:  # the innermost run that holds it
            folder = folder.rpartition("/")[0]
            if folder in found:
                found[folder][name[len(folder) :].lstrip("/")] = size
                break
    return [StoredRun(_below(root, name), listed) for name, listed in found.items()]


def _below(root: ResultsFolder, name: str) -> ResultsFolder:
    prefix = "/".join(filter(None, (root.prefix, name)))
    return ResultsFolder(f"{root.url}/{name}".rstrip("/"), root.store, prefix)


def row(files: StoredRun) -> Row:
    """Return the row of a run in a store."""
    summary, now = read_both(files)
    found = row_of(files, summary, now)
    found.status = status.of_stored(summary.get("status"), now)
    return found
