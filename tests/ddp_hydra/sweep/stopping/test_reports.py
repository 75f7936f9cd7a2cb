"""The reports of a job, read while its metrics.jsonl grows, is cut, and is written again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ddp_hydra.sweep.stopping.reports import ReportFile


def line(step: int | None, **metrics: Any) -> str:
    return json.dumps({"time": 1.0, "attempt": 0, "step": step, "epoch": 1, "samples": 8, **metrics}) + "\n"


def values(file: ReportFile) -> list[float]:
    return [report.value for report in file.reports]


def write(folder: Path, *lines: str, mode: str = "a") -> None:
    with (folder / "metrics.jsonl").open(mode) as file:
        file.write("".join(lines))


def test_lines_with_the_metric_are_reports_and_know_what_else_was_measured(tmp_path):
    file = ReportFile(tmp_path, "val/loss")
    assert not file.read()
    write(tmp_path, line(3, lr=0.1), line(4, **{"val/loss": 0.5}), line(6, lr=0.2))
    assert file.read()
    assert not file.read()
    write(tmp_path, line(8, **{"val/loss": None}), line(8, **{"val/loss": 9.0, "rank": 1}))
    assert file.read()
    assert [(report.step, report.epoch) for report in file.reports] == [(4, 1.0), (8, 1.0)]
    assert values(file)[0] == 0.5
    assert math.isnan(values(file)[1])
    assert [report.metrics["lr"] for report in file.reports] == [0.1, 0.2]


def test_a_line_counts_when_it_is_whole(tmp_path):
    file, text = ReportFile(tmp_path, "loss"), line(1, loss=0.5)
    write(tmp_path, text[:20])
    assert not file.read()
    write(tmp_path, text[20:], "garbage\n", "[1]\n", line(2, loss=True))
    assert file.read()
    assert values(file)[0] == 0.5
    assert len(values(file)) == 2


def test_steps_that_are_done_again_are_not_counted_twice(tmp_path):
    file = ReportFile(tmp_path, "loss")
    write(tmp_path, *(line(step, loss=step / 10) for step in (1, 2, 3)))
    file.read()
    other = tmp_path / "new"
    other.write_text(line(1, loss=0.1) + line(2, loss=0.2))
    other.replace(tmp_path / "metrics.jsonl")  # as a resumed job does
    assert not file.read()
    write(tmp_path, line(3, loss=0.3), line(4, loss=0.4))
    assert file.read()
    assert values(file) == [0.1, 0.2, 0.3, 0.4]


def test_without_steps_each_line_counts(tmp_path):
    file = ReportFile(tmp_path, "loss")
    write(tmp_path, line(None, loss=1.0), line(None, loss=1.0))
    file.read()
    assert values(file) == [1.0, 1.0]


def test_what_follows_the_last_checkpoint_may_be_left_out(tmp_path):
    file = ReportFile(tmp_path, "loss")
    write(tmp_path, *(line(step, loss=step / 10) for step in (1, 2, 3)))
    file.read(last_step=2)
    assert values(file) == [0.1, 0.2]
