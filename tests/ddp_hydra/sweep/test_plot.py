from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.sweep import plot
from ddp_hydra.sweep.plot import draw, positions
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective, swept
from ddp_hydra.sweep.summary_files import SummaryFiles

ACCURACY = SweepObjective("val/accuracy", maximize=True)
LOSS = SweepObjective("val/loss", maximize=False)


def grid(value: Callable[..., float], **values: list[Any]) -> list[JobRow]:
    """A job for each combination."""
    rows = []
    for number, chosen in enumerate(itertools.product(*values.values())):
        overrides = [f"{key}={one}" for key, one in zip(values, chosen, strict=True)]
        rows.append(JobRow(number, overrides, str(number), JobState.done, value(*chosen)))
    return rows


def shapes(monkeypatch) -> list[Any]:
    """List the figures that are drawn from now on, with few pixels."""
    from matplotlib.figure import Figure

    figures = []
    savefig = Figure.savefig

    def save(figure: Figure, *args: Any, **kwargs: Any) -> None:
        savefig(figure, *args, **kwargs | {"dpi": 20})
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


def points(axes: Any) -> dict[str, list[list[float]]]:
    return {one.get_label(): one.get_offsets().tolist() for one in axes.collections}


@pytest.mark.medium
def test_a_panel_for_each_key(tmp_path, monkeypatch):
    figures = shapes(monkeypatch)
    rows = grid(lambda lr, size: 0.9 - lr - size / 1000, lr=[0.001, 0.01, 0.1], size=[16, 32])
    rows[5].state, rows[1].objective = JobState.failed, math.inf
    assert draw(rows, ACCURACY, tmp_path)
    before = (tmp_path / "sweep.png").read_bytes()
    lr, size = figures[0].axes
    assert [axes.get_xlabel() for axes in (lr, size)] == ["lr", "size"]
    assert (lr.get_xscale(), size.get_xscale(), lr.get_yscale()) == ("log", "linear", "linear")
    assert [label.get_text() for label in lr.get_xticklabels()] == ["0.001", "0.01", "0.1"]
    assert points(lr)["the best"] == [[0.001, pytest.approx(0.883)]]
    assert [point[0] for point in points(lr)["failed"]] == [0.001, 0.1], "infinity is no value"
    assert len(points(lr)["done"]) == 4
    assert figures[0].get_suptitle() == (
        "6 jobs: 5 done, 1 failed\nbest: job 0 with val/accuracy 0.883 (higher is better)"
    )
    assert draw(rows, ACCURACY, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"sweep.png": before}


@pytest.mark.medium
def test_texts_are_side_by_side_and_a_loss_that_went_far_up_leaves_the_others_apart(tmp_path, monkeypatch):
    figures = shapes(monkeypatch)
    rows = grid(lambda model: 1000 - 2 ** len(model), model=["lstm", "gru", "resnet18"])
    rows.append(JobRow(3, [f"key{k}=1" for k in range(20)], "3", JobState.interrupted, 1.0))
    assert draw(rows, LOSS, tmp_path)
    assert len(figures[0].axes) == 12
    assert figures[0].get_suptitle().endswith("the first 12 of 21 keys")
    axes = figures[0].axes[0]
    assert axes.get_yscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["lstm", "gru", "resnet18", "none"]
    assert points(axes)["stopped, running or interrupted"] == points(axes)["the best"] == [[3.0, 1.0]]


@pytest.mark.medium
def test_labels_of_near_numbers_do_not_cover_each_other(tmp_path, monkeypatch):
    figures = shapes(monkeypatch)
    near = [0.1, 0.01, 0.0101, 0.0102, 1e-8]
    assert draw(grid(lambda lr, n: lr + n, lr=near, n=[1.0, 1.01, 2.0]), LOSS, tmp_path)
    for axes, numbers in zip(figures[0].axes, (near, [1.0, 1.01, 2.0]), strict=True):
        shown = [label.get_text().replace("\N{MINUS SIGN}", "-") for label in axes.get_xticklabels()]
        assert not set(numbers) <= {float(text) for text in shown if text}, "they are numbers, no formulas"


@pytest.mark.medium
def test_no_job_is_marked_as_the_best_where_that_is_not_known(tmp_path, monkeypatch):
    figures = shapes(monkeypatch)
    rows = grid(lambda lr, size: lr - size, lr=[1, 2, 3], size=[1, 2])
    assert draw(rows, SweepObjective("value", maximize=None), tmp_path)
    assert all("the best" not in points(axes) for axes in figures[0].axes)
    assert figures[0].get_suptitle() == "6 jobs: 6 done\nno best: no direction was given"
    assert draw(grid(lambda lr, data: lr, lr=[1, 2], data=[1, 2]), LOSS, tmp_path)
    assert figures[1].get_suptitle() == "4 jobs: 4 done\nno best: jobs have other data"
    assert draw(grid(lambda lr, seed: lr, lr=[1, 2, 3], seed=[0, 1]), ACCURACY, tmp_path)
    assert [axes.get_xlabel() for axes in figures[2].axes] == ["lr"], "a seed is no axis"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        grid(lambda a: a, a=[1]),
        grid(lambda a: a, a=[1, 1]),
        [JobRow(0, ["a=1"], "0"), JobRow(1, ["a=2"], "1", JobState.failed, 0.5)],
        grid(lambda a: math.nan, a=[1, 2]),
    ],
    ids=["no jobs", "one job", "nothing swept", "no values", "nan"],
)
def test_there_may_be_nothing_to_draw(tmp_path, rows):
    assert not draw(rows, ACCURACY, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
def test_a_picture_that_fails_ends_no_sweep(tmp_path, monkeypatch, caplog):
    assert not draw(grid(lambda a: a, a=[1, 2]), ACCURACY, tmp_path / "none")
    assert "there is no picture of the sweep: cannot write" in caplog.text
    monkeypatch.setattr(plot, "_figure", lambda *_: 1 / 0)
    assert not draw(grid(lambda a: a, a=[1, 2]), ACCURACY, tmp_path)
    assert "there is no picture of the sweep: division by zero" in caplog.text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw(grid(lambda a: a, a=[1, 2]), ACCURACY, tmp_path)
    assert "pip install 'ddp-hydra[plot]'" in caplog.text


@pytest.mark.integration
def test_matplotlib_is_imported_only_to_draw():
    code = "import sys; from ddp_hydra.sweep import plot; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


values = st.text(max_size=20) | st.floats().map(str) | st.sampled_from(["$x$", "$", "0", "-1", "1e-300", "1e300", "名"])


@pytest.mark.medium
@settings(deadline=None, max_examples=max(5, settings().max_examples // 3))
@given(st.data())
def test_any_values_can_be_drawn(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("picture")
    numbers = st.none() | st.floats()
    rows = [
        JobRow(
            number,
            [f"a={data.draw(values)}", f"$b={data.draw(values)}"],
            "",
            data.draw(st.sampled_from(JobState)),
            value,
        )
        for number, value in enumerate(data.draw(st.lists(numbers, max_size=6)))
    ]
    objective = SweepObjective("$loss", data.draw(st.booleans()))
    keys = {key for given in swept(rows).values() for key in given}
    has_values = any(
        row.state != JobState.failed and abs(math.inf if row.objective is None else row.objective) < 1e30
        for row in rows
    )
    assert (
        draw(rows, objective, folder)
        == (folder / "sweep.png").exists()
        == (len(rows) > 1 and bool(keys) and has_values)
    )


@pytest.mark.medium
@pytest.mark.parametrize("content", ["MPLBACKEND", "raise RuntimeError('no')", "import nothing_of_this_name", ""])
def test_a_matplotlib_that_cannot_be_imported_is_one_line(tmp_path, content):
    SummaryFiles(tmp_path, LOSS).write(grid(lambda lr: lr, lr=[0.1, 0.2]), now=True)
    if content not in ("", "MPLBACKEND"):
        (tmp_path / "matplotlib.py").write_text(content)
    backend = {"MPLBACKEND": "nonsense"} if content == "MPLBACKEND" else {}
    code = f"""
from multiprocessing import Pipe
from pathlib import Path
from ddp_hydra.sweep.plot import draw_at_end
from ddp_hydra.sweep.rows import SweepObjective
here, there = Pipe()
here.send_bytes(b"draw")
draw_at_end(there, SweepObjective("val/loss", maximize=False), Path({str(tmp_path)!r}))
"""
    environment = {**os.environ, **backend, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "sweep.png").exists() is not bool(content)
    lines = ended.stderr.splitlines()
    assert len(lines) == bool(content), ended.stderr
    assert all(line.startswith("there is no picture of the sweep") for line in lines)


@pytest.mark.parametrize(
    ("given", "places", "labels"),
    [
        (["0.1", "1e-3", "10"], [0.1, 0.001, 10.0], []),
        (["b", "a", "b", "1"], [0, 1, 0, 2], ["b", "a", "1"]),
        (["1", None, "nan"], [0, 1, 2], ["1", "none", "nan"]),
        (["x" * 50, "", "a\n b"], [0, 1, 2], ["x" * 17 + "…", "''", "a b"]),
    ],
)
def test_numbers_lie_where_they_are_and_texts_side_by_side(given, places, labels):
    found, texts = positions(dict(enumerate(given)))
    assert (list(found.values()), texts) == (places, labels)
