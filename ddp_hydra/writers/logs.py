"""logs/rank-<r>.log: what a rank wrote to its stdout and stderr."""

from __future__ import annotations

from pathlib import Path

from ddp_hydra.record import Log, Record
from ddp_hydra.storage.files import AppendFile, place


class LogWriter:
    """Appends each rank's output to its own file.

    The file has what the rank wrote, byte for byte. From the second attempt on, a line marks where an attempt begins.

    Args:
        run_dir: the job's run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._attempts: dict[int, int] = {}  # of each rank: the newest
        self._in_line: set[int] = set()  # ranks whose last line has not ended
        self._last: tuple[Record | None, bytes] = (None, b"")

    def write(self, record: Record) -> None:
        """Append the text of a log record.

        Raises:
            RecordError: the file cannot be written.
        """
        if not isinstance(record.data, Log):
            return
        if record is not self._last[0]:  # the handler gives the same record again after a failed write
            self._last = (record, self._content(record, record.data.text))
        # Opened each time: a job may have more ranks than a process may have open files.
        with AppendFile(place(self._run_dir, f"logs/rank-{record.rank}.log")) as file:
            file.append(self._last[1])

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _content(self, record: Record, text: str) -> bytes:
        """Return what the record adds to the file."""
        rank = record.rank
        head = ""
        if record.attempt != self._attempts.get(rank, 0):
            head = f"{chr(10) if rank in self._in_line else ''}--- attempt {record.attempt} ---\n"
            self._in_line.discard(rank)
        self._attempts[rank] = record.attempt
        if text:
            (self._in_line.discard if text.endswith("\n") else self._in_line.add)(rank)
        return (head + text).encode(errors="backslashreplace")
