"""A job without TensorBoard or progress, to price them: `... some_writers FILE tensorboard -- <overrides>`.

FILE gets the CPU time of the command, which is client, writers and scheduler, in seconds.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

from rich.console import Console

from ddp_hydra.cli import main as cli
from ddp_hydra.job import run
from ddp_hydra.writers.default import default_writers


def main() -> None:
    """Run the command after `--`; before it are the file, and what to leave out."""
    at = sys.argv.index("--")
    file, *without = sys.argv[1:at]
    sys.argv[1:] = sys.argv[at + 1 :]
    display = Console(force_terminal=True)  # as a person has it, though nobody looks
    chosen = partial(default_writers, **dict.fromkeys(without, False), console=display)
    try:
        with mock.patch.object(run, "default_writers", chosen):
            cli.entry()
    finally:
        Path(file).write_text(repr(time.process_time()))


if __name__ == "__main__":
    main()
