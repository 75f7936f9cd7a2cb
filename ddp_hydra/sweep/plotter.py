"""Draws the plot of a sweep in a process of its own, so that nothing waits for it."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from ddp_hydra.rank import garbage
from ddp_hydra.sweep.forked_process import ForkedProcess
from ddp_hydra.sweep.pictures import DRAW_S
from ddp_hydra.sweep.plot import draw
from ddp_hydra.sweep.rows import Objective, Row

PAUSE_S = 20.0
"""Minimum seconds between two pictures. The last batch of jobs is always drawn."""
NICE = 10
"""Niceness of the process that imports matplotlib: jobs go first."""


class Plotter:
    """Draws the plot after batches of jobs; sweepers may have hundreds of them.

    Args:
        folder: of the sweep.
        objective: the metric that jobs are compared by.
    """

    def __init__(self, folder: Path, objective: Objective) -> None:
        self.folder, self.objective = folder, objective
        self.process: ForkedProcess | None = None
        self.drawn, self.is_waiting, self.has_news = -math.inf, False, False

    def prepare(self) -> None:
        """Start the process that will draw. It imports matplotlib while the first jobs wait for the import of torch."""
        if self.process is None and time.monotonic() - self.drawn >= PAUSE_S:
            self.process, self.is_waiting = ForkedProcess(self._draw), True

    def draw(self, rows: Sequence[Row], is_last: bool = False) -> None:
        """Draw the plot, if it is time for one.

        Args:
            rows: of the jobs.
            is_last: there will be no other plot.
        """
        self.has_news = not is_last and time.monotonic() - self.drawn < PAUSE_S
        if self.has_news:
            return
        if not self.is_waiting:
            self.finish()
            self.drawn = -math.inf
            self.prepare()
        assert self.process is not None
        self.drawn, self.is_waiting = time.monotonic(), False
        with contextlib.suppress(OSError):  # it has ended
            self.process.pipe.send(list(rows))

    def finish(self) -> None:
        """Wait until the plot is drawn."""
        process, self.process = self.process, None
        if process is not None:
            if self.is_waiting:
                process.process.kill()
            process.process.join(DRAW_S)
            process.end()
        self.is_waiting = False

    def _draw(self, pipe: Connection) -> bool:
        """Wait for the rows, and draw them. Runs in the forked process."""
        os.nice(NICE)
        garbage.pause()  # the process ends soon
        with contextlib.suppress(Exception):  # `draw` says what is wrong
            for name in ("figure", "backends.backend_agg", "backends.backend_svg"):
                importlib.import_module(f"matplotlib.{name}")
        return draw(pipe.recv(), self.objective, self.folder)
