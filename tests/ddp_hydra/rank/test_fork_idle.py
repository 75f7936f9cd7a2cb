"""How long a fork server that nobody uses stays."""

from __future__ import annotations

import sys
import types

import pytest

from ddp_hydra.rank import fork_server
from ddp_hydra.rank.fork_server import Idling, are_current, loaded_files


@pytest.fixture
def idling(tmp_path) -> Idling:
    """One whose last connection has just ended."""
    (tmp_path / "s").touch()
    made = Idling(tmp_path / "s")
    made.keep_warm_s = 100.0
    made.begin()
    return made


def test_it_stays_for_its_time(idling):
    assert not idling.is_over()
    assert 99 < idling.remaining_s <= 100


def test_its_time_is_what_the_last_request_said(idling):
    idling.keep_warm_s = 0.0
    assert not idling.is_over()
    idling.begin()
    assert idling.is_over()


def test_without_its_socket_it_leaves(idling):
    other = idling.address.with_name("other")
    other.touch()
    other.replace(idling.address)  # somebody else's
    assert not idling.is_found()
    assert idling.is_over()
    idling.address.unlink()
    assert idling.is_over()


@pytest.mark.parametrize("change", ["edited", "replaced", "removed"])
def test_what_was_imported_is_out_of_date_after_a_change(tmp_path, monkeypatch, change):
    file = tmp_path / "library.py"
    file.write_text("one = 1")
    module = types.ModuleType("library_of_this_test")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = loaded_files()
    assert are_current(loaded)
    if change == "edited":
        file.write_text("one = 1.0")
    elif change == "replaced":
        copy = tmp_path / "copy.py"
        copy.write_text("one = 2")
        copy.replace(file)
    else:
        file.unlink()
    assert not are_current(loaded)


def test_it_looks_at_what_was_imported_now_and_then(idling, monkeypatch):
    monkeypatch.setattr(fork_server, "are_current", lambda files: False)
    assert not idling.is_over()
    monkeypatch.setattr(fork_server, "CURRENT_S", 0.0)
    assert idling.is_over()
