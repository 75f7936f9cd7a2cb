from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddp_hydra.dispatch import Gang, call
from ddp_hydra.dispatch.unread_records import UnreadRecords
from ddp_hydra.results import Record

FILE = Record("file", {"path": "a.bin", "source": "/spool/1", "size": 3 * 2**20}, 1)
SENT = [
    Record("metrics", {"metrics": {"x": 1.0}}),
    Record("metrics", {"metrics": {"x": 2.0}}),
    Record("text", {"name": "n", "text": "t"}),
    Record("log", {"text": "printed\n"}),
    Record("file", {"path": "b.txt", "inline": "", "size": 2**20}),
    FILE,
]


@pytest.fixture
def attempt() -> SimpleNamespace:
    """Of which only is seen which files were dropped and fetched."""
    dropped, fetched = [], []
    workers = SimpleNamespace(drop=dropped.append, fetch=lambda record, target: fetched.append(record))
    return SimpleNamespace(workers=workers, dropped=dropped, fetched=fetched)


def hear(attempt, on_record) -> Gang:
    gang = Gang(None, on_record=on_record)
    for record in SENT:
        gang.read(attempt, record)
    return gang


@pytest.mark.parametrize("on_record", [None, call.show])
def test_what_nobody_takes_is_counted_said_and_does_not_stay_on_the_way(attempt, on_record, caplog, capsys):
    gang = hear(attempt, on_record)
    assert attempt.dropped == [FILE]
    with gang.reporting_dropped():
        assert not caplog.text
    assert (
        "results.*: 2 metrics records, 1 text, 2 files (4.0 MiB); have it written with "
        "run_dir=<folder>, or receive it with dispatch.Gang(client, on_record=" in caplog.text
    )
    assert capsys.readouterr().out == ("printed\n" if on_record else "")


def test_a_file_that_a_reader_leaves_is_dropped_and_one_that_it_fetches_is_not(attempt, tmp_path):
    gang = hear(attempt, lambda record: None)
    assert (attempt.dropped, gang.unread.counts) == ([FILE], {"file": 1})
    attempt.dropped.clear()
    gang = Gang(None)
    gang.on_record = lambda record: gang.fetch(record, tmp_path) if "source" in record.data else None
    for record in SENT:
        gang.read(attempt, record)
    assert (attempt.dropped, attempt.fetched, gang.unread.counts) == ([], [FILE], {})


def test_where_nothing_was_dropped_nothing_is_said(caplog):
    with Gang(None).reporting_dropped():
        pass
    assert (UnreadRecords().sentence(), caplog.text) == ("", "")
