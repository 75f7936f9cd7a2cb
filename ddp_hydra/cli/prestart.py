"""Starts the fork server before Hydra is imported, if the command seems to train on this machine.

The import of torch takes longer than all else before the first step, so it should begin with the command. Whether the
job needs the server is known once its config is composed, half a second later. A guess that was wrong costs no more:
the server ends as soon as this process lets it go.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from ddp_hydra.config import project
from ddp_hydra.errors import DdpHydraError
from ddp_hydra.rank import fork_client, torchrun

FLAGS = ("-m", "--multirun")
"""Options with which a job starts. Others may only print, and a word without = names a command."""
RANKS_ELSEWHERE = ("cluster=", "detach=", "dry_run=", "hydra.job.env_set", "hydra/launcher=")
"""Beginnings of overrides with which the ranks run on other machines, or in another environment."""
CLUSTER = re.compile(r"^\s*-\s*(?:override\s+)?/?cluster:\s*(\w+)", re.MULTILINE)
"""The choice of a cluster in a list of defaults."""


def begin(arguments: Sequence[str]) -> None:
    if is_likely(arguments):
        with contextlib.suppress(DdpHydraError, OSError):  # the job says so
            fork_client.hold()


def end_unless(is_needed: bool) -> None:
    if not is_needed:
        fork_client.release()


def is_likely(arguments: Sequence[str]) -> bool:
    here = "torchrun" if torchrun.is_here() else "local"
    for word in arguments:
        if word not in FLAGS and (word.startswith("-") or "=" not in word):
            return False
        if word.startswith(RANKS_ELSEWHERE) and word != f"cluster={here}":
            return False
    if f"cluster={here}" in arguments:
        return True
    with contextlib.suppress(DdpHydraError, OSError, UnicodeError):
        config = project.find() / "conf" / "config.yaml"
        chosen = CLUSTER.search(config.read_text()) if config.exists() else None
        return (chosen[1] if chosen else "local") == here
    return False
