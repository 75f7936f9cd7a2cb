from __future__ import annotations

import contextlib
import json
import signal
import threading
from concurrent.futures import CancelledError

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_hydra.console.signals import Interrupts
from ddp_hydra.dispatch.background import Running, recorded, with_starts
from ddp_hydra.record import Metrics, Record
from ddp_hydra.run_state import AttemptEntry, Status, Summary
from ddp_hydra.writers.files import JsonLinesWriter, steps_logged
from ddp_hydra.writers.run_dir import read_summary
from ddp_hydra.writers.tensorboard import TensorBoardWriter


def test_a_ctrl_c_is_not_forgotten_where_the_wait_for_the_ranks_times_out(monkeypatch):
    stop = threading.Event()

    def run():
        stop.wait()
        raise KeyboardInterrupt

    running = Running(run, stop, 1, Interrupts(notice=str), graceful=True, run_dir=None)
    try:
        with pytest.raises(TimeoutError, match="they go on"):
            running.result(timeout=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(running._ended, "wait", lambda timeout: signal.raise_signal(signal.SIGINT))
            with pytest.raises(TimeoutError, match="they are ending"):
                running.result(timeout=0.0)
        assert stop.is_set()
    finally:
        stop.set()
    with pytest.raises(CancelledError):
        running.result()


BEFORE = {
    "a curve": [],
    "its settings": [(0, 0, "lr0")],
    "another rank": [(1, 0, "host")],
    "a validation of what it has loaded": [(0, 4, "val")],
}
AFTER = {"nothing": [], "a number for the step after the last": [(0, 7, "end")], "another rank": [(1, 6, "own")]}


def curve(first: int, last: int, *names: str) -> list[tuple[int, int, str]]:
    return [(0, step, name) for step in range(first, last + 1) for name in names]


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another call"])
@pytest.mark.parametrize("names", [("loss",), ("loss", "time")])
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_numbers_of_a_function_that_begins_again_are_each_there_once(tmp_path, before, after, names, again):
    """Nothing vanishes that is not logged again, whatever an attempt logs first. It goes on after step 4."""
    attempts = [
        [*(one for one in before if one[1] == 0), *curve(1, 6, *names), (0, 4, "val"), *after],
        [*before, *curve(5, 8, *names), *after],
    ]
    expected, writers = {}, []
    for attempt, sent in enumerate(attempts):
        if again or not attempt:
            writers = [JsonLinesWriter(tmp_path), TensorBoardWriter(tmp_path)]
            handle = with_starts(lambda record, to=writers: [one.write(record) for one in to], steps_logged(tmp_path))
        for value, (rank, step, name) in enumerate(sent, start=100 * attempt):
            own = attempt if name in ("lr0", "host", "val") else None  # what is logged before a curve stays
            expected[rank, step, name, own] = float(value)
            handle(Record(Metrics({name: float(value)}), rank, step, 1.0, attempt))
        if again or attempt:
            for writer in writers:
                writer.close()
    found = []
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        own = line["attempt"] if line.keys() & {"lr0", "host", "val"} else None
        named = line.keys() & {"loss", "time", "metrics/time", "val", "own", "lr0", "host", "end"} - {"time"}
        found += [((line.get("rank", 0), line["step"], name.split("/")[-1], own), line[name]) for name in named]
    assert sorted(found, key=str) == sorted(expected.items(), key=str)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = [point.step for point in events.Scalars("loss")]
    assert sorted(set(steps)) == list(range(1, 9))
    # TensorBoard drops all points of a step or none: of metrics that come one by one, the first is there twice.
    assert len(steps) == 8 if names == ("loss",) else len(steps) <= 9


@pytest.mark.parametrize(
    "attempts",
    [
        [
            [*curve(1, 20, "loss"), *((0, epoch, "val") for epoch in range(1, 5))],
            [(0, 2, "val"), *curve(11, 20, "loss")],
        ],
        [[(0, 0, "loss"), (0, 0, "acc")], [(0, 0, "loss"), (0, 0, "acc"), (0, 1, "loss")]],
        [
            [(0, 0, "lr"), *((1, step, "loss") for step in range(6))],
            [(0, 0, "lr"), *((1, step, "loss") for step in range(3, 8))],
        ],
    ],
    ids=["another curve counts epochs", "only step 0", "the curve is another rank's"],
)
def test_a_function_begins_again_where_its_furthest_curve_does(tmp_path, attempts):
    writer = JsonLinesWriter(tmp_path)
    handle = with_starts(writer.write, {})
    for attempt, sent in enumerate(attempts):
        for rank, step, name in sent:
            handle(Record(Metrics({name: float(attempt)}), rank, step, 1.0, attempt))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))
    assert {step for sent in attempts for _, step, name in sent if name == "loss"} == set(steps)


EARLIER = {"loss": 0.5, "val/loss": 0.75}


def test_another_call_keeps_what_the_earlier_ones_have_left(tmp_path):
    def call(number: int, metrics: dict[str, float], error: str) -> Summary:
        told = {"world_size": 2, "restarts": 0, "attempts": [AttemptEntry(attempt=number)]}
        status = Status()
        with (
            pytest.raises(OSError, match=error) if error else contextlib.nullcontext(),
            recorded(tmp_path, None, 0.0, threading.Event(), lambda: told, status) as write,
        ):
            assert [one.attempt for one in status.attempts] == list(range(number))
            assert status.metrics == (EARLIER if number else {})
            for step in range(1, 15) if metrics else ():
                write(Record(Metrics(metrics, samples=step * 8), step=step, attempt=number))
            if error:
                raise OSError(error)
        return read_summary(tmp_path)

    call(0, EARLIER, "disk gone")
    found = call(1, {}, "a typo")
    assert (found.status, found.steps, found.samples, found.metrics) == ("failed", 14, 112, EARLIER)
    found = call(2, {"loss": 0.25}, "")
    assert (found.status, found.metrics) == ("done", EARLIER | {"loss": 0.25})
    assert [one.attempt for one in found.attempts] == [0, 1, 2]
