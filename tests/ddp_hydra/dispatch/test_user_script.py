from __future__ import annotations

import sys
import traceback

import pytest

from ddp_hydra.dispatch import call


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("here", [b"\xff", b"of somebody else", None], ids=repr)
def test_the_text_that_was_sent_runs_where_the_host_has_another_file_or_none(here, tmp_path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).write_text('it ran')")
    script = call.script(path, out)
    path.unlink() if here is None else path.write_bytes(here)
    script()
    assert out.read_text() == "it ran"
    assert (sys.argv[0] == str(path)) is (here is not None)


def test_a_script_that_is_edited_finds_what_is_beside_it(tmp_path):
    path, main = tmp_path / "train.py", sys.modules["__main__"]
    (tmp_path / "beside_the_script.py").write_text("X = 5")
    path.write_text(
        "import beside_the_script, sys\nsys.modules['__main__'].beside_the_script\nraise ValueError(__file__)"
    )
    script = call.script(path)
    path.write_text("edited")
    with pytest.raises(ValueError, match=r"train\.py") as caught:
        script()
    assert str(caught.value) == str(path)
    assert "raise ValueError(__file__)" in "".join(traceback.format_exception(caught.value))
    assert sys.modules["__main__"] is main


def test_a_script_has_the_encoding_that_it_names(tmp_path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_bytes(
        b"# -*- coding: latin-1 -*-\nimport pathlib, sys\npathlib.Path(sys.argv[1]).write_text(ascii('\xe9'))"
    )
    call.script(path, out)()
    assert out.read_text() == r"'\xe9'"
