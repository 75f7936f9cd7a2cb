"""A job without TensorBoard or progress, so that they can be priced: `... some_writers tensorboard -- <overrides>`."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

from rich.console import Console

from ddp_hydra import cli, job
from ddp_hydra.writers import default_writers


def main() -> None:
    """Run the command after `--`; before it is what to leave out."""
    at = sys.argv.index("--")
    chosen = dict.fromkeys(sys.argv[1:at], False)
    sys.argv[1:] = sys.argv[at + 1 :]
    display = Console(force_terminal=True)  # as a person has it, though nobody looks
    with mock.patch.object(job, "default_writers", partial(default_writers, **chosen, console=display)):
        cli.entry()


if __name__ == "__main__":
    main()
