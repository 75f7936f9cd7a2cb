"""The live display: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ddp_hydra.console.text import plain
from ddp_hydra.results import Record
from ddp_hydra.writers.progress_state import Pace


class StdoutConsole(Console):
    """Standard output; rich would end the whole program when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Say no more."""
        self.quiet = True


class ProgressWriter:
    """Show a job while it runs: a header, the step it is at, and one lasting line per validation or epoch.

    A terminal gets a live bar. Anything else gets lines without control characters, and in between at most
    one per `interval_s`. A closed output (`| head`) ends the display, not the job.

    Args:
        console: where to show it; None is stdout.
        interval_s: seconds between two lines in between.
        restarts: say where an attempt begins; otherwise somebody else does.
        clock: seconds, growing.
    """

    def __init__(
        self,
        console: Console | None = None,
        interval_s: float = 10.0,
        restarts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or StdoutConsole()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._interval_s = interval_s
        self._restarts = restarts
        self._clock = clock
        self._printed_at = clock()
        self._pace = Pace(clock)
        self._reported: float | None = None  # the epoch (or step) that has its lasting line
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._gone = False
        self._told: list[str] = []

    def write(self, record: Record) -> None:
        """Show a start or metrics record of rank 0."""
        if self._gone or record.rank != 0:
            return
        try:
            if record.kind == "start":
                self._start(record)
            elif record.kind == "metrics":
                self._metrics(record)
        except OSError:
            self._gone = True

    def close(self) -> None:
        """Show the last epoch's line if it is missing, and leave a clean terminal."""
        try:
            if not self._gone and self._pace.step is not None and self._reported != self._pace.mark():
                self._lasting_line()
        except OSError:
            self._gone = True
        finally:
            self._stop_bar()

    def _start(self, record: Record) -> None:
        self._stop_bar()
        if record.attempt and self._restarts:
            self._say(f"restart {record.attempt}, from step {record.step or 0}")
        lines = [plain(line) for line in record.data.get("lines") or ()]
        for line in lines:
            if line not in self._told:  # a new attempt says what is new
                self._say("  " + line)
        self._told = lines
        self._pace.start(record)
        self._reported = None
        self._printed_at = self._clock()

    def _metrics(self, record: Record) -> None:
        before = self._pace.epoch
        if before is not None and self._reported != before != self._pace.epoch_of(record):
            self._lasting_line()
        self._pace.update(record)
        if any(name.startswith("val/") for name in record.data["metrics"]):
            self._lasting_line()
        if self._live:
            self._move_bar()
        elif self._clock() - self._printed_at >= self._interval_s:
            self._say("  ".join(filter(None, (self._pace.where(), self._pace.numbers(), self._pace.eta()))))

    def _lasting_line(self) -> None:
        self._say(f"{self._pace.epoch_text()}  {self._pace.numbers(validation=True)}")
        self._reported = self._pace.mark()
        self._pace.forget_validation()

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._printed_at = self._clock()

    def _move_bar(self) -> None:
        step, where = self._pace.step or 0, self._pace.where()
        numbers = "  ".join(filter(None, (self._pace.numbers(), self._pace.eta())))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=where, numbers=numbers)
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(where, total=self._pace.total_steps, completed=step, numbers=numbers)
        self._bar.start()

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        try:
            bar.stop()
        except OSError:
            self._gone = True
