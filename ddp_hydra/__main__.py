"""`python -m ddp_hydra`."""

if __name__ == "__main__":
    from ddp_hydra.cli import entry  # Dask's workers import this module, too, and need none of it

    entry()
