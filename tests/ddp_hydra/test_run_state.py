"""summary.json and status.json: what is written is read back, and what can't be read is a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.cli import runs
from ddp_hydra.errors import ConfigError
from ddp_hydra.record import Record, Start
from ddp_hydra.run_state import (
    AttemptEntry,
    Best,
    FailureEntry,
    Objective,
    Status,
    Summary,
    decode,
    encode,
)
from ddp_hydra.runs import details
from ddp_hydra.runs.run_files import LocalRunFiles
from ddp_hydra.writers.run_dir import next_attempt, read_summary, write_summary

FILES = Path(__file__).parents[2] / "docs/reference/files.md"
ENDED = Summary(
    status="failed",
    failure=FailureEntry(kind="raised", rank=1, host="h", step=3, message="\x1b[31m \ud800 é"),
    objective=Objective("val/loss", "minimize"),
    metrics={"val/loss": None, "lr": 0.1},
    best=Best(2, 0.5),
    attempts=[AttemptEntry(attempt=1, failure=FailureEntry(kind="lost"))],
    tags=["a"],
)


@pytest.mark.parametrize(
    "state", [ENDED, Summary(status="failed"), Status(), Status(start=Record(Start(total_steps=5)))]
)
def test_what_is_written_is_read_back(state):
    assert decode(encode(state), type(state), "x") == state


def test_a_field_of_a_newer_version_is_left_out_and_one_that_is_missing_has_its_default():
    assert decode(b'{"status": "done", "new": [1]}', Summary, "x") == Summary(status="done")
    assert decode(b"", Summary, "x") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "run/summary.json can't be read: Expecting"),
        (b"[" * 100_000, "run/summary.json can't be read: maximum recursion"),
        (
            b'{"status": "", "steps": "3"}',
            r"run/summary.json can't be read: Expected `int \| null`, got `str` - at `\$.steps`",
        ),
        (b'{"status": "", "metrics": {"x": 1%s}}' % (b"0" * 400), "run/summary.json can't be read: "),
        (b'{"status": "", "attempts": [{"failure": 7}]}', r"at `\$.attempts\[0\].failure`"),
        (b'{"format": 2, "ddp_hydra": "9.1"}', "has format 2, and this version reads format 1: use .* wrote it, 9.1"),
        (b'{"format": "x", "steps": "y"}', "has format 'x', and this version reads format 1"),
    ],
)
def test_what_can_not_be_read_is_a_sentence(tmp_path, content, said):
    with pytest.raises(ConfigError, match=said) as caught:
        decode(content, Summary, "run/summary.json")
    assert "\n" not in str(caught.value)
    (tmp_path / "summary.json").write_bytes(content)
    for read in (read_summary, next_attempt):
        with pytest.raises(ConfigError, match=r"summary.json (can't be read|has format)"):
            read(tmp_path)


@given(st.binary(max_size=40) | st.dictionaries(st.sampled_from(Summary.__struct_fields__), st.integers() | st.text()))
def test_nothing_else_is_raised(content):
    given = content if isinstance(content, bytes) else json.dumps(content).encode()
    for kind in (Summary, Status):
        try:
            found = decode(given, kind, "x")
        except ConfigError:
            continue
        assert found is None or decode(encode(found), kind, "x") == found


def test_a_list_of_runs_shows_all_and_says_which_file_can_not_be_read(tmp_path, monkeypatch, capsys):
    write_summary(tmp_path / "outputs/good", Summary(status="done", steps=3))
    (tmp_path / "outputs/bad").mkdir()
    (tmp_path / "outputs/bad/summary.json").write_text('{"format": 9}')
    monkeypatch.chdir(tmp_path)
    runs.main(["ls", "outputs", "json=true"])
    rows = {Path(row["run"]).name: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (rows["good"]["status"], rows["good"]["step"]) == ("done", 3)
    assert rows["bad"]["status"] == "unreadable"
    assert "outputs/bad/summary.json has format 9" in rows["bad"]["message"]
    assert "has format 9" in details.run_details(LocalRunFiles("outputs/bad"))["message"]


@pytest.mark.parametrize(("kind", "name"), [(Summary, "summary.json"), (Status, "status.json")])
def test_each_field_is_described(kind, name):
    section = FILES.read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(kind.__struct_fields__)
