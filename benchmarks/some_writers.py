"""Runs a job without TensorBoard or progress, to measure their cost: `... some_writers FILE tensorboard -- <words>`.

FILE gets the CPU time of the command in seconds: client, writers and scheduler.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

from ddp_hydra.cli.main import entry
from ddp_hydra.job import run
from ddp_hydra.writers.handler import default_writers


def main() -> None:
    """Run the command after `--`; before it are the file, and the writers to leave out."""
    at = sys.argv.index("--")
    file, *without = sys.argv[1:at]
    sys.argv[1:] = sys.argv[at + 1 :]
    os.environ["FORCE_COLOR"] = "1"  # rich then writes as on a terminal
    chosen = partial(default_writers, **dict.fromkeys(without, False))
    try:
        with mock.patch.object(run, "default_writers", chosen):
            entry()
    finally:
        Path(file).write_text(repr(time.process_time()))


if __name__ == "__main__":
    main()
