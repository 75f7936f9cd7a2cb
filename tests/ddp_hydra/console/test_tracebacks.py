from __future__ import annotations

import json
import sys

import pytest

from ddp_hydra.console import text

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
