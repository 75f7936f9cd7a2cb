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
    root = results_root.open_folder(url)
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(row, [run_below(root, name) for name in run_names(root)]))


def run_names(root: ResultsFolder) -> list[str]:
    """Return the names of the runs below a folder of a store, "" for the folder itself."""
    found: dict[str, None] = {}
    try:
        with reachable():
            for name, _ in root.objects():
                folder, _, file = name.rpartition("/")
                if file in ("status.json", "summary.json"):
                    found[folder] = None
                elif folder.endswith(".hydra"):
                    found[folder.removesuffix(".hydra").rstrip("/")] = None
    except FileNotFoundError as error:
        raise ConfigError(f"{error}: check the URL") from None
    return list(found)


def run_below(root: ResultsFolder, name: str) -> StoredRun:
    """Return the files of a run below a folder; arguments as `run_names` returns them."""
    prefix = "/".join(filter(None, (root.prefix, name)))
    return StoredRun(ResultsFolder(f"{root.url}/{name}".rstrip("/"), root.store, prefix))


def row(files: StoredRun) -> Row:
    """Return the row of a run in a store."""
    summary, now = read_both(files)
    found = row_of(files, summary, now)
    found.status = status.of_stored(summary.get("status"), now)
    return found
