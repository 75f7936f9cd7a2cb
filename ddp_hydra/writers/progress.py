"""Shows a job's progress: a bar on a terminal, lines in a file or a pipe."""

from __future__ import annotations

import time
from importlib.util import find_spec

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ddp_hydra.console.text import printable
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.writers.run_dir import EPOCH, JobStatus

INTERVAL_S = 10.0
"""Least seconds between two lines of progress."""
BAR_WIDTH = 24


class StdoutConsole(Console):
    """Prints to standard output, and survives its end: rich would end the whole program when nobody reads it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressWriter:
    """Shows a job while it runs: a header, the current step, and a permanent line per validation or epoch.

    A terminal gets a live bar, and so does a notebook that has ipywidgets. Other outputs get lines without control
    characters, and between the permanent lines at most one line per `INTERVAL_S`. A closed output (`| head`), or one
    whose encoding lacks a character, ends the display, not the job. With `restarts`, it says where an attempt begins.
    """

    def __init__(self, console: Console | None = None, restarts: bool = False) -> None:
        in_notebook = console is None and Console().is_jupyter and find_spec("ipywidgets") is not None
        # Lines are plain text in a notebook, too: rich would print each as a piece of HTML.
        self._console = console or StdoutConsole(force_jupyter=False)
        self._bar_console = StdoutConsole(force_jupyter=True) if in_notebook else self._console
        self._live = in_notebook or (self._console.is_terminal and not self._console.is_dumb_terminal)
        self._restarts = restarts
        self._printed_at = time.monotonic()
        self._state = JobStatus()
        self._reported: float | None = None  # the epoch (or step) that has its permanent line
        self._line_step: int | None = None  # the step of the last permanent line
        self._has_epoch_means = False  # whether each epoch ends with its means, as in `training`
        self._bar: Progress | None = None
        where, numbers = "{task.description}", "{task.fields[numbers]}"
        bar = BarColumn(bar_width=BAR_WIDTH)
        self._columns = (TextColumn(where, markup=False), bar, TextColumn(numbers, markup=False))
        self._columns_without_bar = (TextColumn(f"{where}  {numbers}", markup=False),)
        self._task = TaskID(0)
        self._is_closed = False
        self._header: list[str] = []

    def write(self, record: Record) -> None:
        if self._is_closed or record.rank != 0:
            return
        try:
            if isinstance(record.data, Start):
                self._start(record, record.data)
            elif isinstance(record.data, Metrics):
                self._metrics(record, record.data)
        except (OSError, UnicodeError):
            self._is_closed = True

    def close(self) -> None:
        try:
            step = self._state.now.step
            is_missing = step not in (None, self._line_step) and self._reported != self._state.mark()
            if not self._is_closed and is_missing and self._state.numbers(validation=True):
                self._permanent_line()
        except (OSError, UnicodeError):
            self._is_closed = True
        finally:
            self._stop_bar()

    def _start(self, record: Record, start: Start) -> None:
        self._stop_bar()
        if self._restarts and record.attempt != self._state.now.attempt:
            self._print(f"restart {record.attempt}, from step {record.step or 0}")
        lines = [printable(line) for line in start.lines]
        for line in lines:
            if line not in self._header:  # a new attempt prints only lines that have changed
                self._print("  " + line)
        self._header = lines
        self._state.update(record)
        self._reported = self._line_step = None
        self._has_epoch_means = start.epoch_means
        self._printed_at = time.monotonic()

    def _metrics(self, record: Record, logged: Metrics) -> None:
        before = self._state.now.epoch
        if before and self._reported != before != self._state.epoch_of(logged):  # 0 is before the first
            self._permanent_line()
        self._state.update(record)
        has_means = any(name.startswith(EPOCH) for name in logged.metrics)
        if has_means or any(name.startswith("val/") for name in logged.metrics):
            self._permanent_line(has_means)
        if self._live:
            self._move_bar()
        elif time.monotonic() - self._printed_at >= INTERVAL_S:
            self._print("  ".join(filter(None, (self._state.where(), self._state.numbers(), self._state.eta()))))

    def _permanent_line(self, has_means: bool = False) -> None:
        """Print the line of an epoch, with its means if these are known; amid an epoch, the line of a step."""
        state = self._state
        is_epoch = has_means or not self._has_epoch_means
        where = state.epoch_text() if is_epoch else state.where()
        self._print(f"{where}  {state.numbers(validation=True, epoch=has_means)}")
        self._reported = state.mark() if is_epoch else self._reported
        self._line_step = state.now.step
        state.metrics = {name: value for name, value in state.metrics.items() if not name.startswith("val/")}

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._printed_at = time.monotonic()

    def _move_bar(self) -> None:
        step, where = self._state.now.step or 0, self._state.where()
        numbers, has_bar = self._fit(where)
        is_new = self._bar is None
        if self._bar is None:
            self._bar = Progress(console=self._bar_console, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task(where, total=self._state.now.total_steps, numbers=numbers)
        self._bar.columns = self._columns if has_bar else self._columns_without_bar
        self._bar.update(self._task, completed=step, description=where, numbers=numbers)
        if is_new:
            self._bar.start()

    def _fit(self, where: str) -> tuple[str, bool]:
        """Return the numbers beside the bar, and whether there is room for the bar.

        Where the terminal is too narrow, the bar is left out, then the last numbers. rich would cut the step instead.
        """
        shown, eta, width = self._state.shown(), self._state.eta(), self._bar_console.width
        line = "  ".join(filter(None, (*shown, eta)))
        has_bar = cell_len(where) + cell_len(line) + BAR_WIDTH + 2 <= width
        while shown and not has_bar and cell_len(where) + 2 + cell_len(line) > width:
            shown.pop()
            line = "  ".join(filter(None, (*shown, eta)))
        return line, has_bar

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        try:
            bar.stop()
        except (OSError, UnicodeError):
            self._is_closed = True
