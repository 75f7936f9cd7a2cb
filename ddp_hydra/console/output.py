"""Standard output and error that outlast whoever reads them: `| head`, a terminal that is closed."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class LastingFile(io.FileIO):
    """A descriptor to write to, which takes all and drops what it cannot pass on.

    Args:
        descriptor: stays open.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Write as much as goes in one call; what nobody takes any more counts as written."""
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


@contextmanager
def lasting() -> Iterator[None]:
    """Let no run fail inside the block because nobody reads what it prints.

    What a test or a notebook has put in the place of the standard streams is left alone.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _lasting(sys.stdout) if sys.stdout is sys.__stdout__ else sys.stdout
    sys.stderr = _lasting(sys.stderr) if sys.stderr is sys.__stderr__ else sys.stderr
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: Any) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None, where the descriptor was closed before Python began
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = LastingFile(stream.fileno())
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
