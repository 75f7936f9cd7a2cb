from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace
from rich.console import Console

from ddp_hydra.record import Log, Metrics, Record, Start, Text
from ddp_hydra.writers import progress, run_dir
from ddp_hydra.writers.handler import ResultsHandler
from ddp_hydra.writers.progress import ProgressWriter
from tests.support.clocks import set_time


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    now = Clock()
    for module in (progress, run_dir):
        set_time(monkeypatch, module, monotonic=now)
    return now


@pytest.fixture
def output():
    return io.StringIO()


@pytest.fixture
def start():
    return Record(Start(["model resnet18", "2 ranks, batch 2 x 64 = 128"], total_steps=50, epochs=5))


@pytest.fixture
def plain_writer(output, clock):
    return ProgressWriter(Console(file=output, width=120, force_terminal=False))


def terminal(output, **options):
    return Console(file=output, width=120, force_terminal=True, _environ={"TERM": "xterm"}, **options)


def test_lines_without_a_terminal(plain_writer, output, clock, start, metrics_record):
    plain_writer.write(start)
    for step in range(1, 31):
        clock.now += 3
        epoch = (step + 9) // 10
        plain_writer.write(
            metrics_record(step, epoch=epoch, train__loss=1 / step, train__accuracy=0.9, samples_per_s=1234.4)
        )
        if step % 10 == 0:
            plain_writer.write(metrics_record(step, epoch=epoch, val__loss=0.1, val__accuracy=0.972))
    plain_writer.close()
    text = output.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    lines = text.splitlines()
    assert lines[:2] == ["  model resnet18", "  2 ranks, batch 2 x 64 = 128"]
    lasting = [line for line in lines if "val/" in line]
    assert lasting == [
        f"epoch {epoch}/5  train/loss {1 / (epoch * 10):.4g}  train/accuracy 0.9  val/loss 0.1  "
        "val/accuracy 0.972  1234 samples/s"
        for epoch in (1, 2, 3)
    ]
    between = lines[2:]
    assert between[0] == ("epoch 1/5  step 4/50  train/loss 0.25  train/accuracy 0.9  1234 samples/s  ETA 2:18 min")
    # 30 steps of 3 s: every 10 s at most, so each 4th step, and each lasting line counts too.
    assert len(between) == 9


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (None, "train/loss 0.5  train/f1/cat 0.1  val/loss 0.25  val/f1/cat 0.2"),
        (["*/loss", "lr"], "train/loss 0.5  val/loss 0.25  lr 0.1"),
        (["*", "!*/f1/*", "!lr"], "train/loss 0.5  val/loss 0.25"),
        ([], ""),
    ],
    ids=str,
)
def test_a_key_chooses_the_metrics_of_a_line(show, shown, output, plain_writer, start, metrics_record):
    plain_writer.write(replace(start, data=replace(start.data, lines=[], epoch_means=True, show=show)))
    plain_writer.write(metrics_record(10, epoch=1, train__loss=9.0, train__f1__cat=0.1, lr=0.1))
    plain_writer.write(metrics_record(10, epoch=1, train_epoch__loss=0.5, val__loss=0.25, val__f1__cat=0.2))
    plain_writer.close()
    assert output.getvalue().splitlines() == [f"epoch 1/5  {shown}"]


def test_a_restart_shows_no_validation_of_the_attempt_before(plain_writer, output, start, metrics_record):
    plain_writer.write(start)
    plain_writer.write(metrics_record(10, val__loss=0.1))
    plain_writer.write(replace(start, step=10, attempt=1))
    plain_writer.write(metrics_record(20, attempt=1, epoch=2, train__loss=0.5))
    plain_writer.close()
    assert output.getvalue().splitlines()[2:] == ["epoch 1/5  val/loss 0.1", "epoch 2/5  train/loss 0.5"]


def test_an_epoch_without_validation_has_its_line_too(plain_writer, output, start, metrics_record):
    plain_writer.write(start)
    for step in (5, 10, 15, 20):
        plain_writer.write(metrics_record(step, epoch=(step + 9) // 10, train__loss=step))
        if step == 10:
            plain_writer.write(metrics_record(step, val__loss=0.1))
    plain_writer.close()
    lines = ["epoch 1/5  train/loss 10  val/loss 0.1", "epoch 2/5  train/loss 20"]
    assert output.getvalue().splitlines()[2:] == lines


def test_a_validation_before_the_first_step_has_one_line(plain_writer, output, start, metrics_record):
    plain_writer.write(replace(start, data=replace(start.data, epoch_means=True)))
    plain_writer.write(metrics_record(0, epoch=0.0, val__loss=2.5))
    plain_writer.write(metrics_record(5, epoch=1, train__loss=2))
    plain_writer.close()
    assert output.getvalue().splitlines()[2:] == [
        "epoch 0/5  step 0/50  val/loss 2.5",
        "epoch 1/5  step 5/50  train/loss 2",
    ]


@pytest.mark.parametrize(("restarts", "said"), [(False, []), (True, ["restart 1, from step 10"])])
def test_a_restart_is_told_where_nobody_else_does(restarts, said, output, clock, start, metrics_record):
    writer = ProgressWriter(Console(file=output, width=120, force_terminal=False), restarts=restarts)
    writer.write(start)
    writer.write(metrics_record(13, epoch=2, train__loss=1.0))
    writer.write(Record(replace(start.data, lines=[]), step=10, attempt=1))
    clock.now += 20
    writer.write(metrics_record(12, attempt=1, epoch=2, train__loss=1.0))
    told = [*said, "epoch 2/5  step 12/50  train/loss 1  ETA 6:20 min"]
    assert output.getvalue().splitlines()[2:] == told


def test_a_run_with_more_epochs_than_were_planned_shows_no_total(plain_writer, output, start, metrics_record):
    """A stream gave fewer samples than its length said."""
    plain_writer.write(start)
    plain_writer.write(metrics_record(50, epoch=6, train__loss=1.0))
    plain_writer.close()
    assert output.getvalue().splitlines()[2:] == ["epoch 6  train/loss 1"]


def test_without_totals(plain_writer, output, clock):
    clock.now += 11
    plain_writer.write(Record(Metrics({"train/loss": float("nan")}), step=7))
    plain_writer.close()
    assert output.getvalue().splitlines() == ["step 7  train/loss nan"] * 2


def test_text_of_ranks_cannot_steer_the_terminal(output, clock):
    writer = ProgressWriter(terminal(output, color_system=None))
    evil = "\x1b]0;owned\x07\x1b[2Jname\x9b31m\r"
    writer.write(Record(Start(lines=[f"[red]{evil}"])))
    writer.write(Record(Metrics({f"train/{evil}": 1.0, "val/x": 1.0}), step=1))
    writer.close()
    text = output.getvalue()
    assert "owned" not in text
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    assert "[red]name31m" in text


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.medium
def test_a_terminal_has_a_bar_and_is_left_clean(output, start, metrics_record, fails):
    stdout = sys.stdout
    handler = ResultsHandler([ProgressWriter(terminal(output))])
    try:
        with handler:
            handler.handle(start)
            for step in (9, 10):
                handler.handle(metrics_record(step, train__loss=0.5, samples_per_s=99.6))
            handler.handle(metrics_record(10, val__loss=0.1, val__accuracy=0.972))
            time.sleep(0.3)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert sys.stdout is stdout
    text = output.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "━" in bare
    assert "epoch 1/5  step 10/50" in bare
    assert "epoch 1/5  train/loss 0.5  val/loss 0.1  val/accuracy 0.972  100 samples/s\n" in bare


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, "epoch 2/5  step 13/50 BAR train/loss 0.723  train/accuracy 0.4219  379 samples/s  ETA 4:04 min"),
        (80, "epoch 2/5  step 13/50  train/loss 0.723  train/accuracy 0.4219  ETA 4:04 min"),
        (60, "epoch 2/5  step 13/50  train/loss 0.723  ETA 4:04 min"),
        (36, "epoch 2/5  step 13/50  ETA 4:04 min"),
    ],
)
def test_a_narrow_terminal_shows_the_step_and_the_time_left(output, clock, start, metrics_record, width, shown):
    writer = ProgressWriter(Console(file=output, width=width, force_terminal=True, _environ={"TERM": "xterm"}))
    writer.write(replace(start, step=3))
    clock.now += 66
    measured = {"train__loss": 0.723, "train__accuracy": 0.4219, "samples_per_s": 379.0}
    writer.write(metrics_record(13, epoch=2, **measured))
    writer.close()
    first = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).splitlines()[2]
    assert re.sub("[━╸╺]+", "BAR", first).replace("\r", "").rstrip() == shown


def test_a_character_that_the_output_lacks_does_not_end_the_job():
    writer = ProgressWriter(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii")))
    for step in (1, 2):
        writer.write(Record(Metrics({"val/précision": 1.0}), step=step))
    writer.close()


@pytest.mark.integration
def test_a_closed_output_does_not_end_the_job():
    code = """
import os, sys
from ddp_hydra.record import Metrics, Record
from ddp_hydra.writers.progress import ProgressWriter
writer = ProgressWriter()
for step in (1, 2):
    writer.write(Record(Metrics({"val/loss": 1.0}), step=step))
writer.close()
print("goes on", file=sys.stderr)
os._exit(0)
"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"goes on\n")


def test_other_ranks_and_kinds_are_not_shown(plain_writer, output, metrics_record):
    plain_writer.write(metrics_record(1, rank=1, val__loss=1.0))
    plain_writer.write(Record(Text(name="n", text="hello")))
    plain_writer.write(Record(Log("hello")))
    plain_writer.close()
    assert output.getvalue() == ""
