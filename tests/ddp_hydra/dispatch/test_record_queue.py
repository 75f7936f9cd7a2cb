from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from ddp_hydra.dispatch import Gang, call
from ddp_hydra.dispatch import attempt as module
from ddp_hydra.dispatch.attempt import RecordQueue
from ddp_hydra.record import File, Histogram, Log, Metrics, Notice, Record, Text

Make = Callable[..., RecordQueue]


def record(n, rank=0):
    return Record(Log("x"), rank, step=n)


def numbers(records):
    return [one.step for one in records]


class Stage:
    def __init__(self) -> None:
        self.read: list[Record] = []
        self.acknowledged: list[tuple[int, int]] = []
        self.alarms = threading.Semaphore(0)
        self.refused: dict[int, BaseException] = {}
        self.readers: list[RecordQueue] = []

    def reader(self, **actions) -> RecordQueue:
        given = {"on_record": self.on_record, "acknowledge": lambda *args: self.acknowledged.append(args)}
        self.readers.append(RecordQueue(**{**given, "on_error": self.alarms.release, **actions}))
        self.readers[-1].start()
        return self.readers[-1]

    def on_record(self, one: Record) -> None:
        if one.step in self.refused:
            raise self.refused[one.step]
        self.read.append(one)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    for reader in made.readers:
        reader.close()
        assert not reader.thread.is_alive()


def test_records_are_read_in_order_on_another_thread_and_acknowledged(stage):
    threads = set()
    reader = stage.reader(on_record=lambda one: (threads.add(threading.current_thread()), stage.on_record(one)))
    for n in range(100):
        reader.put(record(n, rank=n % 3), size=n)
    assert reader.catch_up()
    assert numbers(stage.read) == list(range(100))
    assert stage.acknowledged == [(n % 3, n) for n in range(100)]
    assert threads == {reader.thread}


def test_a_slow_record_does_not_hold_up_who_puts_them(stage):
    resume = threading.Event()
    reader = stage.reader(on_record=lambda one: (resume.wait(), stage.on_record(one)))
    for n in range(3):
        reader.put(record(n), 1)
    assert not reader.catch_up(until=time.monotonic())
    resume.set()
    assert reader.catch_up()
    assert numbers(stage.read) == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError("bad"), OSError("full"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_reading_stops_at_the_first_record_that_cannot_be_read(stage, error):
    stage.refused[1] = error
    reader = stage.reader()
    for n in range(3):
        reader.put(record(n), 1)
    assert stage.alarms.acquire(timeout=60)
    assert not reader.catch_up()
    assert (reader.error, reader.failed.step) == (error, 1)
    assert (numbers(stage.read), stage.acknowledged) == ([0], [(0, 1)])
    reader.close()
    reader.close()
    assert not reader.thread.is_alive()


def test_a_record_that_is_skipped_is_left_out_and_reading_goes_on(stage, caplog):
    stage.refused = {n: ValueError(f"gone {n}") for n in (1, 3)}
    reader = stage.reader()
    for n in range(5):
        reader.put(record(n), 1)
    for n in (1, 3):
        assert stage.alarms.acquire(timeout=60)
        assert reader.failed.step == n
        reader.skip_failed()
    assert reader.catch_up()
    assert (reader.error, reader.failed) == (None, None)
    assert numbers(stage.read) == [0, 2, 4]
    assert caplog.messages == ["lost with its host: gone 1", "lost with its host: gone 3"]


def test_an_acknowledgement_that_fails_is_an_error_too(stage):
    def fail(*_):
        raise RuntimeError("no loop")

    reader = stage.reader(acknowledge=fail)
    reader.put(record(0), 1)
    assert stage.alarms.acquire(timeout=60)
    assert str(reader.error) == "no loop"


def test_a_closed_reader_reads_no_more(stage):
    reading, resume = threading.Event(), threading.Event()
    reader = stage.reader(on_record=lambda one: (reading.set(), resume.wait(), stage.on_record(one)))
    for n in range(3):
        reader.put(record(n), 1)
    assert reading.wait(60)
    closer = threading.Thread(target=reader.close)
    closer.start()
    while not reader.closed:
        time.sleep(0.001)
    resume.set()
    closer.join()
    assert numbers(stage.read) == [0]


def test_a_record_that_fails_while_the_reader_is_closed_does_not_keep_its_thread(stage, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.0)
    reading, resume = threading.Event(), threading.Event()
    stage.refused[0] = ValueError("bad")
    reader = stage.reader(on_record=lambda one: (reading.set(), resume.wait(), stage.on_record(one)))
    reader.put(record(0), 1)
    assert reading.wait(60)
    reader.close()
    assert reader.thread.is_alive()
    resume.set()
    reader.thread.join(30)
    assert not reader.thread.is_alive()


# -- those that nobody reads -------------------------------------------------------------------------------

FILE = Record(File("a.bin", 3 * 2**20, "", source="/spool/1"), 1)
SENT = [
    Record(Metrics({"x": 1.0})),
    Record(Metrics({"x": 2.0})),
    Record(Text(name="n", text="t")),
    Record(Histogram(name="n", counts=[1], edges=[0.0, 1.0])),
    Record(Log("printed\n")),
    Record(File("b.txt", 2**20, "", inline="")),
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
    Gang(None).unread.report()
    gang = hear(attempt, on_record)
    assert attempt.dropped == [FILE]
    assert not caplog.text
    gang.unread.report()
    assert (
        "results.*: 2 metrics records, 1 text, 1 histogram, 2 files (4.0 MiB); have it written with "
        "run_dir=<folder>, or receive it with dispatch.Gang(client, on_record=" in caplog.text
    )
    assert capsys.readouterr().out == ("printed\n" if on_record else "")


def test_a_file_that_a_reader_leaves_is_dropped_and_one_that_it_fetches_is_not(attempt, tmp_path):
    gang = hear(attempt, lambda record: None)
    assert (attempt.dropped, gang.unread.counts) == ([FILE], {"file": 1})
    attempt.dropped.clear()
    gang = Gang(None, on_record=lambda record: getattr(record.data, "source", None) and gang.fetch(record, tmp_path))
    for record in SENT:
        gang.read(attempt, record)
    assert (attempt.dropped, attempt.fetched, gang.unread.counts) == ([], [FILE], {})


def test_a_reader_gets_no_warnings_for_they_are_logged(attempt):
    read = []
    Gang(None, on_record=read.append).read(attempt, Record(Notice("a slow disk")))
    assert not read
