"""`python -m ddp_hydra`."""

from ddp_hydra.cli import entry

if __name__ == "__main__":
    entry()
