"""The live table, and the lines where there is no terminal."""

from __future__ import annotations

import io
import math
import time

import pytest
from rich.console import Console

from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.tables import LiveTable

OBJECTIVE = SweepObjective("val/accuracy", maximize=True)


def show(terminal: bool, height: int = 25) -> tuple[LiveTable, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, height=height, color_system=None)
    return LiveTable(OBJECTIVE, console), out


@pytest.fixture
def rows():
    return [JobRow(0, ["lr=1", "data=a"], "0"), JobRow(1, ["lr=2", "data=a"], "1")]


def test_without_a_terminal_each_change_is_one_line(rows):
    display, out = show(terminal=False)
    display.show(rows)
    rows[0].state = JobState.running
    display.show(rows)
    display.show(rows)
    rows[0].state, rows[0].objective = JobState.done, 0.5
    rows[1].state, rows[1].message = JobState.failed, "it \x1b[31mbroke"
    display.show(rows)
    display.close(rows, ["the end"])
    said = out.getvalue().splitlines()
    assert said[:3] == [
        "job 0 running lr=1",
        "job 0 done lr=1 -> val/accuracy 0.5 [2/2]",
        "job 1 failed lr=2 (it broke) [2/2]",
    ]
    table = [line.split() for line in said[3:-1]]
    assert table[0] == ["job", "state", "lr", "at", "val/accuracy", "workers", "time", "left"]
    assert table[1:] == [["0", "done", "1", "0.5"], ["1", "failed", "2"]]
    assert said[-1] == "the end"


def test_on_a_terminal_a_table_follows_the_jobs_and_stays_at_the_end(rows):
    display, out = show(terminal=True)
    rows[1].state, rows[1].epoch, rows[1].epochs, rows[1].workers, rows[1].eta_s = JobState.running, 2, 5, 2, 65.0
    rows[0].state, rows[1].wall_s = JobState.running, 3.0
    display.show(rows)
    first = out.getvalue()
    head, waiting, at_work = (line.split() for line in first.splitlines()[:3])
    assert head[-4:] == ["val/accuracy", "workers", "time", "left"]
    assert waiting == ["0", "waiting", "1"]
    assert at_work == ["1", "running", "2", "epoch", "2/5", "2", "3.0", "s", "1:05", "min"]
    display.drawn = time.monotonic() + 60.0
    display.show(rows)
    assert out.getvalue() == first, "not more often than the eye follows"
    display.drawn = -math.inf
    rows[0].state = rows[1].state = JobState.done
    rows[1].objective = 0.875
    rows[1].wall_s = 70.0
    display.show(rows)
    display.close(rows, ["the end"])
    end = out.getvalue().rpartition("val/accuracy")[2]
    assert "1:05 min" not in end, "nothing is left"
    assert end.index("0.875") < end.index("1:10 min") < end.index("the end")
    assert "2 jobs" not in end, "the closing lines count them"


def test_more_jobs_than_lines_show_those_at_work(rows):
    display, out = show(terminal=True, height=12)
    rows = [JobRow(number, [f"lr=[b]{number}"], "", JobState.queued) for number in range(100)]
    rows[77].state = JobState.running
    display.show(rows)
    assert "[b]77" in out.getvalue()
    assert "94 not shown" in out.getvalue()
    display.close([], [])


@pytest.mark.parametrize("terminal", [False, True])
def test_between_two_batches_there_is_no_table(terminal, rows):
    display, out = show(terminal)
    rows[0].state = JobState.done
    display.close(rows, [])
    assert out.getvalue().splitlines() == ([] if terminal else ["job 0 done lr=1 [1/2]"])
