from __future__ import annotations

import json
import math
import random

import pytest

from ddp_hydra.errors import RecordError
from ddp_hydra.record import Log, Metrics, Record, RolledBack, Start
from ddp_hydra.writers import files
from ddp_hydra.writers.files import JsonLinesWriter, LogWriter


def read_lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_line_per_record_visible_at_once(tmp_path, metrics_record):
    writer = JsonLinesWriter(tmp_path)
    writer.write(metrics_record(10, train__loss=0.25, lr=0.1))
    assert read_lines(tmp_path) == [
        {"time": 1010.5, "attempt": 0, "step": 10, "epoch": 1, "samples": 80, "train/loss": 0.25, "lr": 0.1}
    ]
    assert list(read_lines(tmp_path)[0])[:5] == ["time", "attempt", "step", "epoch", "samples"]


def test_what_json_cannot_say_is_null(tmp_path, metrics_record):
    JsonLinesWriter(tmp_path).write(metrics_record(1, a=math.nan, b=-math.inf, c=1.0))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert {name: read_lines(tmp_path)[0][name] for name in "abc"} == {"a": None, "b": None, "c": 1.0}


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another process"])
def test_a_step_is_there_once_also_after_a_restart(tmp_path, metrics_record, again):
    """What pandas reads: no step twice, no half of a line, and what an older attempt still says is late."""
    writer = JsonLinesWriter(tmp_path)
    for step in range(1, 8):
        writer.write(metrics_record(step, loss=1.0))
    writer.write(Record(Metrics({"own": 1.0}), rank=1, step=7))
    if again:
        writer.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"time": 1.0, "att')
        writer = JsonLinesWriter(tmp_path)
    writer.write(Record(Start(lines=[]), rank=0, step=5, attempt=1))
    writer.write(metrics_record(7, loss=1.0))
    writer.write(metrics_record(6, attempt=1, loss=1.0))
    writer.close()
    lines = read_lines(tmp_path)
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1)]


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another process"])
def test_a_step_whose_validation_another_attempt_made_has_one_line(tmp_path, metrics_record, again):
    writer = JsonLinesWriter(tmp_path)
    for step in (4, 5):
        writer.write(metrics_record(step, loss=1.0, lr=0.5))
        writer.write(Record(Metrics({"own": 1.0}), rank=1, step=step))
    if again:
        writer.close()
        writer = JsonLinesWriter(tmp_path)
    writer.write(Record(Start(lines=[]), rank=0, step=5, attempt=1))
    assert [line["step"] for line in read_lines(tmp_path)] == [4, 4, 5, 5]
    for step in (5, 6):
        writer.write(metrics_record(step, attempt=1, val=float(step)))
    writer.close()
    *lines, own, validated, last = read_lines(tmp_path)
    assert [(line["step"], line["attempt"]) for line in lines] == [(4, 0), (4, 0)]
    assert (own["step"], own["rank"], own["own"]) == (5, 1, 1.0)
    assert [validated[name] for name in ("step", "attempt", "loss", "lr", "val")] == [5, 1, 1.0, 0.5, 5.0]
    assert (last["step"], last["val"], "loss" in last) == (6, 6.0, False)


def test_steps_that_are_taken_again_after_a_rollback_have_one_line(tmp_path, metrics_record):
    writer = JsonLinesWriter(tmp_path)
    writer.write(Record(Start(lines=[]), rank=0, step=0, attempt=0))
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        writer.write(metrics_record(step, loss=loss))
    writer.write(Record(RolledBack(), rank=1, step=2))
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]
    writer.write(Record(RolledBack(), rank=0, step=2))
    writer.write(metrics_record(2, val=0.5))  # its validation is made again
    writer.write(metrics_record(3, loss=4.0))
    writer.write(Record(RolledBack(), rank=0, step=0))
    assert read_lines(tmp_path) == []
    for step in (1, 2):
        writer.write(metrics_record(step, loss=5.0))
    assert [(line["step"], line["loss"]) for line in read_lines(tmp_path)] == [(1, 5.0), (2, 5.0)]


def test_a_record_of_the_first_step_that_comes_late_removes_nothing(tmp_path, metrics_record):
    writer = JsonLinesWriter(tmp_path)
    writer.write(Record(Start(lines=[]), rank=0, step=0))
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        for step in steps:
            writer.write(metrics_record(step, attempt=attempt, loss=1.0))
        for rank in (1, 0):
            writer.write(Record(Metrics({"own": 1.0}), rank=rank, step=2 * attempt, attempt=attempt))
        writer.write(Record(Start(lines=[]), rank=0, step=2, attempt=1))
    found = [(line["step"], line["attempt"], line.get("rank", 0)) for line in read_lines(tmp_path)]
    first = [(1, 0, 0), (2, 0, 0), (0, 0, 1), (0, 0, 0)]
    assert found == [*first, (3, 1, 0), (4, 1, 0), (2, 1, 1), (2, 1, 0)]


def test_what_was_logged_before_the_first_step_stays_after_a_rollback_to_it(tmp_path, metrics_record):
    writer = JsonLinesWriter(tmp_path)
    writer.write(Record(Start(lines=[]), rank=0, step=0))
    for step in (0, 1):
        writer.write(metrics_record(step, val=1.0))
    writer.write(Record(RolledBack(), rank=0, step=0))
    assert [line["step"] for line in read_lines(tmp_path)] == [0]


def test_numbers_of_one_step_are_each_there_once_after_a_restart(tmp_path, metrics_record):
    """Of two values of one name, both; and of a line that is logged again, what the new attempt says."""
    writer = JsonLinesWriter(tmp_path)
    for value in ({"probe": 1.0}, {"probe": 2.0}, {"loss": 1.0, "val": 1.0}, {"lr": 0.5}):
        writer.write(metrics_record(5, **value))
    writer.write(Record(Start(lines=[]), rank=0, step=5, attempt=1))
    for value in ({"begun": 5.0}, {"val": 2.0}, {"val": 3.0}):
        writer.write(metrics_record(5, attempt=1, **value))
    fields = ("time", "attempt", "step", "epoch", "samples")
    found = [{name: line[name] for name in line if name not in fields} for line in read_lines(tmp_path)]
    assert found == [{"probe": 1.0}, {"probe": 2.0}, {"loss": 1.0}, {"lr": 0.5, "begun": 5.0, "val": 2.0}, {"val": 3.0}]


def test_what_a_callback_logs_late_of_earlier_steps_is_there_once_after_a_restart(tmp_path, metrics_record):
    writer = JsonLinesWriter(tmp_path)
    for attempt, begin in enumerate([0, 4]):
        writer.write(Record(Start(lines=[]), rank=0, step=begin, attempt=attempt))
        for step in range(begin + 1, 8):
            writer.write(metrics_record(step, attempt=attempt, loss=1.0))
            if step > 3:
                writer.write(metrics_record(step - 3, attempt=attempt, late=1.0))
    late = [(line["step"], line["attempt"]) for line in read_lines(tmp_path) if "late" in line]
    assert late == [(1, 0), (2, 1), (3, 1), (4, 1)]


def test_the_line_of_a_step_keeps_its_epoch_where_a_later_number_has_none(tmp_path, metrics_record):
    writer = JsonLinesWriter(tmp_path)
    writer.write(Record(Metrics({"loss": 1.0}, epoch=2.0, samples=64), step=5))
    writer.write(Record(Start(lines=[]), rank=0, step=5, attempt=1))
    writer.write(Record(Metrics({"val": float("nan")}), step=5, attempt=1))
    (line,) = read_lines(tmp_path)
    assert [line[name] for name in ("epoch", "samples", "loss", "val", "attempt")] == [2.0, 64, 1.0, None, 1]


@pytest.mark.parametrize("seed", range(20))
def test_lines_do_not_depend_on_which_rank_is_heard_first(tmp_path, metrics_record, seed):
    """Attempts, rollbacks and validations that are made again, of three ranks that each send in their own order."""
    draw, lines = random.Random(seed), []
    attempts = [
        [Start(lines=[]), (0, "own"), (1, "loss"), (2, "loss"), (3, "loss"), (4, "loss")],
        [Start(lines=[]), (2, "val"), (3, "loss"), (4, "loss"), (5, "loss"), RolledBack(), (3, "val"), (4, "loss")],
    ]
    begins = {(0, Start): 0, (1, Start): 2, (1, RolledBack): 3}
    for name in ("in order", "mixed"):
        writer = JsonLinesWriter(tmp_path / name)
        (tmp_path / name).mkdir()
        for attempt, sent in enumerate(attempts):
            queues = {rank: list(sent if rank == 0 else sent[1:]) for rank in range(3)}
            while queues := {rank: rest for rank, rest in queues.items() if rest}:
                rank = draw.choice(list(queues)) if name == "mixed" else min(queues)
                match queues[rank].pop(0):
                    case (step, metric):
                        writer.write(Record(Metrics({metric: float(rank)}), rank, step, 0.0, attempt))
                    case data:
                        writer.write(Record(data, rank, begins[attempt, type(data)], 0.0, attempt))
        writer.close()
        lines.append(sorted(map(str, read_lines(tmp_path / name))))
    assert lines[0] == lines[1]
    assert len(lines[0]) == 5 + 2 * 7  # validations of rank 0 are joined with their steps


@pytest.mark.parametrize("step", [0, 2, 10, 7_000, 9_990, 10_000])
def test_a_restart_reads_the_end_of_a_long_file_only(step, tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(files, "_PIECE", 1000)
    monkeypatch.setattr(files, "json_object", lambda line: parsed.append(line) or json.loads(line))
    lines = [b'{"step":%d,"rank":%d}\n' % (one, rank) for one in range(1, 10_001) for rank in (1, 0)]
    lines[13:15] = reversed(lines[13:15])  # ranks log one after the other
    path.write_bytes(b"".join(lines))
    JsonLinesWriter(tmp_path).write(Record(Start(), 0, step, 0.0, 1))
    assert path.read_bytes() == b"".join(line for line in lines if json.loads(line)["step"] <= step)
    assert len(parsed) <= max(100, 10 * 2 * (10_000 - step))


def test_a_torn_last_line_does_not_spoil_the_next(tmp_path, metrics_record):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    JsonLinesWriter(tmp_path).write(metrics_record(2, loss=1.0))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"step": 1, "lo'
    assert json.loads(lines[1])["step"] == 2


def test_a_metric_cannot_take_the_place_of_the_lines_own_fields(tmp_path, metrics_record):
    JsonLinesWriter(tmp_path).write(metrics_record(3, rank=1, time=7.0, rank__x=1.0))
    line = read_lines(tmp_path)[0]
    assert (line["time"], line["metrics/time"], line["rank"], line["rank/x"]) == (1003.5, 7.0, 1, 1.0)


def test_links_are_not_followed(tmp_path, metrics_record):
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    run_dir.mkdir()
    victim.write_text("mine")
    (run_dir / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(RecordError, match=r"cannot write .*metrics.jsonl.*symbolic link"):
        JsonLinesWriter(run_dir).write(metrics_record(1, loss=1.0))
    (run_dir / "logs").symlink_to(tmp_path)
    with pytest.raises(RecordError, match=r"logs is a symbolic link"):
        LogWriter(run_dir).write(Record(Log("x")))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "rank-0.log").exists()


def test_a_piece_that_does_not_fit_leaves_the_file_as_it_was(tmp_path, metrics_record, monkeypatch):
    writer = JsonLinesWriter(tmp_path)
    writer.write(metrics_record(1, loss=1.0))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    real, calls = __import__("os").write, []

    def half_full(handle, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(handle, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddp_hydra.storage.files.os.write", half_full)
    with pytest.raises(RecordError, match=r"cannot write .*metrics\.jsonl: No space left on device; free some"):
        writer.write(metrics_record(2, loss=1.0))
    monkeypatch.undo()
    assert len(calls) == 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_each_rank_has_its_own_log(tmp_path):
    writer = LogWriter(tmp_path)
    for rank, text in [(0, "one\ntw"), (1, "other\n"), (0, "o\n"), (0, "\ud800é\n")]:
        writer.write(Record(Log(text), rank=rank))
    assert (tmp_path / "logs/rank-0.log").read_text() == "one\ntwo\n\\ud800é\n"
    assert (tmp_path / "logs/rank-1.log").read_text() == "other\n"


def test_a_line_of_its_own_marks_each_new_attempt(tmp_path):
    writer = LogWriter(tmp_path)
    for attempt, text in [(0, "one\ntw"), (0, ""), (1, "o\n"), (1, "three\n"), (2, "four"), (3, ""), (4, "five")]:
        writer.write(Record(Log(text), attempt=attempt))
    marked = "one\ntw\n--- attempt 1 ---\no\nthree\n--- attempt 2 ---\nfour\n--- attempt 3 ---\n--- attempt 4 ---\nfive"
    assert (tmp_path / "logs/rank-0.log").read_text() == marked
