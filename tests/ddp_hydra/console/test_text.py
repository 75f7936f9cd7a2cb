"""Texts and tracebacks as the terminal shows them."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.console import text
from ddp_hydra.console.text import (
    MESSAGE_CHARS,
    TRACE_CHARS,
    counted,
    meant_path,
    message_of,
    printable,
    ranges,
    shorten,
    traceback_of,
)


class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07done\x1b]8;;http://x\x1b\\link", "red donelink"),
        ("over\r\x1b[2Kwritten\x00\x9b\x7f", "overwritten"),
        ("\x1b", ""),
    ],
)
def test_escape_sequences_and_control_characters_are_dropped(text, shown):
    assert printable(text) == shown


def test_a_progress_bar_of_a_script_stays_one_line():
    bar = "\r 50% |##  | 1/2\x1b[A\r100% |####| 2/2\n"
    assert printable(bar, is_output=True) == "\r 50% |##  | 1/2\r100% |####| 2/2\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("outputs/frist/last.pt", ": did you mean outputs/first/last.pt?"),
        ("other/mine", ""),
    ],
)
def test_the_name_of_a_run_that_is_meant(typed, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "first").mkdir(parents=True)
    assert meant_path(typed) == said


@pytest.mark.medium
@given(st.text())
def test_what_reaches_the_terminal_has_no_control_characters(text):
    assert not [char for char in printable(text) if (ord(char) < 32 and char not in "\t\n") or 127 <= ord(char) < 160]


def test_of_a_long_text_head_and_tail_are_kept_and_the_rest_is_counted():
    assert shorten("x" * 10, 10) == "x" * 10
    assert shorten("a" * 5000 + "b" * 5000, 10) == "aaaaa\n… 9,990 characters are left out here …\nbbbbb"


def test_an_error_of_ten_megabytes_is_told_in_a_few_lines():
    error = ValueError("begin" + "x" * 10_000_000 + "end")
    said, trace = message_of(error), traceback_of(error)
    assert said.startswith("begin")
    assert said.endswith("end")
    assert (len(said) < MESSAGE_CHARS + 100, len(trace) < TRACE_CHARS + 100) == (True, True)


def test_an_error_that_cannot_say_what_it_is_has_a_type_and_a_traceback():
    with pytest.raises(Mute) as caught:
        raise Mute
    assert message_of(caught.value) == "(its message is not available: Mute.__str__ raised KeyError)"
    assert "raise Mute" in traceback_of(caught.value)


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "epoch", "1 epoch"), (2, "epoch", "2 epochs"), (1442, "sample", "1,442 samples"), (2, "batch", "2 batches"),
        (0, "class", "0 classes"), (3, "query", "3 queries"),
    ],
)  # fmt: skip
def test_a_noun_is_counted(number, noun, said):
    assert counted(number, noun) == said


MODEL = """
import json
from torch import nn

def parse(text):
    return json.loads(text)

def layer():
    return nn.Sequential(nn.Linear(2, 2))(None)

def wrapped():
    try:
        parse(None)
    except TypeError as error:
        raise ValueError("no text") from error

def out():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture
def raised(tmp_path, monkeypatch):
    """Raise in a module of a packed project, as a rank imports it."""
    folder = tmp_path / "project-0123456789abcdef" / "models"
    folder.mkdir(parents=True)
    (folder / "told_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(folder))

    def call(name: str) -> Exception:
        import told_model

        try:
            getattr(told_model, name)(*(["{"] if name == "parse" else []))
        except Exception as error:
            return error
        raise AssertionError

    yield call
    sys.modules.pop("told_model", None)


def test_the_users_own_file_is_named_as_they_know_it(raised):
    error = raised("layer")
    assert text.user_location(error) == "models/told_model.py, line 9, in layer"
    told = text.shortened(error)
    assert 'File "models/told_model.py", line 9, in layer\n    return nn.Sequential(nn.Linear(2, 2))(None)\n' in told
    assert "project-" not in told
    assert told.count("torch/") == 1  # where it was raised
    assert "frames of libraries are left out: they are in the rank's log" in told


def test_a_cause_is_shortened_too(raised):
    told = text.shortened(raised("wrapped"))
    assert "project-" not in told
    assert told.index("TypeError") < told.index("direct cause") < told.index("ValueError: no text")


def test_a_library_alone_is_told_by_its_last_frames():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    caught.value.__traceback__ = caught.tb.tb_next  # without the frame of this file
    assert text.user_location(caught.value) == ""
    told = text.shortened(caught.value)
    assert told.count("File ") == 2
    assert told.endswith("(1 frames of libraries are left out: they are in the rank's log)")


@pytest.mark.parametrize(
    ("name", "answer"),
    [("layer", True), ("wrapped", True), ("parse", False), ("out", False)],
    ids=["wrong-type", "wrong-value", "what-came-in", "the-device"],
)
def test_what_the_code_would_raise_again(raised, name, answer):
    assert text.is_deterministic(raised(name)) is answer


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (TypeError("object of type 'int' has no len()"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x2)"), True),
        (RuntimeError("can't start new thread"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
        (FileNotFoundError(2, "No such file or directory", "labels.csv"), True),
        (OSError("Input/output error"), False),
    ],
)
def test_what_libraries_raise_comes_again_unless_it_is_the_hosts(error, answer):
    assert text.is_deterministic(error) is answer


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([0, 1, 2, 3, 7], "0-3, 7"), ([5, 1, 2], "1-2, 5"), ([0, 2, 4], "0, 2, 4")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text
