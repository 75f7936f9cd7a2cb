"""Describes the function that the ranks of one attempt run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hydra.console.text import plain
from ddp_hydra.results import Record


def show(record: Record) -> None:
    """Print the output of rank 0."""
    if record.kind == "log" and record.rank == 0:
        print(plain(record.data["text"]), end="", flush=True)  # noqa: T201


@dataclass(frozen=True)
class Call:
    """A function that each rank of an attempt calls, and its arguments.

    Args:
        fn: the function, or "module:name".
        args: passed to it.
        kwargs: passed to it.
        files: files of the client that rank 0 needs; if there are any, `fn` is called with files={name: path there}.
    """

    fn: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
