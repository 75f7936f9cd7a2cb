"""Writers turn a job's records into files and a display, where the command was typed.

    handler      the one consumer of a job's records: checks each, hands it to every writer
    checks       what a record must look like before a writer sees it
    jsonl        metrics.jsonl
    tensorboard  tensorboard/events…
    hparams      what TensorBoard's HParams tab wants; no writer, for it knows how the job ended
    files        any file a rank submits
    checkpoints  checkpoints/, with last.pt, best.pt, manifest.json and retention
    mirror       a copy of checkpoints/ in a bucket
    logs         logs/rank-<r>.log
    progress     the live display
    status       status.json, while the job runs
    incoming, disk, patience, events    what they share: complete files, careful disk access, waiting for a full
                                        disk, TensorBoard's format

No torch here, and nothing that a rank sent is unpickled. The writers themselves are imported by
`default_writers` only, so that a reader of checkpoints pays for none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddp_hydra.results import Record

if TYPE_CHECKING:
    from rich.console import Console

    from ddp_hydra.storage.results_root import Store
    from ddp_hydra.writers.handler import ResultsHandler

Fetch = Callable[[Record, Path], None]
"""Brings the complete content of a file record's `source` to a path that does not exist yet."""


class Writer(Protocol):
    """Turns records into files. It gets every record and picks the kinds that it knows."""

    def write(self, record: Record) -> None:
        """Take one record, already checked by the handler."""

    def flush(self) -> None:
        """Make what was written so far visible to other programs."""

    def close(self) -> None:
        """End well; called once, also after a failure."""


def default_writers(
    run_dir: str | Path,
    fetch: Fetch | None = None,
    *,
    keep: int | None = 3,
    mirror: str | None = None,
    before_mirror: Callable[[], None] = lambda: None,
    mirror_store: Store | None = None,
    retry_s: float = 60.0,
    give_up: threading.Event | None = None,
    tensorboard: bool = True,
    progress: bool = True,
    console: Console | None = None,
) -> list[Writer]:
    """Return the writers of a run directory as designed.

    Args:
        run_dir: made if it is missing.
        fetch: brings files from the ranks' hosts; None where every file comes inline.
        keep: newest step checkpoints to keep; None keeps all.
        mirror: copy checkpoints to this folder, "s3://bucket/folder", too.
        before_mirror: called before each time.
        mirror_store: that folder, where it is not opened by its URL.
        retry_s: how long to try a failing bucket again.
        give_up: ends all waiting for the bucket at once, when set.
        tensorboard: write TensorBoard events.
        progress: show the live display.
        console: where to show it; None is stdout.

    Raises:
        RecordError: the run directory cannot be written.
        ConfigError: `keep` or `mirror` is not good, or the bucket lets nobody in.
    """
    from ddp_hydra.storage.files import open_run_dir
    from ddp_hydra.writers.checkpoints import CheckpointWriter
    from ddp_hydra.writers.jsonl import JsonLinesWriter
    from ddp_hydra.writers.logs import LogWriter
    from ddp_hydra.writers.submitted_files import FileWriter

    folder = open_run_dir(run_dir)
    writers: list[Writer] = [
        LogWriter(folder),
        JsonLinesWriter(folder),
        FileWriter(folder, fetch),
        CheckpointWriter(folder, fetch, keep),
    ]
    if mirror:
        from ddp_hydra.writers.checkpoint_mirror import MirrorWriter

        writers.append(MirrorWriter(folder, mirror, retry_s, give_up, before=before_mirror, remote=mirror_store))
    if tensorboard:
        from ddp_hydra.writers.tensorboard import TensorBoardWriter

        writers.append(TensorBoardWriter(folder))
    from ddp_hydra.writers.status import StatusWriter

    writers.append(StatusWriter(folder))
    if progress:
        from ddp_hydra.writers.progress import ProgressWriter

        writers.append(ProgressWriter(console))
    return writers


def __getattr__(name: str) -> object:
    if name == "ResultsHandler":  # handler imports Writer from here
        from ddp_hydra.writers.handler import ResultsHandler

        return ResultsHandler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Fetch", "ResultsHandler", "Writer", "default_writers"]
