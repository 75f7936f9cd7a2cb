"""`python -m ddp_hydra`."""

import sys
from typing import Any


def main() -> None:
    """Run `python -m ddp_hydra` and the console script. Signals are handled before anything else is imported."""
    from ddp_hydra.console import signals

    signals.open_standard_files()
    signals.leave_at_once()
    from ddp_hydra.rank import torchrun

    if not torchrun.is_here():
        run()
        return
    from ddp_hydra.errors import DdpHydraError

    try:
        place = torchrun.find_place()
        assert place is not None
    except DdpHydraError as error:
        sys.exit(f"ddp_hydra: {error}")
    if place.local_rank:
        torchrun.end_with_first(place)
    with torchrun.ended_together(place):
        if place.hosts > 1:
            torchrun.Hosts.connect()
        if place.rank:
            work_on_host(place)
        else:
            run()


def run() -> None:
    """Run the command in this process. Of those that torchrun has started, only that of RANK 0 does."""
    from ddp_hydra import forked

    forked.pause_garbage()  # until the config is composed
    from ddp_hydra.cli import prestart

    prestart.begin(sys.argv[1:])
    from ddp_hydra.cli.main import entry

    entry()


def work_on_host(place: Any) -> None:
    """Be the worker of a host other than the first one."""
    from ddp_hydra.rank import fork_client

    fork_client.hold()
    from ddp_hydra.cli.compose import compose
    from ddp_hydra.cli.main import report
    from ddp_hydra.cluster.kinds import torchrun as kind

    words = [word for word in sys.argv[1:] if word.lstrip("+~").startswith(("cluster=", "cluster.", "experiment="))]
    sys.exit(report(lambda: sys.exit(kind.work_on_host(place, lambda: compose(words).cluster))))


if __name__ == "__main__":  # Dask's workers import this module, too
    main()
