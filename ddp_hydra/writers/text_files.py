"""Writes metrics.jsonl, with one JSON object per line, and logs/rank-<r>.log with the stdout and stderr of a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddp_hydra.record import Log, Metrics, Record, Start
from ddp_hydra.results import finite
from ddp_hydra.storage.files import AppendFile, prepared_path, write_atomic, writing
from ddp_hydra.writers.run_dir import json_object


class JsonLinesWriter:
    """Appends each metrics record as a line: time, attempt, step, epoch, samples, then the metrics by name.

    `time` is in seconds since 1970; NaN and infinities are null. A metric with the name of one of the line's own fields
    is written as `metrics/<name>`. Metrics of a rank other than 0 have the field `rank`.

    When a new attempt starts, or the run is resumed in its folder, the lines after the step from which it continues are
    removed, so that the file has each step once.

    Args:
        run_dir: the job's run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = AppendFile(self._path, ends_with=b"\n")
        self._attempt = 0

    def write(self, record: Record) -> None:
        if isinstance(record.data, Start) and record.rank == 0 and record.attempt >= self._attempt:
            self._attempt = record.attempt
            self._cut(record.step or 0)
        if not isinstance(record.data, Metrics) or record.attempt < self._attempt:
            return
        line: dict[str, Any] = {
            "time": record.time_s,
            "attempt": record.attempt,
            "step": record.step,
            "epoch": record.data.epoch,
            "samples": record.data.samples,
        }
        line |= {"rank": record.rank} if record.rank else {}
        own = line.keys() | {"rank"}
        for name, value in finite(record.data.metrics).items():
            line[f"metrics/{name}" if name in own else name] = value
        self._file.append(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def _cut(self, step: int) -> None:
        """Keep the lines up to a step, and remove the incomplete line of a process that was killed."""
        with writing(self._path):
            lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        # What a run logs at step 0, before its first step, it logs again when it starts from there.
        last = step or -1
        kept = [
            line
            for line in lines
            if (found := json_object(line)) and not (isinstance(known := found.get("step"), int) and known > last)
        ]
        if len(kept) < len(lines):
            self._file.close()
            write_atomic(self._path, b"".join(kept))

    def close(self) -> None:
        self._file.close()


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
        if not isinstance(record.data, Log):
            return
        if record is not self._last[0]:  # the handler gives the same record again after a failed write
            self._last = (record, self._content(record, record.data.text))
        # Opened each time: a job may have more ranks than a process may have open files.
        with AppendFile(prepared_path(self._run_dir, f"logs/rank-{record.rank}.log")) as file:
            file.append(self._last[1])

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _content(self, record: Record, text: str) -> bytes:
        rank = record.rank
        head = ""
        if record.attempt != self._attempts.get(rank, 0):
            head = f"{chr(10) if rank in self._in_line else ''}--- attempt {record.attempt} ---\n"
            self._in_line.discard(rank)
        self._attempts[rank] = record.attempt
        if text:
            (self._in_line.discard if text.endswith("\n") else self._in_line.add)(rank)
        return (head + text).encode(errors="backslashreplace")
