"""A cluster that tells when it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed


class LocalCluster(distributed.LocalCluster):
    """Adds a line to the file `clusters` in the current folder."""

    def __init__(self, **settings: Any) -> None:
        with Path("clusters").open("a") as file:
            file.write("started\n")
        super().__init__(**settings)
