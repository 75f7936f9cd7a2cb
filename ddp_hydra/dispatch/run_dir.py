"""Writes what a user's own function logs and submits into a run directory, as a job does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ddp_hydra
from ddp_hydra.errors import ConfigError
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.results import finite
from ddp_hydra.run_state import Summary
from ddp_hydra.writers.files import Fetch
from ddp_hydra.writers.handler import ResultsHandler, default_writers
from ddp_hydra.writers.run_dir import add_error, locked, read_summary, write_summary

ANOTHER = "give another folder, run_dir=<folder>"


def local_path(run_dir: str | Path) -> Path:
    """Return a run directory as a path.

    Raises:
        ConfigError: it is a URL.
    """
    if "://" in str(run_dir):
        raise ConfigError(f"run_dir={str(run_dir)!r} is a URL: give a folder of this machine, and copy it afterwards")
    return Path(run_dir).expanduser().absolute()


@contextmanager
def recorded(
    run_dir: Path, fetch: Fetch, retry_s: float, give_up: threading.Event, describe: Callable[[], dict[str, Any]]
) -> Iterator[Callable[[Record], None]]:
    """Write records into a run directory, and at the end summary.json, also when the block fails.

    Raises:
        ConfigError: the folder holds a run that is done, or another process writes it.
    """
    with locked(run_dir, ANOTHER):
        if (before := read_summary(run_dir)) is not None and before.status == "done":
            raise ConfigError(f"{run_dir} holds a run that is done, and its results would be mixed: {ANOTHER}")
        begin = time.time()
        summary = Summary(status="failed", started=begin)
        try:
            writers = default_writers(run_dir, fetch, retry_s=retry_s, give_up=give_up, progress=False)
            with ResultsHandler(writers, retry_s, give_up) as handler:
                try:
                    yield with_starts(handler.handle)
                except KeyboardInterrupt:
                    give_up.set()
                    raise
                finally:
                    summary.update({"steps": handler.step, "metrics": finite(handler.metrics), **describe()})
            summary.status = "done"
        except BaseException as error:
            add_error(summary, error)
            raise
        finally:
            summary.update({"wall_s": time.time() - begin, "ddp_hydra": ddp_hydra.__version__})
            write_summary(run_dir, summary)


def with_starts(handle: Callable[[Record], None]) -> Callable[[Record], None]:
    """Return a function that passes records on, a start record before the first metrics of each further attempt.

    The training loop sends start records itself. A user's own function does not say where a new attempt begins, but its
    first metrics do: the lines and curves of the failed attempt are removed from that step on.
    """
    attempt = 0

    def pass_on(record: Record) -> None:
        nonlocal attempt
        if isinstance(record.data, Metrics) and record.attempt > attempt and record.step is not None:
            attempt = record.attempt
            begin = max(0, record.step - 1)
            handle(Record(Start(), 0, begin, record.time_s, record.attempt))
        handle(record)

    return pass_on
