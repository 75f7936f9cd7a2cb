"""Where a user's own function begins again, no start record says so: the writers find it out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_hydra.record import Metrics, Record, RolledBack, Start, Text
from ddp_hydra.writers.files import JsonLinesWriter
from ddp_hydra.writers.tensorboard import AHEAD_BYTES, TensorBoardWriter

Logged = tuple[int, int, tuple[str, ...]]


def curve(first: int, last: int, *names: str, rank: int = 0, every: int = 1) -> list[Logged]:
    return [(rank, step, names) for step in range(first, last + 1) if step % every == 0]


def once(steps: Iterable[int]) -> list[int]:
    found = list(steps)
    assert sorted(set(found)) == found
    return found


@pytest.fixture
def write(tmp_path):
    """Write what attempts log, the value of each record its number; return metrics.jsonl and TensorBoard's points."""

    def write(*attempts: list[Logged], again: bool = False):
        writers, number = [], 0
        for attempt, sent in enumerate(attempts):
            if again or not attempt:
                writers = [TensorBoardWriter(tmp_path), JsonLinesWriter(tmp_path)]
            for rank, step, names in sent:
                number += 1
                for writer in writers:
                    writer.write(Record(Metrics(dict.fromkeys(names, float(number))), rank, step, 1.0, attempt))
            if again or attempt == len(attempts) - 1:
                for writer in writers:
                    writer.close()
        lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        fields = {"time", "attempt", "step", "epoch", "samples", "rank"}
        found = [
            (line.get("rank", 0), name.removeprefix("metrics/"), line["step"], line[name])
            for line in lines
            for name in line.keys() - fields
        ]
        events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        return found, points

    return write


def expected(*attempts: list[Logged]) -> list[tuple[int, str, int, float]]:
    """Return what is left: an attempt removes a metric from the first step after 0 on for which it logs it."""
    curves: dict[tuple[int, str], dict[int, float]] = {}
    number = 0
    for sent in attempts:
        seen = set()
        for rank, step, names in sent:
            number += 1
            for key in ((rank, name) for name in names):
                points = curves.setdefault(key, {})
                if step and key not in seen:
                    seen.add(key)
                    curves[key] = points = {other: value for other, value in points.items() if other < step}
                points[step] = float(number)
    return [(*key, step, value) for key, points in curves.items() for step, value in points.items()]


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another call"])
@pytest.mark.parametrize(
    ("attempts", "last"),
    [([(1, 10), (6, 6), (7, 7), (8, 12)], 12), ([(1, 5), (6, 6), (6, 9)], 9), ([(1, 5), (1, 1), (2, 3)], 3)],
)
def test_attempts_that_log_one_step_only_leave_each_step_once(write, attempts, last, again):
    found, points = write(*(curve(first, end, "loss") for first, end in attempts), again=again)
    assert once(step for _, _, step, _ in found) == list(range(1, last + 1))
    assert once(step for step, _ in points["loss"]) == list(range(1, last + 1))


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another call"])
@pytest.mark.parametrize("seed", range(12))
def test_each_number_is_there_once_and_none_is_lost_that_is_not_logged_again(write, seed, again):
    draw = random.Random(seed)
    attempts = []
    reached = 0
    for _ in range(3):
        begin = draw.randrange(reached + 1)
        sent = [(rank, 0, ("lr", "time")) for rank in range(2)] if draw.random() < 0.5 else []
        sent += [(0, begin, ("val",))] if draw.random() < 0.5 else []
        for step in range(begin + 1, begin + 2 + draw.randrange(8)):
            ranks = draw.sample(range(3), k=3)
            sent += [(rank, step, names) for rank in ranks for names in draw.choice([[("loss", "lr")], [("loss",)]])]
            sent += [(0, step, ("val",))] if step % 3 == 0 else []
            reached = step
        attempts.append(sent)
    found, points = write(*attempts, again=again)
    assert sorted(found) == sorted(expected(*attempts))
    of_loss = {step: value for rank, name, step, value in found if (rank, name) == (0, "loss")}
    assert of_loss.items() <= set(points["loss"])


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another call"])
@pytest.mark.parametrize("names", [[("loss",)], [("loss", "acc")], [("loss",), ("acc",)]])
@pytest.mark.parametrize("before", [[], [(0, 0, ("lr",))], [(1, 0, ("host",))], [(0, 5, ("new",))]])
@pytest.mark.parametrize("begin", [0, 4, 6])
def test_tensorboard_has_each_step_once(write, begin, before, names, again):
    def steps(first: int, last: int) -> list[Logged]:
        return [(0, step, some) for step in range(first, last + 1) for some in names]

    _, points = write([*before, *steps(1, 6)], [*before, *steps(begin + 1, 9)], again=again)
    for name in {name for some in names for name in some}:
        assert [step for step, _ in points[name]] == list(range(1, 10))


def test_the_training_is_there_once_where_the_validation_had_come_furthest(write):
    train, val = curve(1, 350, "loss", every=50), curve(1, 351, "val", every=117)
    more = [*curve(235, 468, "loss", every=50), *curve(235, 468, "val", every=117)]
    found, points = write(sorted([*train, *val], key=lambda one: one[1]), sorted(more, key=lambda one: one[1]))
    assert once(step for _, name, step, _ in found if name == "loss") == list(range(50, 451, 50))
    assert once(step for step, _ in points["loss"]) == list(range(50, 451, 50))
    assert once(step for step, _ in points["val"]) == [117, 234, 351, 468]


def test_a_curve_that_counts_epochs_does_not_say_where_the_steps_begin_again(write):
    earlier = [*curve(1, 20, "loss"), *curve(1, 4, "val")]
    _, points = write(earlier, [(0, 2, ("val",)), *curve(11, 20, "loss")])
    assert once(step for step, _ in points["loss"]) == list(range(1, 21))


def test_ranks_that_do_not_come_again_change_nothing_for_the_others(write):
    earlier = [one for rank in range(3) for one in curve(1, 8 + 2 * rank, "score", rank=rank)]
    found, points = write(earlier, [one for rank in range(2) for one in curve(1, 8 + 2 * rank, "score", rank=rank)])
    for rank in range(3):
        assert once(step for of, _, step, _ in found if of == rank) == list(range(1, 9 + 2 * rank))
    assert once(step for step, _ in points["score"]) == list(range(1, 9))


def test_what_a_faster_rank_shows_of_a_new_attempt_stays(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    lines = JsonLinesWriter(tmp_path)
    for attempt, steps in enumerate([range(1, 7), range(4, 9)]):
        for rank in (1, 0):
            for step in steps:
                data = Text(name="note", text=str(attempt)) if rank else Metrics({"loss": 1.0})
                for one in (writer, lines):
                    one.write(Record(data, rank, step, 1.0, attempt))
    writer.close()
    lines.close()
    # TensorBoard's server reads by this one.
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for tag in ("note/rank-1", "loss"):
        assert [event.step for event in events.Tensors(tag)] == list(range(1, 9))


def test_what_an_attempt_has_shown_that_did_not_begin_is_not_shown_again(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for attempt, begin, steps in ((0, 0, range(1, 7)), (1, None, range(4, 6)), (2, 3, range(4, 9))):
        if begin is not None:
            writer.write(Record(Start(), 0, begin, 1.0, attempt))
        for step in steps:
            writer.write(Record(Text(name="note", text=str(attempt)), 1, step, 1.0, attempt))
    writer.close()
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("note/rank-1")] == list(range(1, 9))


def test_few_bytes_are_kept_to_be_shown_again(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(Record(Start(), 0, 0))
    writer.write(Record(RolledBack(), 1, 0))
    for step in range(100):
        writer.write(Record(Text(name="note", text="x" * 2**17), 1, step))
    assert sum(len(content) for _, content in writer._ahead) <= AHEAD_BYTES
    writer.close()


def test_a_metric_that_was_logged_long_before_the_end_of_the_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_hydra.writers.files._PIECE", 200)
    for attempt in (0, 1):
        writer = JsonLinesWriter(tmp_path)
        for step in range(7 * attempt, 100):
            writer.write(Record(Metrics({"loss": 1.0}), 0, step, 1.0, attempt))
            if step == 7:
                writer.write(Record(Metrics({"val": 1.0}), 0, step, 1.0, attempt))
        writer.close()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(line["attempt"], line["step"]) for line in lines if "val" in line] == [(1, 7)]


def test_a_new_name_in_each_record_reads_the_end_of_the_file_once(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(JsonLinesWriter, "_end", lambda self, last: reads.append(last) or (0, []))
    for attempt in (0, 1):
        writer = JsonLinesWriter(tmp_path)
        for step in range(1, 20):
            writer.write(Record(Metrics({f"{attempt}-{step}": 1.0}), 0, step, 1.0, attempt))
        writer.close()
    assert reads == []
