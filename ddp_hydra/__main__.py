"""`python -m ddp_hydra`."""


def main() -> None:
    """Entry of `python -m ddp_hydra` and of the console script: imports nothing before it can be interrupted."""
    from ddp_hydra.console import signals

    signals.leave_at_once()
    from ddp_hydra.cli.main import entry

    entry()


if __name__ == "__main__":  # Dask's workers import this module, too, and need none of it
    main()
