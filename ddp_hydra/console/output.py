"""Keeps printing harmless where nobody reads any more (`| head`, a closed terminal), or characters are lacking."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class LastingFile(io.FileIO):
    """Writes to a file descriptor, and drops what cannot be written.

    Args:
        descriptor: file descriptor; it is not closed.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Write as much as one call can; what nobody reads any more counts as written."""
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def printed(text: str) -> None:
    """Print to a standard output that may be the user's own, which may lack characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)  # noqa: T201


@contextmanager
def lasting() -> Iterator[None]:
    """Let nothing inside the block fail because nobody reads what it prints, or the encoding lacks a character.

    Streams that a test or a notebook uses instead of the standard ones are not changed.
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
    if not isinstance(stream, io.TextIOWrapper):  # None if the descriptor was closed before Python began
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = LastingFile(stream.fileno())
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # what the terminal's encoding lacks
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
