from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks import report, sweep
from benchmarks.sweep import Job, Swept


def swept(begin: float = 100.0) -> Swept:
    """Four jobs, two at once: 6 s of start-up, 4 s for each pair, 1 s of closing."""
    done = [Job(begin + 6 + 4 * (number // 2), 0.5, 2.5, begin + 9.5 + 4 * (number // 2)) for number in range(4)]
    return Swept(begin, begin + 14.5, 2, tuple(done))


def test_times_of_a_sweep():
    one = swept()
    assert one.wall_s == 14.5
    assert one.start_up_s == 6
    assert one.closing_s == 1
    assert one.beyond_s == 2
    assert one.overhead_s() == 2 * 14.5 / 4 - 0.5
    assert one.overhead_s(without_start_up=True) == 2 * 8.5 / 4 - 0.5


def test_what_our_jobs_leave_is_read(tmp_path):
    rows = []
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "first-step").write_text(repr(103.25 + number))
        (folder / "summary.json").write_text(
            json.dumps({"status": "done", "train_s": 0.75, "started": 102.0, "wall_s": 2.0 + number})
        )
        rows.append({"folder": str(number), "wall_s": 3.5})
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": rows}))
    read = sweep.read(tmp_path, 100.0, 106.0, at_once=2)
    assert read == Swept(100.0, 106.0, 2, (Job(103.25, 0.75, 3.5, 104.0), Job(104.25, 0.75, 3.5, 105.0)))


def test_the_table_has_both_goals():
    peer = Swept(0.0, 128.0, 1, tuple(Job(9.0 + number, 0.25) for number in range(4)))
    figures = list(sweep.figures([swept(), swept(0.0)], [peer], [peer]))
    with_goal = {str(figure.goal): figure for figure in figures if figure.goal is not None}
    assert with_goal.keys() == {">= 8", ">= 10"}
    assert with_goal[">= 8"].median == pytest.approx(128 / 14.5)
    assert with_goal[">= 8"].met
    assert with_goal[">= 10"].median == pytest.approx((128 / 4 - 0.25) / (2 * 8.5 / 4 - 0.5))
    assert not with_goal[">= 10"].met
    text = io.StringIO()
    Console(width=110, file=text).print(report.table(figures))
    assert "missed" in text.getvalue()
