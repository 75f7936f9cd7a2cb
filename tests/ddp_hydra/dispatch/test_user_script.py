from __future__ import annotations

import sys

import pytest

from ddp_hydra.dispatch import user_script


@pytest.mark.parametrize("here", [b"\xff", b"of somebody else", None], ids=repr)
def test_the_text_that_was_sent_runs_where_the_host_has_another_file_or_none(here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).write_text('it ran')")
    script = user_script.script(path, out)
    path.unlink() if here is None else path.write_bytes(here)
    script()
    assert out.read_text() == "it ran"
    assert sys.argv[0] != str(path)


def test_a_script_that_this_user_cannot_read_is_not_here(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text("1")
    script = user_script.script(path)
    assert script.is_here()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(user_script.Path, "read_text", refuse)
    assert not script.is_here()
