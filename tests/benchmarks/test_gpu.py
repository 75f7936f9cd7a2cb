"""What the GPU report does without a GPU: its lines, its page, and how it counts."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import card, memory, page, parts, probes
from benchmarks.gpu.bench import Bench, Broken, Missing, differing
from benchmarks.gpu.card import Card
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.report import Absent, Goal
from tests.support.clocks import set_time

ROOT = Path(__file__).parents[2]
H100 = Card("NVIDIA H100", 2, 79.1, "575.1", "2.15.0", "13.2")
TODAY = datetime.date(2026, 11, 23)


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(Card("a CPU"), tmp_path, {})


def some(bench):
    """Measure something."""
    yield report.value("a count", 3, Goal(3))
    yield report.speeds("a speed", [1.0, 3.0, 2.0])


def fails(bench):
    """Fail halfway."""
    yield report.value("before", 1)
    raise Broken("the job ended with code 1\nand more")


def lacks(bench):
    """Need a package."""
    raise Missing("needs this: pip install this")
    yield


def wrong(bench):
    """Have a mistake."""
    raise KeyError("val/accuracy")
    yield


def test_a_part_that_fails_is_a_line_and_the_report_goes_on(bench, capsys):
    functions = {"fails": fails, "lacks": lacks, "wrong": wrong, "some": some}
    chosen = [*(Part(name, function) for name, function in functions.items()), Part("two", some, 2)]
    found = {part.name: lines for part, lines in parts.measure(bench, chosen)}
    assert found["fails"][1:] == [Absent("fails", "the job ended with code 1", failed=True)]
    assert found["lacks"] == [Absent("lacks", "needs this: pip install this")]
    assert found["wrong"] == [Absent("wrong", "KeyError: 'val/accuracy'", failed=True)]
    assert [line.name for line in found["some"]] == ["a count", "a speed"]
    assert found["two"] == [Absent("two", "needs 2 GPUs")]
    assert "some: a speed" in capsys.readouterr().err


@pytest.mark.parametrize(("check", "code"), [(False, None), (True, "missed: fails")])
def test_a_failure_counts_as_a_missed_goal(check, code, tmp_path, capsys):
    lines = [
        report.value("a count", 3, Goal(3)),
        Absent("fails", "why [not]", failed=True),
        Absent("gpu", "needs a GPU"),
    ]
    arguments = argparse.Namespace(json=tmp_path / "x.json", check=check)
    if code:
        with pytest.raises(SystemExit) as ended:
            report.finish(lines, arguments)
        assert ended.value.code == code
    else:
        report.finish(lines, arguments)
    shown = capsys.readouterr().out
    assert "why [not]" in shown
    assert "left out" in shown
    assert [line["met"] for line in json.loads(arguments.json.read_text())["figures"]] == [True, False, True]


def test_the_page_names_the_card_and_shows_all_lines():
    measured = [(Part("some", some), list(some(None))), (Part("lacks", lacks), [Absent("lacks", "needs a GPU")])]
    text = page.render(H100, measured, TODAY, "make gpu-report")
    assert "\nMeasured on 2 x NVIDIA H100 (79 GiB), driver 575.1, torch 2.15.0, CUDA 13.2.\n" in text
    assert "2026-11-23, by `make gpu-report`" in text
    assert "## some\n\nMeasure something.\n" in text
    assert "| a count | 3 |  | >= 3 | ok |" in text
    assert "| a speed | 2.000 (1.000 to 3.000) | samples/s |  |  |" in text
    assert "- **left out**: lacks: needs a GPU" in text
    assert "These parts were not run: demo" in text


def test_a_rehearsal_says_so_and_does_not_replace_what_a_card_has_measured(tmp_path):
    path = tmp_path / "gpu.md"
    assert page.may_write(path, on_gpu=False)
    path.write_text(page.render(Card("a CPU"), [], TODAY, "make gpu-report DEVICE=cpu"))
    assert "No GPU has been measured yet" in path.read_text()
    assert page.may_write(path, on_gpu=False)
    path.write_text(page.render(H100, [], TODAY, "make gpu-report"))
    assert not page.may_write(path, on_gpu=False)
    assert page.may_write(path, on_gpu=True)


def test_the_page_that_is_committed_is_of_this_report():
    text = page.PAGE.read_text()
    assert [part.name for part in PARTS if part.name not in text] == []
    assert len({part.name for part in PARTS}) == len(PARTS) >= 20
    assert "**failed**" not in text


@pytest.mark.parametrize(
    ("gpus", "ranks", "overrides", "backend"),
    [
        (0, 2, ("cluster.n_workers=2", "dispatch.ranks=2"), "gloo"),
        (1, 2, ("cluster.n_workers=2", "dispatch.ranks=2", "dispatch.backend=gloo"), "gloo"),
        (1, 1, ("cluster.n_workers=1", "dispatch.ranks=1"), "gloo"),
        (2, 2, ("cluster.n_workers=2", "dispatch.ranks=2"), "nccl"),
    ],
)
def test_ranks_share_a_gpu_through_gloo(gpus, ranks, overrides, backend, tmp_path):
    bench = Bench(Card("x", gpus), tmp_path, {})
    assert bench.ranks(ranks) == overrides
    assert bench.backend == backend
    assert bench.device == ("cuda" if gpus else "cpu")
    assert (bench.goal(1.0) is None) == (gpus == 0)


def test_checkpoints_are_compared_bit_for_bit():
    one = {"model": {"w": torch.ones(3), "n": torch.tensor(float("nan"))}, "steps": [1, 2.0], "x": None}
    assert differing(one, {"model": {**one["model"]}, "steps": [1, 2.0], "x": None}) == []
    other = {"model": {"w": torch.tensor([1, 1, 1 + 1e-7]), "n": torch.tensor(1.0)}, "steps": [1, 3.0], "y": 1}
    assert differing(one, other) == ["model.n", "model.w", "steps.1", "x", "y"]
    assert differing(torch.ones(3), torch.ones(3).double()) == [""]


@pytest.mark.medium
def test_a_job_that_takes_too_long_is_killed(bench):
    bench.timeout_s = 3.0
    with pytest.raises(Broken, match="no end after 3 s: begun"):
        bench.command(["sh", "-c", "echo begun; exec sleep 60"], bench.folder, {})


SMI = """#!/bin/sh
case "$1" in
  *driver*) echo 575.1; echo 575.1;;
  *) echo 1024; echo 3;;
esac
"""


def test_what_nvidia_smi_tells_is_read(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    set_time(monkeypatch, memory, sleep=lambda seconds: None)
    assert memory.settled() == [1024, 3]
    seen = types.SimpleNamespace(total_memory=80 * 2**30, major=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: seen)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA V100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = card.describe("cuda")
    assert (found.name, found.gpus, found.driver, found.bf16) == ("NVIDIA V100", 2, "575.1", False)
    assert Bench(found, tmp_path, {}).half == "fp16"


def test_what_waits_for_the_gpu_is_counted_between_two_steps(tmp_path, monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    told = tmp_path / "waits.json"
    model = probes.Watched(str(told), first=2, steps=2, in_features=4, num_classes=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            warnings.warn(f"called a {probes.SYNCHRONISES} (Triggered internally)", stacklevel=1)
            model(torch.zeros(1, 4))
    found = json.loads(told.read_text())
    assert found["steps"] == 2
    assert len(found["where"]) == 2
    assert found["where"][0].startswith("test_gpu.py:")
    assert modes == ["warn", "default"]


def test_what_was_measured_before_ctrl_c_is_kept_but_does_not_replace_the_page(tmp_path, monkeypatch, capsys):
    def two(bench, chosen):
        yield chosen[0], [report.value("a count", 3)]
        raise KeyboardInterrupt

    monkeypatch.setattr(command.card, "look", lambda device: command.card.Card(name=device))
    monkeypatch.setattr(command, "measure", two)
    monkeypatch.setattr(command, "stop_server", lambda bench: None)
    monkeypatch.setattr(page, "PAGE", tmp_path / "gpu.md")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for given in ([], ["--page", str(tmp_path / "mine.md")]):
            monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", *given])
            with pytest.raises(SystemExit) as ended:
                command.main()
            assert ended.value.code == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.md"]
    assert "a count" in (tmp_path / "mine.md").read_text()
    assert f"interrupted after 1 of {len(PARTS)} parts" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.integration
def test_the_rehearsal_runs_jobs_and_writes_the_page(tmp_path):
    told, written = tmp_path / "x.json", tmp_path / "gpu.md"
    arguments = f"--device cpu --only ranks full server nccl --json {told} --page {written} --check".split()
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(told.read_text())["figures"]
    assert [figure["name"] for figure in figures if figure.get("why")] == ["nccl"]
    assert len([figure for figure in figures if "goal" in figure]) == 5
    assert "## full" in written.read_text()
