"""What ranks print: logs/rank-<r>.log."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ddp_hydra.console.text import plain
from ddp_hydra.results import Record
from ddp_hydra.storage.files import AppendFile, place

_LINE_CHARS = 2000


class LogWriter:
    """Append each rank's output to its own file, and keep its last lines for failure messages.

    The file has what the rank wrote, byte for byte; from the second attempt on, a line tells where it begins.

    Args:
        run_dir: the job's run directory.
        tail_lines: lines kept in memory per rank.
    """

    def __init__(self, run_dir: Path, tail_lines: int = 40) -> None:
        self._run_dir = run_dir
        self._tail_lines = tail_lines
        self._tails: dict[int, deque[str]] = {}
        self._attempts: dict[int, int] = {}
        self._last: tuple[Record | None, bytes] = (None, b"")

    def write(self, record: Record) -> None:
        """Append the text of a log record.

        Raises:
            RecordError: the file cannot be written.
        """
        if record.kind != "log":
            return
        if record is not self._last[0]:  # the same one comes again when it could not be written
            self._last = (record, self._take(record))
        # Opened each time: a job may have more ranks than a process may have open files.
        with AppendFile(place(self._run_dir, f"logs/rank-{record.rank}.log")) as file:
            file.append(self._last[1])

    def _take(self, record: Record) -> bytes:
        """Remember the text, and return what goes into the file."""
        rank, text = record.rank, record.data["text"]
        before = self._attempts.get(rank, 0)
        self._attempts[rank] = record.attempt
        head = ""
        if record.attempt != before:
            head = f"{'' if self._ends_line(rank) else chr(10)}--- attempt {record.attempt} ---\n"
            self._tails.pop(rank, None)
        self._remember(rank, text)
        return (head + text).encode(errors="backslashreplace")

    def tail(self, rank: int) -> list[str]:
        """Return the last lines that a rank wrote in its newest attempt, without control characters."""
        lines = [plain(line.rstrip("\r").rpartition("\r")[2]) for line in self._tails.get(rank, ())]
        return lines[:-1] if lines and not lines[-1] else lines

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open; `tail` still answers."""

    def _ends_line(self, rank: int) -> bool:
        tail = self._tails.get(rank)
        return not tail or not tail[-1]

    def _remember(self, rank: int, text: str) -> None:
        """The deque's last item is the line that is still being written."""
        tail = self._tails.setdefault(rank, deque([""], maxlen=self._tail_lines + 1))
        first, *rest = text.split("\n")
        tail[-1] = (tail[-1] + first)[-_LINE_CHARS:]
        tail.extend(line[-_LINE_CHARS:] for line in rest)
