from __future__ import annotations

import csv
import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep import summary_files
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.summary_files import SummaryFiles, json_text, read, take_value
from ddp_hydra.sweep.tables import csv_text, markdown_text
from ddp_hydra.writers import tensorboard
from tests.support.clocks import set_time

ACCURACY = SweepObjective("val/accuracy", maximize=True)


def job(number: int, *overrides: str, **changes: Any) -> JobRow:
    given = {"overrides": list(overrides) or [f"optimizer.lr={number}"], "folder": f"multirun/{number}"}
    return JobRow(number, **given | changes)


def done(number: int, objective: float, *overrides: str, **changes: Any) -> JobRow:
    metrics = {"val/accuracy": objective, "train/loss": 1 - objective}
    return job(number, *overrides, state=JobState.done, objective=objective, metrics=metrics, step=100, **changes)


ROWS = [
    done(0, 0.5, "optimizer.lr=0.1", "loss=a", "seed=1", wall_s=61.25, workers=2),
    done(1, 0.75, "optimizer.lr=0.01", "loss=a", "seed=1", wall_s=3725.0, total_steps=100),
    job(2, "optimizer.lr=9", "loss=a|b", "seed=1", state=JobState.failed, step=3, message="no\n*sense* | at <all>"),
    job(3, "optimizer.lr=1", "loss=a", "seed=1", state=JobState.running, step=5, total_steps=100, workers=1),
    job(4, "optimizer.lr=2", "loss=a", "seed=1"),
]


def table(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines()))


def cells(text: str) -> list[list[str]]:
    """What a reader of the Markdown sees, row by row."""
    html = MarkdownIt().enable("table").render(text)
    plain = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", html, re.DOTALL)]
    width = len(re.findall("<th", html)) - len(re.findall("<thead", html))
    unescaped = [
        cell.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&") for cell in plain
    ]
    return [unescaped[start : start + width] for start in range(0, len(unescaped), width)]


# -- sweep.json --------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**63 - 1)
returned = st.recursive(
    st.none() | st.booleans() | counts | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
texts = st.text(st.characters())
rows = st.builds(
    JobRow,
    number=counts,
    overrides=st.lists(texts, max_size=3),
    folder=texts,
    state=st.sampled_from(JobState),
    objective=st.none() | numbers,
    metrics=st.dictionaries(texts, st.none() | numbers, max_size=3),
    step=st.none() | counts,
    total_steps=st.none() | counts,
    epoch=st.none() | numbers,
    epochs=st.none() | numbers,
    workers=counts,
    wall_s=numbers,
    eta_s=st.none() | numbers,
    message=texts,
    value=returned,
    filled=st.dictionaries(texts, texts, max_size=2),
)


@pytest.mark.medium
@given(st.lists(rows, max_size=3, unique_by=lambda row: row.number))
def test_what_was_written_is_read(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("sweep")
    SummaryFiles(folder, ACCURACY).write(rows)
    assert read(folder) == rows
    assert {path.name for path in folder.iterdir()} - {"seeds.csv"} == {"sweep.json", "sweep.csv", "sweep.md"}


def test_json_has_no_word_for_nan(tmp_path):
    odd = done(0, math.nan, value=[math.inf, (1, math.nan)], wall_s=1.0, eta_s=math.inf)
    SummaryFiles(tmp_path, ACCURACY).write([odd])
    text = (tmp_path / "sweep.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    (row,) = read(tmp_path)
    assert (row.objective, row.metrics["val/accuracy"], row.value, row.eta_s) == (None, None, [None, [1, None]], None)


GOOD = json.loads(json_text([done(0, 0.5)], ACCURACY))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": -1}, "Expected `int` >= 0 - at `$.jobs[0].number`"),
        ({"overrides": "a=1"}, "Expected `array`, got `str` - at `$.jobs[0].overrides`"),
        ({"state": "asleep"}, "Invalid enum value 'asleep' - at `$.jobs[0].state`"),
        ({"objective": "0.5"}, "Expected `float | null`, got `str` - at `$.jobs[0].objective`"),
        ({"objective": 10**400}, "Number out of range - at `$.jobs[0].objective`"),
        ({"metrics": {"a": "b"}}, "at `$.jobs[0].metrics[...]`"),
        ({"wall_s": None}, "Expected `float`, got `null` - at `$.jobs[0].wall_s`"),
    ],
)
def test_a_job_that_is_none_is_refused(tmp_path, changes, words):
    (tmp_path / "sweep.json").write_text(json.dumps(GOOD | {"jobs": [GOOD["jobs"][0] | changes]}))
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        read(tmp_path)
    assert str(tmp_path / "sweep.json") in str(error.value)
    assert "hydra.sweep.dir=<folder>" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}', b'{"version": 2, "jobs": []}',
        json.dumps(GOOD | {"jobs": GOOD["jobs"] * 2}).encode(), json.dumps(GOOD).replace("0.5", "NaN").encode(),
        json.dumps(GOOD).replace("0.5", "1e999").encode(), json.dumps(GOOD).replace("0.5", "9" * 5000).encode(),
    ],
    ids=lambda content: content[:30].decode(errors="replace"),
)  # fmt: skip
def test_any_other_file_is_refused(tmp_path, content):
    (tmp_path / "sweep.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"sweep\.json is not what a sweep writes \(.+\): move it away"):
        read(tmp_path)


def test_what_a_newer_version_adds_does_not_matter(tmp_path):
    assert read(tmp_path) == [], "there is no file yet"
    (tmp_path / "sweep.json").write_text(json.dumps(GOOD | {"more": 1, "jobs": [GOOD["jobs"][0] | {"more": 1}]}))
    assert read(tmp_path) == [done(0, 0.5)]


# -- sweep.csv ---------------------------------------------------------------------------------------------


def test_the_csv_has_a_line_a_job_best_first():
    assert table(csv_text(ROWS, ACCURACY)) == [
        [
            "number", "state", "optimizer.lr", "loss", "val/accuracy", "train/loss", "steps", "workers", "wall_s",
            "folder", "message",
        ],
        ["1", "done", "0.01", "a", "0.75", "0.25", "100", "0", "3725.0", "multirun/1", ""],
        ["0", "done", "0.1", "a", "0.5", "0.5", "100", "2", "61.25", "multirun/0", ""],
        ["3", "running", "1", "a", "", "", "5", "1", "0.0", "multirun/3", ""],
        ["4", "queued", "2", "a", "", "", "", "0", "0.0", "multirun/4", ""],
        ["2", "failed", "9", "a|b", "", "", "3", "0", "0.0", "multirun/2", "no *sense* | at <all>"],
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["=1+1", "+cmd|x", "-2+3", "@SUM(A1)", "\t=1", " =1", "\x00=1", "\uff1d1", "\r\n=1"])
def test_no_cell_is_a_formula(text):
    rows = [job(0, f"a={text}", message=text), job(1, "a=1", metrics={text: 1.0}, folder=text)]
    for line in table(csv_text(rows, ACCURACY)):
        assert not [cell for cell in line if re.match(r"\s*[=+\-@\uff1d]", cell)]


def test_negative_numbers_stay_numbers():
    lines = table(csv_text([job(0, "a=-1"), job(1, "a=+2.5e-3"), job(2, "a=-1-1")], ACCURACY))
    assert [line[2] for line in lines] == ["a", "-1", "+2.5e-3", "'-1-1"]


@given(
    st.lists(rows, min_size=1, max_size=3, unique_by=lambda row: row.number),
    st.sampled_from([ACCURACY, SweepObjective("m", None)]),
)
def test_each_job_is_one_line_of_each_table(rows, objective):
    text = csv_text(rows, objective)
    assert len(text.splitlines()) == len(rows) + 1
    assert len({len(line) for line in table(text)}) == 1
    markdown = markdown_text(rows, objective)
    lines = [line for line in markdown.split("\n") if line.startswith("|")]
    assert len(lines) == len(rows) + 2 * sum(line.startswith("| --: | :-- |") for line in lines)
    markdown.encode(), text.encode()


# -- sweep.md ----------------------------------------------------------------------------------------------


def test_the_markdown_is_a_table_best_first():
    text = markdown_text(ROWS, ACCURACY)
    assert text.startswith(
        "# Sweep of 5 jobs: 2 done, 1 failed, 1 running, 1 queued\n\nBest first by val/accuracy: higher"
    )
    assert cells(text) == [
        ["job", "state", "optimizer.lr", "loss", "val/accuracy", "steps", "time", "message"],
        ["1", "done", "0.01", "a", "0.75", "100/100", "1:02:05 h", ""],
        ["0", "done", "0.1", "a", "0.5", "100", "1:01 min", ""],
        ["3", "running", "1", "a", "", "5/100", "", ""],
        ["4", "queued", "2", "a", "", "", "", ""],
        ["2", "failed", "9", "a|b", "", "3", "", "no *sense* | at <all>"],
    ]
    assert text.count("**") == 2


def test_without_a_direction_no_job_is_called_better():
    text = markdown_text(ROWS, SweepObjective("value", maximize=None))
    assert "hydra.launcher.direction=maximize" in text
    assert "better:" not in text
    assert "**" not in text
    assert [line[0] for line in cells(text)[1:]] == ["0", "1", "3", "4", "2"]


def test_several_objectives_are_shown_and_no_direction_is_asked_for():
    objective, row = SweepObjective("value", maximize=None), JobRow(0, ["a=1"], "0", JobState.done)
    take_value(row, (0.5, 2), objective)
    text = markdown_text([row], objective)
    assert "several objectives" in text
    assert "direction" not in text
    assert cells(text)[1][3] == "0.5, 2"
    assert "value[0]" in csv_text([row], objective)


def test_of_a_population_the_best_is_of_the_last_generation():
    rows = [done(n, 1 - n / 10) for n in range(4)]
    for row in rows:
        row.labels = {"generation": str(row.number // 2)}
    assert re.findall(r"\*\*(.*?)\*\*", markdown_text(rows, ACCURACY)) == ["0.8"]


def test_each_data_set_has_a_best_of_its_own():
    rows = [done(n, n / 10, f"data={'ab'[n % 2]}", f"lr={n}") for n in range(4)]
    text = markdown_text(rows, ACCURACY)
    assert "\nGrouped by data set and model, the best first in each group by val/accuracy: higher is better.\n" in text
    assert re.findall("## (.*)", text) == ["data=a", "data=b"]
    first, second = text.split("## data=b")
    assert [line[0] for line in cells(first)] == ["job", "2", "0"]
    assert [line[0] for line in cells(second)] == ["job", "3", "1"]
    assert cells(first)[0] == ["job", "state", "lr", "val/accuracy", "steps", "time", "message"]
    assert re.findall(r"\*\*(.*?)\*\*", text) == ["0.2", "0.3"]


def test_each_model_has_a_table_and_it_is_said_which_is_the_best_of_all():
    rows = [done(n, n / 10, f"model={'ab'[n % 2]}", f"lr={n}") for n in range(4)]
    rows.append(done(4, 0.05, "lr=4", filled={"model": "b"}))
    text = markdown_text(rows, ACCURACY)
    assert (
        "\nGrouped by model, the best first in each group by val/accuracy: higher is better. "
        "The best of all is job 3 with model=b.\n" in text
    )
    first, second = text.split("## model=a")
    assert [line[0] for line in cells(first)] == ["job", "3", "1", "4"]
    assert [line[0] for line in cells(second)] == ["job", "2", "0"]
    both = [done(0, 0.1, "model=a", "data=x"), done(1, 0.2, "model=b", "data=y")]
    assert "Grouped by data set and model, the best" in markdown_text(both, ACCURACY)
    assert "best of all" not in markdown_text(both, ACCURACY)
    assert "best of all" not in markdown_text(rows, SweepObjective("val/accuracy", None))


SEEDS = [
    done(2 * n + seed, value, f"lr={lr}", f"seed={seed}")
    for n, lr, values in ((0, "0.1", (0.5, 0.7)), (1, "0.01", (0.9, 0.8)))
    for seed, value in enumerate(values)
]


def test_a_sweep_that_repeats_seeds_has_a_table_of_means(tmp_path):
    SummaryFiles(tmp_path, ACCURACY).write([*SEEDS, job(4, "lr=1", "seed=0"), job(5, "lr=1", "seed=1")])
    page = (tmp_path / "sweep.md").read_text()
    head, _, jobs = page.partition("## Jobs")
    assert cells(head) == [
        ["lr", "val/accuracy, mean ± sd", "best", "worst", "n", "jobs"],
        ["0.01", "0.85 ± 0.071", "0.9", "0.8", "2", "2, 3"],
        ["0.1", "0.6 ± 0.14", "0.7", "0.5", "2", "0, 1"],
        ["1", "", "", "", "0 of 2", "4, 5"],
    ]
    assert [line[0] for line in cells(jobs)] == ["job", "2", "3", "1", "0", "4", "5"]
    lines = table((tmp_path / "seeds.csv").read_text())
    metric = "val/accuracy"
    assert lines[0] == ["lr", f"{metric} mean", f"{metric} sd", f"{metric} best", f"{metric} worst", "n", "jobs"]
    assert [line[0] for line in lines[1:]] == ["0.01", "0.1", "1"]
    assert float(lines[1][2]) == pytest.approx(0.05 * 2**0.5)
    first = json.loads((tmp_path / "sweep.json").read_text())["seeds"][0]
    assert first == {
        "values": {"lr": "0.01"}, "jobs": [2, 3], "n": 2, "mean": pytest.approx(0.85),
        "sd": pytest.approx(0.05 * 2**0.5), "best": 0.9, "worst": 0.8,
    }  # fmt: skip
    assert len(read(tmp_path)) == 6


@given(st.text(st.sampled_from("|\\`*_[]<>&~$#!a1 \n-=.:;()'\"")))
def test_the_markdown_shows_what_was_said(text):
    shown = cells(markdown_text([job(0, "a=1", message=text), job(1, "a=2")], ACCURACY))
    assert shown[1][-1].split() == text.split()


def test_a_long_message_is_cut_and_one_job_alone_shows_all_that_was_given():
    head, line = cells(markdown_text([job(0, "a=1", "b=2", message="word " * 1000)], ACCURACY))
    assert head[2:4] == ["a", "b"]
    assert len(line[-1]) <= 300


# -- writing -----------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_files_are_written_about_once_a_second_and_at_the_end(tmp_path, monkeypatch):
    now, texts = [0.0], []
    set_time(monkeypatch, summary_files, monotonic=lambda: now[0])
    set_time(monkeypatch, summary_files, process_time=lambda: 0.0)
    monkeypatch.setattr(summary_files, "json_text", lambda *given: texts.append(now[0]) or json_text(*given))
    rows = [job(number) for number in range(500)]
    made = SummaryFiles(tmp_path, ACCURACY)
    for row in rows:  # a job begins and ends each 10 ms
        for row.state in (JobState.running, JobState.done):
            made.write(rows)
            now[0] += 0.005
    assert texts == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0], abs=0.03)
    made.write(rows, now=True)
    assert read(made.folder) == rows


def test_slow_writes_take_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    now, begun = [0.0], []

    def write(*_: object) -> str:
        begun.append(now[0])
        now[0] += 0.5
        return "{}"

    set_time(monkeypatch, summary_files, monotonic=lambda: now[0])
    set_time(monkeypatch, summary_files, process_time=lambda: now[0])
    monkeypatch.setattr(summary_files, "json_text", write)
    made = SummaryFiles(tmp_path, ACCURACY)
    while now[0] < 100:
        made.write(ROWS)
        now[0] += 0.1
    assert len(begun) * 0.5 <= 100 / 20 + 0.5


def test_a_file_that_would_be_the_same_is_left(tmp_path):
    made = SummaryFiles(tmp_path, ACCURACY)
    made.write(ROWS)
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    made.write(ROWS, now=True)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_a_full_disk_is_said_once_and_tried_again(tmp_path, monkeypatch, caplog):
    made = SummaryFiles(tmp_path, ACCURACY)
    made.write(ROWS[:1])
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write_bytes(path, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    made.write(ROWS)
    made.write(ROWS, now=True)
    assert len(caplog.messages) == 1
    assert "the sweep goes on" in caplog.text
    assert "free some space" in caplog.text
    assert read(tmp_path) == ROWS[:1]
    monkeypatch.undo()
    set_time(monkeypatch, summary_files, monotonic=lambda: 1e12)  # when it tries again
    made.write(ROWS)
    assert read(tmp_path) == ROWS
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "sweep.csv", "sweep.md"}


def test_drafts_of_a_killed_sweep_are_removed(tmp_path):
    (tmp_path / ".part-0123").write_text("half")
    SummaryFiles(tmp_path, ACCURACY).write(ROWS)
    assert not list(tmp_path.glob(".part-*"))


# -- the HParams tab ---------------------------------------------------------------------------------------


def test_the_tab_gets_its_columns_once_there_are_curves(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(tensorboard, "write_experiment", lambda *args: calls.append(args))
    rows = [job(0, folder=str(tmp_path / "0")), job(1, folder=str(tmp_path / "1"))]
    made = SummaryFiles(tmp_path, ACCURACY)
    made.write(rows, now=True)
    rows[0].metrics = {"lr": 1.0, "train/loss": 1.0}
    made.write(rows, now=True)
    assert calls == []
    (tmp_path / "0" / "tensorboard").mkdir(parents=True)
    for step in range(3):
        rows[0].step = step
        made.write(rows, now=True)
    given = [row.overrides for row in rows]
    assert calls == [(tmp_path, given, ["val/accuracy", "train/loss"])]
    rows.append(job(2))
    made.write(rows, now=True)
    assert calls[1][1:] == ([*given, rows[2].overrides], ["val/accuracy", "train/loss"])
    rows[0].metrics = {"b": 1.0, "a": None}
    made.write(rows, now=True)
    assert calls[2][2] == ["val/accuracy", "a", "b"], "metrics with other names are all shown"
