"""The table of `make golden` says what is wrong; its jobs are run by hand, with an older wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden


class Stub:
    """Comes to what it is told."""

    def __init__(self, **found: str) -> None:
        self.found = {job.replace("_", " "): digest for job, digest in found.items()}

    def run(self, job: str, places: dict[str, Path]) -> str:
        return self.found[job]


@pytest.fixture(autouse=True)
def jobs(monkeypatch):
    monkeypatch.setattr(golden, "SAME", {"resumed": "whole"})
    monkeypatch.setattr(golden, "CHANGED", {"tokens": "they weigh the same"})


def compared(old: Stub, new: Stub) -> bool:
    return golden.compare(old, new, list(new.found), {})  # type: ignore[arg-type]


def test_equal_jobs_are_right(capsys):
    assert compared(Stub(whole="a", resumed="a"), Stub(whole="a", resumed="a"))
    assert "all 2 jobs are right" in capsys.readouterr().out
    assert compared(Stub(tokens="a"), Stub(tokens="b"))
    assert "changed: they weigh the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (Stub(whole="a"), Stub(whole="b"), "DIFFERS"),
        (Stub(tokens="a"), Stub(tokens="exit 1"), "FAILED"),
        (Stub(whole="exit 1"), Stub(whole="exit 1"), "FAILED"),
        (Stub(whole="a", resumed="b"), Stub(whole="a", resumed="b"), "NOT AS whole"),
    ],
)
def test_a_wrong_job_is_named(old, new, shown, capsys):
    assert not compared(old, new)
    said = capsys.readouterr().out
    assert shown in said
    assert f"wrong: {list(new.found)[-1]}" in said


def test_all_names_are_those_of_jobs(monkeypatch):
    monkeypatch.undo()
    assert {*golden.SAME, *golden.SAME.values(), *golden.CHANGED} <= set(golden.JOBS)
