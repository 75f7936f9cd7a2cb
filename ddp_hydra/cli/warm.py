"""`ddp-hydra warm`: show the fork servers that are warm on this machine, or end them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import fork_client

USAGE = """ddp-hydra warm          # the fork servers of this machine that have torch imported for the next job
ddp-hydra warm stop     # end them; one that has ranks ends after the last of them"""
STOP_S = 5.0
"""Seconds that a server without ranks may take to end."""


def main(words: Sequence[str]) -> None:
    """Show the fork servers, or end them.

    Raises:
        ConfigError: unknown words.
    """
    if {"-h", "--help"} & set(words):
        print(USAGE)  # noqa: T201
        return
    if list(words) not in ([], ["stop"]):
        raise ConfigError(f"{' '.join(words)!r} is not known; usage:\n{USAGE}")
    found = {address: status for address in addresses() if (status := fork_client.ask(address, "status")) is not None}
    if not found:
        print("no fork server runs")  # noqa: T201
    for address, status in found.items():
        print(describe(status))  # noqa: T201
        if words:
            print(f"  {stop(address)}")  # noqa: T201


def addresses() -> list[Path]:
    """Return the sockets of this user's fork servers."""
    folder = fork_client.runtime_folder()
    return sorted(folder.glob("*.sock")) if folder.is_dir() else []


def describe(status: dict[str, Any]) -> str:
    """Return one line about a server."""
    if not status:
        return "a fork server that does not answer: it is importing torch, or it is suspended"
    ends_in_s = status["ends_in_s"]
    ranks = f"{status['ranks']} rank{'s' * (status['ranks'] != 1)}"
    use = f"in use, {ranks}" if ends_in_s is None else f"idle, ends in {ends_in_s:.0f} s"
    return (
        f"process {status['pid']}: {use}, {status['age_s']:.0f} s old, {status['memory'] / 2**20:.0f} MiB, "
        f"{status['python']}"
    )


def stop(address: Path) -> str:
    """End a server, and return in words how that went."""
    status = fork_client.ask(address, "stop")
    if status and status["ends_in_s"] is None:
        return "ends after its last rank"
    deadline = time.monotonic() + STOP_S
    while fork_client.ask(address, "status") is not None:
        if time.monotonic() > deadline:
            return "has not ended yet"
        time.sleep(0.02)
    return "has ended"
