"""Counts records of `results.*` that nobody reads, and reports them once."""

from __future__ import annotations

from collections import Counter

from ddp_hydra.console.text import counted
from ddp_hydra.results import Record

KINDS = {"metrics": "metrics record", "text": "text", "image": "image", "file": "file"}
"""Kinds of records that `results.log`, `text`, `image` and `submit` send, with a name for one record."""


class UnreadRecords:
    """Counts dropped records by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def note(self, record: Record) -> None:
        """Count a record, if it is one of `results.*`."""
        if record.kind in KINDS:
            self.counts[record.kind] += 1
            size = record.data.get("size", 0)
            self.bytes += size if isinstance(size, int) and size > 0 else 0

    def sentence(self) -> str:
        """Say what was dropped and how to receive it; "" if nothing was."""
        if not self.counts:
            return ""
        named = [counted(self.counts[kind], name) for kind, name in KINDS.items() if self.counts[kind]]
        size = f" ({self.bytes / 2**20:,.1f} MiB)" if self.counts["file"] else ""
        return (
            f"dropped, because nothing reads what the ranks sent with results.*: {', '.join(named)}{size}; have it "
            "written with run_dir=<folder>, or receive it with dispatch.Gang(client, on_record=<function of a record>) "
            "and files in there with the gang's fetch(record, path)"
        )
