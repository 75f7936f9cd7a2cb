"""Ours: the time from a dispatch to the first step, on a Ray that is up. Prints the seconds as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.launch import warm

STARTS = 3
"""After the first one, which is not counted."""


def main(stamp: str, ranks: int) -> None:
    """Start a gang again and again."""
    on_ray = ("cluster=ray", f"cluster.address={os.environ.pop('RAY_ADDRESS')}")
    took = list(warm(ranks, STARTS, Path(stamp), *on_ray))
    print(json.dumps(took))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
