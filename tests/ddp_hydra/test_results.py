from __future__ import annotations

import base64
import hashlib
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ddp_hydra import results
from ddp_hydra.errors import DiskFull, RecordError
from ddp_hydra.record import RESERVED, File, Image, Metrics, Record, Text, check_path
from ddp_hydra.results import INLINE_BYTES, finite
from tests.support.clocks import set_time
from tests.support.disk import files_up_to


@pytest.mark.parametrize(
    "path",
    ["a", "a/b.txt", "samples/epoch-3.txt", "./a", "a//b", "a/", "a b", "Ä/ü.txt", "a..b", "~", "C:/x", "x" * 300],
)
def test_a_path_inside_the_run_directory_is_allowed(path):
    assert not check_path(path).is_absolute()
    assert set(check_path(path).parts).isdisjoint({"..", "."})


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "./", "././.", "..", "../a", "a/..", "a/../b", "a/../../b", "/", "/a", "//a", ".hidden",
        "a/.hidden/b", "a\\b", "a=b", "a,b", "a\0b", "a\nb", "a\rb", "a\x1b[31m", "\ud800",
        "a\u202eb", None, 3, b"a", ["a"],
        Path("a"),
    ],
)  # fmt: skip
def test_a_path_that_leads_out_hides_or_confuses_is_refused(path, sent):
    with pytest.raises(RecordError, match=r"is not allowed: give a relative path .*'samples/epoch-3\.txt'"):
        check_path(path)
    with pytest.raises(RecordError, match="is not allowed"):
        results.submit(path, b"x")
    with pytest.raises(RecordError, match="is not allowed"):
        results.submit(path, b"x" * (INLINE_BYTES + 1))
    assert sent == []


@pytest.mark.parametrize("path", ["swa.pt", "./swa.pt", "checkpoints/a.pt", "Logs/a", "tensorboard/x/y"])
def test_a_file_of_a_users_own_needs_a_folder_of_its_own_in_a_job(path, sent):
    results.submit(path, b"x")
    assert len(sent) == 1, "it may be somebody else's who receives it"
    sent.clear()
    results.reserve(lambda names: None)
    with pytest.raises(RecordError, match=r"submitted '.*': give a folder of its own, 'samples/a\.txt', and none of"):
        results.submit(path, b"x")
    assert sent == []


def test_reserved_names_are_what_writers_compare_casefolded_names_with():
    assert [name.casefold() for name in RESERVED] == list(RESERVED)


@pytest.mark.parametrize(
    ("number", "arrives"),
    [
        (1, 1.0),
        (2**70, 2.0**70),
        (np.float32(0.5), 0.5),
        (np.array(2.5), 2.5),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
        (torch.tensor(0.25, requires_grad=True) * 2, 0.5),
    ],
)
def test_numbers_of_python_numpy_and_torch_are_logged_as_floats(number, arrives, sent):
    results.log({"train/loss": number}, step=np.int64(7), epoch=torch.tensor(2), samples=np.int32(5))
    assert sent[0].kind == "metrics"
    assert sent[0].step == 7
    assert sent[0].data == Metrics({"train/loss": arrives}, 2, 5)
    assert type(sent[0].data.metrics["train/loss"]) is float


@pytest.mark.parametrize("value", [None, "low", [], {}, np.ones(2), torch.ones(2), 1j, object], ids=repr)
def test_what_is_no_number_is_refused_with_its_name(value, sent):
    with pytest.raises(RecordError, match=r"metric 'train/loss' is .*give a number"):
        results.log({"train/loss": value}, step=1)
    assert sent == []


@pytest.mark.parametrize("step", [3, 3.0, True + 2, np.int32(3), np.float64(3), torch.tensor(3), torch.tensor(3.0)])
def test_a_step_is_a_whole_number_of_any_kind(step, sent):
    results.log({"a": 1}, step=step)
    assert sent[0].step == 3


@pytest.mark.parametrize("step", [1.5, -1, "3", 2**63, float("nan"), float("inf"), torch.ones(2), []])
def test_a_step_that_is_none_is_refused_where_it_is_given(step, sent):
    for send in (lambda: results.log({"a": 1}, step=step), lambda: results.text("a", "b", step=step)):
        with pytest.raises(RecordError, match=r"^step=.*: give the number of optimizer steps done"):
            send()
    assert sent == []


def test_names_and_texts_that_are_none_are_refused_where_they_are_given(sent):
    for send in (
        lambda: results.log({"": 1.0}, step=1),
        lambda: results.log({3: 1.0}, step=1),
        lambda: results.image("", b"png"),
    ):
        with pytest.raises(RecordError, match=r"^results\.(metrics|text|image): .*give names and texts that are str"):
            send()
    assert sent == []


def test_context_that_is_no_number_is_refused(sent):
    with pytest.raises(RecordError, match="takes plain values, got ndarray"):
        results.log({"a": 1}, step=1, epoch=np.ones(3))
    assert sent == []


def test_records_say_who_and_when(sent, monkeypatch):
    set_time(monkeypatch, results, time=lambda: 1234.5)
    results.text("note", "**bold**", step=4)
    results.image("picture", b"\x89PNG")
    assert sent == [
        Record(Text(name="note", text="**bold**"), 3, 4, 1234.5, 1),
        Record(Image(name="picture", png=base64.b64encode(b"\x89PNG").decode()), 3, None, 1234.5, 1),
    ]


def test_an_image_or_a_text_too_large_for_an_event_is_refused(sent):
    with pytest.raises(RecordError, match=r"'big' has 524289 bytes; at most 512 KiB fit: submit\(\) it"):
        results.image("big", b"x" * (512 * 1024 + 1))
    assert sent == []
    with pytest.raises(RecordError, match=r"text 'big' has 1048578 bytes; at most 512 KiB fit: submit\(\) it"):
        results.text("big", "é" * (512 * 1024 + 1))


@pytest.mark.parametrize("data", ["é", b"\x00\xff", bytearray(b"x"), memoryview(b"xy"), b"", b"x" * INLINE_BYTES])
def test_a_small_file_rides_in_its_record(data, sent, tmp_path):
    results.submit("a/b.txt", data)
    content = data.encode() if isinstance(data, str) else bytes(data)
    inline = base64.b64encode(content).decode()
    assert sent[0].data == File("a/b.txt", len(content), hashlib.sha256(content).hexdigest(), inline=inline)
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_large_file_goes_through_the_outbox(sent, tmp_path):
    content = bytes(range(256)) * (INLINE_BYTES // 256) + b"!"
    results.submit("a/b.bin", content)
    results.submit("a/b.bin", content)
    first, second = (Path(record.data.source) for record in sent)
    assert first != second
    assert first.parent == tmp_path / "spool"
    assert first.read_bytes() == second.read_bytes() == content
    sha256 = hashlib.sha256(content).hexdigest()
    assert sent[0].data == File("a/b.bin", len(content), sha256, source=str(first))


def test_the_hash_of_a_checkpoint_is_of_what_was_written(sent, monkeypatch):
    def damage(file, digest):
        raise AssertionError("it is read again")

    monkeypatch.setattr(hashlib, "file_digest", damage)
    results.checkpoint({"w": torch.arange(100_000)}, 1)
    (record,) = sent
    content = Path(record.data.source).read_bytes()
    assert (record.data.sha256, record.data.size) == (hashlib.sha256(content).hexdigest(), len(content))


def test_a_file_that_cannot_be_written_leaves_nothing_in_the_outbox(sent, tmp_path):
    def disk_full(path):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull, match=r"spool on host .* is full"):
        results.submit_file("a.bin", disk_full)
    assert list((tmp_path / "spool").iterdir()) == []
    assert sent == []


def test_a_file_that_is_too_large_is_told_in_a_sentence_and_an_error_of_another_file_stays(sent, tmp_path):
    with files_up_to(1000), pytest.raises(RecordError, match=r"^cannot write \S+: File too large; .*`ulimit -f`"):
        results.checkpoint({"w": torch.zeros(10_000)}, 1)
    with pytest.raises(FileNotFoundError, match="nosuch"):
        results.submit_file("a.bin", lambda path: path.write_bytes((tmp_path / "nosuch").read_bytes()))
    assert sent == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_waited_for_with_a_checkpoint_too(sent, tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_hydra.results.time.monotonic_ns", lambda: 7)
    (tmp_path / "spool" / f"{threading.get_ident()}-7").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=r"spool on host .* is full"):
        results.checkpoint({"w": torch.zeros(10_000)}, 1)
    assert sent == []


@pytest.mark.parametrize("data", [5, None, ["x"], 1.5])
def test_content_that_is_neither_bytes_nor_text_is_refused(data, sent):
    with pytest.raises(RecordError, match=r"submit\('a', …\) takes bytes or str, got"):
        results.submit("a", data)
    assert sent == []


@pytest.mark.parametrize(
    ("send", "said"),
    [
        (
            lambda: results.image("a", torch.zeros(3, 2, 2)),
            r"^image\('a', …\) takes the bytes of a PNG, .* got Tensor$",
        ),
        (lambda: results.image("a", "a.png"), r"^image\('a', …\) takes .* into io\.BytesIO\(\), got str$"),
        (lambda: results.text("a", 3), r"^text\('a', …\) takes a str, got int$"),
        (lambda: results.text("a", b"x"), r"^text\('a', …\) takes a str, got bytes$"),
        (
            lambda: results.histogram("a", 3, [1]),
            r"^histogram\('a', edges=…\) takes numbers in .*, got int$",
        ),
        (
            lambda: results.histogram("a", [0, 1], torch.zeros(1, 2)),
            r"^histogram\('a', counts=…\) .* got Tensor$",
        ),
        (
            lambda: results.submit_file("a/b", "c"),
            r"^submit_file\('a/b', …\) takes a function .*, got str$",
        ),
        (
            lambda: results.checkpoint(torch.nn.Linear(1, 1), 1),
            r"^checkpoint\(…, step=1\) takes a dict, .* Linear$",
        ),
        (lambda: results.checkpoint({}, 1, metrics=0.5), r"^checkpoint\(metrics=0\.5\) takes a dict, .*float$"),
        (lambda: results.log(0.5, 1), r"^log\(metrics=0\.5\) takes a dict, \{'train/loss': 0\.3\}, got float$"),
    ],
)
def test_values_of_another_type_are_refused_with_what_a_call_takes(send, said, sent):
    results.reserve(lambda names: None)
    with pytest.raises(RecordError, match=said):
        send()
    assert sent == []


def test_a_series_of_pandas_is_logged_by_its_names(sent):
    checked: list[str] = []
    results.reserve(checked.extend)
    results.log(pd.Series({"a": 1.0, "b": 2.0}), 1)
    assert (checked, sent[0].data.metrics) == (["a", "b"], {"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    "speak",
    [
        lambda: results.log({"a": 1}, step=1),
        lambda: results.text("a", "b"),
        lambda: results.image("a", b"b"),
        lambda: results.submit("a", b"b"),
        lambda: results.submit("a", b"b" * 100_000),
        lambda: results.submit_file("a", lambda path: path.touch()),
    ],
    ids=["log", "text", "image", "submit", "submit large", "submit_file"],
)
def test_outside_a_rank_a_sentence_says_where_to_call_it(speak):
    with pytest.raises(RecordError, match=r"outside a rank, where nobody receives records; call it in the function"):
        speak()


def test_json_has_no_word_for_nan():
    assert finite({"a": 1.0, "b": float("nan"), "c": float("inf"), "d": -0.5}) == {
        "a": 1.0,
        "b": None,
        "c": None,
        "d": -0.5,
    }


def test_a_fork_logs_while_a_thread_of_its_parent_holds_the_lock():
    with results._process.lock:
        if not (pid := os.fork()):
            signal.alarm(60)  # in place of waiting for ever
            results.log_mean(a=1.0)
            os._exit(0 if results.take_means() == {"a": (1.0, 1)} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
