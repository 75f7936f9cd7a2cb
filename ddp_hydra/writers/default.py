"""Makes the writers of a run directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ddp_hydra.run_state import AttemptEntry
from ddp_hydra.storage.base import Store
from ddp_hydra.writers.base import Fetch, Writer


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
    attempts: Callable[[], list[AttemptEntry]] = list,
) -> list[Writer]:
    """Return the writers of a run directory.

    Args:
        run_dir: created if it is missing.
        fetch: copies files from the ranks' hosts; None if every file comes inline.
        keep: newest step checkpoints to keep; None keeps all.
        mirror: folder to copy checkpoints to, "s3://bucket/folder"; None: none.
        before_mirror: called each time before checkpoints are copied.
        mirror_store: the mirror, if it is open already.
        retry_s: how long to retry a failing bucket.
        give_up: an event that ends all waiting for the bucket at once.
        tensorboard: whether to write TensorBoard events.
        progress: whether to show the live display.
        attempts: returns the attempts that have failed, for status.json.

    Raises:
        RecordError: the run directory cannot be written.
        ConfigError: `keep` or `mirror` is wrong, or the bucket refuses access.
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

    writers.append(StatusWriter(folder, attempts=attempts))
    if progress:
        from ddp_hydra.writers.progress import ProgressWriter

        writers.append(ProgressWriter())
    return writers
