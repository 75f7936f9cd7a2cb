"""What each process does that torchrun has started: only the first one runs the command."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ddp_hydra.errors import DdpHydraError
from ddp_hydra.rank import fork_client, torchrun
from ddp_hydra.rank.torchrun import Hosts, ProcessPlace


def run(command: Callable[[], None]) -> None:
    """Run a command in the process of RANK 0; have all others end with it."""
    try:
        place = torchrun.find_place()
        assert place is not None
    except DdpHydraError as error:
        sys.exit(f"ddp_hydra: {error}")
    if place.local_rank:
        torchrun.end_with_first(place)
    with torchrun.ended_together(place):
        if place.hosts > 1:
            Hosts.connect()
        if place.rank:
            work_on_host(place)
        else:
            command()


def work_on_host(place: ProcessPlace) -> None:
    """Be the worker of a host other than the first one."""
    fork_client.hold()
    from ddp_hydra.cli.compose import compose
    from ddp_hydra.cli.main import report
    from ddp_hydra.cluster.kinds import torchrun as kind

    words = [word for word in sys.argv[1:] if word.lstrip("+~").startswith(("cluster=", "cluster.", "experiment="))]
    sys.exit(report(lambda: sys.exit(kind.work_on_host(place, lambda: compose(words).cluster))))
