"""Writes the files that ranks submit."""

from __future__ import annotations

from pathlib import Path

from ddp_hydra.errors import RecordError
from ddp_hydra.record import RESERVED, File, Record, check_path
from ddp_hydra.storage.files import place
from ddp_hydra.writers.base import Fetch
from ddp_hydra.writers.receive_file import FileReceiver


class FileWriter:
    """Writes each submitted file into the run directory; another writer handles checkpoints.

    Args:
        run_dir: the job's run directory.
        fetch: copies files that are not inline.
    """

    def __init__(self, run_dir: Path, fetch: Fetch | None = None) -> None:
        self._run_dir = run_dir
        self._receiver = FileReceiver(fetch)

    def write(self, record: Record) -> None:
        """Receive the file of a 'file' record without a checkpoint; a later file with the same path replaces it.

        Raises:
            RecordError: its path is not allowed, or it did not arrive whole; see `FileReceiver.receive`.
        """
        if not isinstance(record.data, File) or record.checkpoint is not None:
            return
        path = check_path(record.data.path)
        # On some file systems, Checkpoints and checkpoints are the same name.
        if len(path.parts) < 2 or path.parts[0].casefold() in RESERVED:
            raise RecordError(
                f"rank {record.rank} submitted {record.data.path!r}; a submitted file goes into a folder of its "
                f"own, for example 'samples/epoch-3.txt': {', '.join(RESERVED)} and what lies beside them belong to "
                "the run"
            )
        self._receiver.receive(record, place(self._run_dir, path))

    def close(self) -> None:
        """Delete the file that was not received completely."""
        self._receiver.drop()
