"""`python -m ddp_hydra`."""

import sys


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
    from ddp_hydra.rank import fork_client

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
        if not place.rank:
            run()
            return
        fork_client.hold()  # this process is the worker of a host other than the first one
        from ddp_hydra.cli.compose import compose
        from ddp_hydra.cli.main import report
        from ddp_hydra.cluster.kinds import torchrun as kind

        words = [one for one in sys.argv[1:] if one.lstrip("+~").startswith(("cluster=", "cluster.", "experiment="))]
        sys.exit(report(lambda: sys.exit(kind.work_on_host(place, lambda: compose(words).cluster))))


def run() -> None:
    """Run the command in this process. Of the processes that torchrun has started, only RANK 0 does."""
    from ddp_hydra import forked

    forked.pause_garbage()  # until the config is composed
    from ddp_hydra.cli import prestart

    prestart.begin(sys.argv[1:])
    from ddp_hydra.cli.main import entry

    entry()


if __name__ == "__main__":  # Dask's workers import this module, too
    main()
