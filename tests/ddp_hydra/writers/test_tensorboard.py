from __future__ import annotations

import base64
import logging
import struct
import zlib

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from ddp_hydra.errors import RecordError
from ddp_hydra.record import Image, Record, RolledBack, Start, Text
from ddp_hydra.writers.tensorboard import TensorBoardWriter


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("tensorboard").setLevel(logging.ERROR)


def read_back(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((width + 1) * height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_run_that_logs_nothing_has_no_empty_folder(tmp_path):
    TensorBoardWriter(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_scalars_texts_and_images_come_back_before_close(tmp_path, metrics_record):
    writer = TensorBoardWriter(tmp_path)
    writer.write(metrics_record(10, train__loss=0.5, lr=0.1))
    writer.write(metrics_record(20, train__loss=0.25))
    writer.write(metrics_record(20, rank=1, train__loss=77.0))
    writer.write(Record(Text(name="note", text="**hé\ud800**"), step=3, time_s=5.0))
    image = png(5, 2)
    writer.write(Record(Image(name="digit", png=base64.b64encode(image).decode()), step=4))
    events = read_back(tmp_path)
    points = [(event.wall_time, event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(1010.5, 10, 0.5), (1020.5, 20, 0.25)]
    assert events.Tags()["scalars"] == ["train/loss", "lr"]
    text = events.Tensors("note")[0]
    assert (text.step, tensor_util.make_ndarray(text.tensor_proto)[0].decode()) == (3, "**hé?**")
    assert events.SummaryMetadata("note").plugin_data.plugin_name == "text"
    shown = events.Images("digit")[0]
    assert (shown.width, shown.height, shown.step, shown.encoded_image_string) == (5, 2, 4, image)
    writer.close()


def test_what_trains_comes_before_what_it_costs_and_zeros_make_no_curve(tmp_path, metrics_record):
    writer = TensorBoardWriter(tmp_path)
    costs = {"data/retries": 0, "data/bad_samples": 0, "data/bytes_per_s": 0.0, "data_wait": 0.0, "samples_per_s": 9.0}
    writer.write(metrics_record(10, train__loss=0.5, val__loss=0.5, **costs))
    writer.write(metrics_record(20, **{**costs, "data/retries": 2}))
    writer.write(metrics_record(30, **costs))
    writer.close()
    events = read_back(tmp_path)
    assert sorted(events.Tags()["scalars"]) == [
        "train/loss", "val/loss", "work/bytes_per_s", "work/data_wait", "work/retries", "work/samples_per_s",
    ]  # fmt: skip
    assert [(event.step, event.value) for event in events.Scalars("work/retries")] == [(20, 2), (30, 0)]


def test_a_new_attempt_takes_back_what_came_after_its_start(tmp_path, metrics_record):
    writer = TensorBoardWriter(tmp_path)
    for step in (10, 20, 30, 40):
        writer.write(metrics_record(step, loss=step))
    writer.write(Record(Start(), step=20, attempt=1))
    writer.write(metrics_record(25, attempt=0, loss=-1))  # late, and dropped
    writer.write(metrics_record(30, attempt=1, loss=300))
    writer.write(metrics_record(40, attempt=1, loss=400))
    writer.close()
    points = [(event.step, event.value) for event in read_back(tmp_path).Scalars("loss")]
    assert points == [(10, 10), (20, 20), (30, 300), (40, 400)]


def test_another_rank_that_is_heard_first_drops_no_points(tmp_path, metrics_record):
    writer = TensorBoardWriter(tmp_path)
    writer.write(Record(Start(), step=0))
    for step in (0, 1, 2, 3):
        writer.write(metrics_record(step, loss=step))
    writer.write(Record(Text(name="host", text="a"), rank=1, step=0, attempt=1))
    writer.write(Record(Start(), step=2, attempt=1))
    writer.write(metrics_record(3, attempt=1, loss=30))
    writer.close()
    assert [(event.step, event.value) for event in read_back(tmp_path).Scalars("loss")] == [
        (0, 0), (1, 1), (2, 2), (3, 30),
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_texts_of_a_rank_that_rolls_back_before_another_one_stay(tmp_path, metrics_record, first):
    writer = TensorBoardWriter(tmp_path)
    writer.write(Record(Start(), step=0))
    for step in range(1, 13):
        writer.write(metrics_record(step, loss=step))
        if step % 4 == 0:
            for rank in (first, 1 - first):
                if rank:
                    writer.write(Record(Text(name="nonfinite", text="late"), rank, step - 1))
                writer.write(Record(RolledBack(), rank, step - 2))
                writer.write(Record(Text(name="nonfinite", text="a sample"), rank, step - 1))
            writer.write(metrics_record(step - 1, loss=-step))
    writer.close()
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))  # that of TensorBoard's server
    events.Reload()
    for tag in ("nonfinite", "nonfinite/rank-1"):
        assert [event.step for event in events.Tensors(tag)] == [3, 7, 11]
    assert [event.step for event in events.Tensors("loss")] == [1, 2, 3, 5, 6, 7, 9, 10, 11]


@pytest.mark.parametrize("again", [False, True], ids=["the process goes on", "another process"])
def test_what_is_logged_before_the_first_step_is_there_once_after_a_start_from_the_beginning(
    tmp_path, metrics_record, again
):
    writer = TensorBoardWriter(tmp_path)
    for attempt in (0, 1):
        if again:
            writer = TensorBoardWriter(tmp_path)
        writer.write(Record(Start(), step=0, attempt=attempt))
        for step in (0, 1):
            writer.write(metrics_record(step, attempt=attempt, loss=attempt))
        if again:
            writer.close()
    writer.close()
    assert [(event.step, event.value) for event in read_back(tmp_path).Scalars("loss")] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("begin", [20, 0])
def test_a_job_that_goes_on_or_begins_again_in_its_folder_has_one_clean_curve(tmp_path, metrics_record, begin):
    for first, factor in ((0, 1), (begin, 10)):
        writer = TensorBoardWriter(tmp_path)
        writer.write(Record(Start(), step=first))
        for step in (10, 20, 30, 40):
            if step > first:
                writer.write(metrics_record(step, loss=step * factor))
        writer.close()
    points = [(event.step, event.value) for event in read_back(tmp_path).Scalars("loss")]
    assert points == [(step, step if step <= begin else step * 10) for step in (10, 20, 30, 40)]


def test_a_curve_goes_on_where_the_clock_is_behind_the_one_of_the_run_before(tmp_path, metrics_record, monkeypatch):
    for first, clock_s in ((0, 2_000_000_000), (20, 1_999_999_000), (30, 1_999_999_000)):
        monkeypatch.setattr("time.time", lambda clock_s=clock_s: clock_s)
        writer = TensorBoardWriter(tmp_path)
        writer.write(Record(Start(), step=first))
        for step in range(first + 10, 50, 10):
            writer.write(metrics_record(step, loss=step + first / 100))
        writer.close()
    points = [(event.step, round(event.value, 2)) for event in read_back(tmp_path).Scalars("loss")]
    assert points == [(10, 10), (20, 20), (30, 30.2), (40, 40.3)]


@pytest.mark.parametrize("content", ["%%%", "é", base64.b64encode(b"GIF89a" + bytes(60)).decode()])
def test_an_image_that_is_no_png_is_refused(tmp_path, content):
    with pytest.raises(RecordError, match="image 'x' of rank 3 is not a PNG"):
        TensorBoardWriter(tmp_path).write(Record(Image(name="x", png=content), rank=3))
