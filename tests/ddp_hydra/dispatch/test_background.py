from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import CancelledError

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_hydra.console.signals import Interrupts
from ddp_hydra.dispatch.background import Running, with_repeats
from ddp_hydra.record import Metrics, Record
from ddp_hydra.writers.files import JsonLinesWriter, last_steps
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


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another call"])
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_numbers_of_a_function_that_begins_again_are_each_there_once(tmp_path, before, again):
    """Nothing vanishes that is not logged again, whatever an attempt logs first. It begins at step 4, and ends at 6."""
    attempts = [
        [*before, *((0, step, "loss") for step in range(1, 7)), (0, 4, "val"), (1, 6, "own")],
        [*before, *((0, step, "loss") for step in range(5, 9)), (1, 6, "own"), (1, 8, "own")],
    ]
    numbers, writers = {}, []
    for attempt, sent in enumerate(attempts):
        if again or not attempt:
            writers = [JsonLinesWriter(tmp_path), TensorBoardWriter(tmp_path)]
            handle = with_repeats(lambda record, to=writers: [one.write(record) for one in to], last_steps(tmp_path))
        for value, (rank, step, name) in enumerate(sent):
            numbers[rank, step, name] = float(value + 100 * attempt)
            handle(Record(Metrics({name: float(value + 100 * attempt)}), rank, step, 1.0, attempt))
        if again or attempt:
            for writer in writers:
                writer.close()
    found = {}
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        for name in line.keys() & {"loss", "val", "own", "lr0", "host"}:
            assert found.setdefault((line.get("rank", 0), line["step"], name), line[name]) == line[name]
    assert found == numbers
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == list(range(1, 9))
