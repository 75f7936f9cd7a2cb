"""Shows the jobs of a sweep: as a live table on a terminal, elsewhere as a line for each change."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ddp_hydra.console.text import duration, plain
from ddp_hydra.sweep.rows import Objective, Row, State, best_first, describe_counts, swept

REFRESH_S = 0.5
STYLES = {
    State.done: "green",
    State.stopped: "cyan",
    State.paused: "cyan",
    State.failed: "red",
    State.interrupted: "yellow",
    State.running: "bold",
}


class LiveTable:
    """Shows jobs while they run.

    Args:
        objective: the metric that they are compared by.
        console: where to print; None is stderr, which Hydra uses, too.
    """

    def __init__(self, objective: Objective, console: Console | None = None) -> None:
        self.objective = objective
        self.console = console or Console(stderr=True, highlight=False)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live: Live | None = None
        self.drawn = -math.inf
        self.printed: dict[int, State] = {}

    def show(self, rows: Sequence[Row]) -> None:
        """Show the present state; this is cheap if nothing has changed."""
        if not self.is_live:
            self._print_changes(rows)
        elif time.monotonic() - self.drawn >= REFRESH_S:
            self.drawn = time.monotonic()
            if self.live is None:  # no refresh thread, because this process forks
                self.live = Live(console=self.console, auto_refresh=False, transient=True)
                self.live.start()
            self.live.update(self._table(rows, most=max(5, self.console.height - 6)), refresh=True)

    def close(self, rows: Sequence[Row], lines: Sequence[str]) -> None:
        """Show the final table and some last lines."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        if self.is_live:
            self.console.print(self._table(rows))
        else:
            self._print_changes(rows)
        for line in lines:
            self.console.print(Text(line), soft_wrap=True)

    def _print_changes(self, rows: Sequence[Row]) -> None:
        changed = [row for row in rows if row.state not in (State.queued, self.printed.get(row.number))]
        values = swept(rows) if changed else {}
        for row in changed:
            self.printed[row.number] = row.state
            ended = sum(other.state.has_ended for other in rows)
            words = [f"job {row.number} {row.state.value}", *(f"{k}={v}" for k, v in values[row.number].items())]
            if row.objective is not None and row.state.has_ended:
                words.append(f"-> {self.objective.metric} {row.objective:.4g}")
            words += [f"({plain(row.message)})"] if row.message else []
            words += [f"[{ended}/{len(rows)}]"] if row.state.has_ended else []
            self.console.print(Text(plain(" ".join(words))), soft_wrap=True)

    def _table(self, rows: Sequence[Row], most: int | None = None) -> Group:
        values = swept(rows)
        keys = list(dict.fromkeys(key for own in values.values() for key in own))
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("job", "state", *keys, "at", self.objective.metric, "workers", "time", "left"):
            table.add_column(
                Text(plain(name)), justify="left" if name in ("state", *keys) else "right", overflow="fold"
            )
        ordered = best_first(rows, self.objective)
        if most is not None and len(ordered) > most:
            running = [row for row in ordered if row.state == State.running]
            ordered = (running + [row for row in ordered if row.state != State.running])[:most]
        for row in ordered:
            table.add_row(
                str(row.number),
                Text(row.shown_state, style=STYLES.get(row.state, "dim")),
                *(Text(plain(values[row.number].get(key, ""))) for key in keys),
                _position(row),
                "" if row.objective is None else f"{row.objective:.4g}",
                str(row.workers) if row.workers else "",
                duration(row.wall_s or None),
                duration(row.eta_s if row.state == State.running else None),
            )
        hidden = len(rows) - len(ordered)
        note = describe_counts(rows) + (f"; {hidden} not shown" if hidden > 0 else "")
        return Group(table, Text(note, style="dim"))


def _position(row: Row) -> str:
    if row.epoch is not None and row.epochs:
        return f"epoch {row.epoch:g}/{row.epochs:g}"
    if row.step is not None:
        return f"step {row.step}" + (f"/{row.total_steps}" if row.total_steps else "")
    return ""
