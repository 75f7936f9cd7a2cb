"""`python -m ddp_hydra`."""


def main() -> None:
    """Run `python -m ddp_hydra` and the console script. Signals are handled before anything else is imported."""
    from ddp_hydra.console import signals

    signals.open_standard_files()
    signals.leave_at_once()
    from ddp_hydra.rank import torchrun

    if not torchrun.is_here():
        run()
        return
    from ddp_hydra.cli import torchrun as launched

    launched.run(run)


def run() -> None:
    """Run the command in this process."""
    import sys

    from ddp_hydra import forked

    forked.pause_garbage()  # until the config is composed
    from ddp_hydra.cli import prestart

    prestart.begin(sys.argv[1:])
    from ddp_hydra.cli.main import entry

    entry()


if __name__ == "__main__":  # Dask's workers import this module, too
    main()
