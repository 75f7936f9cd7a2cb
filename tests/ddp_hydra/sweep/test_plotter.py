"""When the plot of a sweep is drawn."""

from __future__ import annotations

import pytest

from ddp_hydra.sweep import plotter
from ddp_hydra.sweep.plotter import Plotter
from ddp_hydra.sweep.rows import Objective, Row, State

LOSS = Objective("loss", "minimize")


def rows(*values: float) -> list[Row]:
    return [
        Row(number, [f"lr={number}"], str(number), State.done, objective=value) for number, value in enumerate(values)
    ]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder, in which each drawing appends a line instead: how many rows it shows."""
    monkeypatch.setattr(plotter, "draw", lambda rows, objective, folder: append(folder / "drawn", len(rows)))
    return tmp_path


def append(path, number):
    with path.open("a") as file:
        file.write(f"{number}\n")
    return True


def drawn(folder) -> list[int]:
    return [int(line) for line in (folder / "drawn").read_text().splitlines()] if (folder / "drawn").exists() else []


@pytest.mark.medium
def test_a_process_that_was_prepared_draws_what_it_is_sent_later(pictures):
    plot = Plotter(pictures, LOSS)
    plot.prepare()
    process = plot.process
    plot.prepare()
    assert plot.process is process, "one is enough"
    plot.draw(rows(1.0, 2.0, 3.0))
    assert plot.process is process
    plot.finish()
    assert drawn(pictures) == [3]
    assert process is not None
    assert not process.process.is_alive()


@pytest.mark.medium
def test_batches_soon_after_each_other_are_drawn_once_and_the_last_one_always(pictures, monkeypatch):
    plot = Plotter(pictures, LOSS)
    plot.draw(rows(1.0))
    for _ in range(3):
        plot.prepare()
        plot.draw(rows(1.0, 2.0))
    assert plot.has_news
    plot.draw(rows(1.0, 2.0), is_last=True)
    assert not plot.has_news
    plot.finish()
    assert drawn(pictures) == [1, 2]


@pytest.mark.medium
def test_a_process_without_work_ends_at_once_and_silently(pictures, capfd):
    plot = Plotter(pictures, LOSS)
    plot.prepare()
    process = plot.process
    plot.finish()
    assert process is not None
    assert not process.process.is_alive()
    assert drawn(pictures) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.medium
def test_a_process_that_has_ended_is_no_error(pictures):
    plot = Plotter(pictures, LOSS)
    plot.prepare()
    assert plot.process is not None
    plot.process.process.kill()
    plot.process.process.join()
    plot.draw(rows(1.0))
    plot.finish()
    assert drawn(pictures) == []
