"""metrics.jsonl: one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddp_hydra.results import Record, finite
from ddp_hydra.writers.checks import metric_values
from ddp_hydra.writers.disk import AppendFile


class JsonLinesWriter:
    """Append each metrics record as a line: time, attempt, step, epoch, samples, then the metrics by name.

    `time` is in seconds since the epoch; NaN and infinities are null. A metric that is called like one of the
    line's own fields goes in as `metrics/<name>`; metrics of a rank other than 0 say their `rank`.

    Args:
        run_dir: gets or already has `metrics.jsonl`; lines are only added.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = AppendFile(run_dir / "metrics.jsonl", ends_with=b"\n")

    def write(self, record: Record) -> None:
        """Append the line of a metrics record."""
        if record.kind != "metrics":
            return
        line: dict[str, Any] = {
            "time": record.time_s,
            "attempt": record.attempt,
            "step": record.step,
            "epoch": record.data.get("epoch"),
            "samples": record.data.get("samples"),
        }
        line |= {"rank": record.rank} if record.rank else {}
        own = line.keys() | {"rank"}
        for name, value in finite(metric_values(record)).items():
            line[f"metrics/{name}" if name in own else name] = value
        self._file.append(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
