"""`python -m ddp_hydra`."""

import contextlib
import gc
import re
import sys
from typing import Any

FLAGS = ("-m", "--multirun")
"""Options with which a job starts. Others may only print, and a word without = names a command."""
RANKS_ELSEWHERE = ("cluster=", "detach=", "dry_run=", "hydra.job.env_set", "hydra/launcher=")
"""Beginnings of overrides with which the ranks run on other machines, or in another environment."""
OF_CLUSTER = ("cluster=", "cluster.", "experiment=")
"""Beginnings of overrides that may choose the cluster."""
CLUSTER = r"^\s*-\s*(?:override\s+)?/?cluster:\s*(\w+)"
"""The choice of a cluster in a list of defaults."""


def main() -> None:
    """Run `python -m ddp_hydra` and the console script. Signals are handled before anything else is imported."""
    from ddp_hydra.console import signals

    signals.open_standard_files()
    signals.leave_at_once()
    from ddp_hydra.errors import DdpHydraError
    from ddp_hydra.rank import fork_client, torchrun

    try:
        place = torchrun.find_place()
    except DdpHydraError as error:
        print(f"ddp_hydra: {error}", file=sys.stderr, flush=True)  # noqa: T201
        torchrun.end_other_hosts()
        sys.exit(1)
    if place is None:
        run()
        return
    if place.local_rank:
        torchrun.end_with_first(place)
    with torchrun.ended_together(place):
        if place.hosts > 1:
            torchrun.Hosts.connect()
        if not place.rank:
            run()
            return
        fork_client.hold()  # this process is the worker of a host other than the first one
        from ddp_hydra.cli.main import report
        from ddp_hydra.cluster.kinds import torchrun as kind

        sys.exit(report(lambda: sys.exit(kind.work_on_host(place, lambda: cluster_of(sys.argv[1:])))))


def cluster_of(arguments: list[str]) -> Any:
    """Return the cluster of a command, also on a host that lacks the folder of its configs, or of a run it resumes."""
    from ddp_hydra.cli.compose import compose, with_joined_values
    from ddp_hydra.cli.resumed import with_resumed_overrides
    from ddp_hydra.errors import DdpHydraError

    with contextlib.suppress(DdpHydraError, OSError):
        words = with_resumed_overrides(with_joined_values(arguments))
        kept = (*OF_CLUSTER, "--config-", "hydra.searchpath=")
        return compose([one for one in words if one.lstrip("+~").startswith(kept)]).cluster
    return compose([one for one in arguments if one.lstrip("+~").startswith(OF_CLUSTER)]).cluster


def run() -> None:
    """Run the command in this process. Of the processes that torchrun has started, only RANK 0 does."""
    gc.disable()  # until the config is composed
    prestart(sys.argv[1:])
    from ddp_hydra.cli.main import entry

    entry()


def prestart(arguments: list[str]) -> None:
    """Start the fork server before Hydra is imported, if the command seems to train on this machine.

    The import of torch takes longer than all else before the first step, so it should begin with the command. Whether
    the job needs the server is known once its config is composed, half a second later. A guess that was wrong costs no
    more: the server ends as soon as this process lets it go.
    """
    from ddp_hydra.errors import DdpHydraError
    from ddp_hydra.rank import fork_client

    if is_likely(arguments):
        with contextlib.suppress(DdpHydraError, OSError):  # the job says so
            fork_client.hold()


def is_likely(arguments: list[str]) -> bool:
    from ddp_hydra.config import project
    from ddp_hydra.errors import DdpHydraError
    from ddp_hydra.rank import torchrun

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
        chosen = re.search(CLUSTER, config.read_text(), re.MULTILINE) if config.exists() else None
        return (chosen[1] if chosen else "local") == here
    return False


if __name__ == "__main__":  # Dask's workers import this module, too
    main()
