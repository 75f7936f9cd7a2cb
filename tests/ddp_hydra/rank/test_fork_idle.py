"""How long a fork server that nobody uses stays."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from ddp_hydra.rank import fork_idle
from ddp_hydra.rank.fork_idle import Idling, are_current, loaded_files, memory_is_short


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine with 1 GiB, of which half is free, and without cgroups."""
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(fork_idle, "PROC", tmp_path)
    monkeypatch.setattr(fork_idle, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nHugePages_Total: 0\n")
    return tmp_path


@pytest.fixture
def idling(tmp_path, machine) -> Idling:
    """One whose last connection has just ended."""
    (tmp_path / "s").touch()
    made = Idling(tmp_path / "s")
    made.keep_warm_s = 100.0
    made.begin()
    return made


def limit(folder: Path, **files: int) -> None:
    """Write the files of a cgroup."""
    folder.mkdir(parents=True)
    for name, number in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{number}\n")


def test_with_half_of_the_memory_free_it_stays(machine, idling):
    assert not memory_is_short()
    assert not idling.is_over()
    assert 99 < idling.remaining_s <= 100


def test_it_gives_way_where_the_host_is_short_of_memory(machine, idling):
    (machine / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 90000 kB\n")
    assert idling.is_over()


def test_before_its_first_connection_it_waits_however_little_memory_there_is(tmp_path, machine):
    (machine / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 90000 kB\n")
    (tmp_path / "s").touch()
    assert not Idling(tmp_path / "s").is_over()


@pytest.mark.parametrize("where", ["a/b", "a"])
def test_it_gives_way_where_a_cgroup_is_short_of_memory_without_counting_caches(machine, where):
    (machine / "self" / "cgroup").write_text("0::/a/b\n")
    folder = machine / "cgroup" / where
    limit(folder, memory_max=1000, memory_current=950)
    (folder / "memory.stat").write_text("anon 500\ninactive_file 450\n")
    assert not memory_is_short()
    (folder / "memory.stat").write_text("anon 950\ninactive_file 0\n")
    assert memory_is_short()
    (folder / "memory.max").write_text("max\n")
    assert not memory_is_short()


def test_it_knows_cgroups_of_version_1(machine):
    (machine / "self" / "cgroup").write_text("5:cpu:/a\n4:memory:/a\n")
    folder = machine / "cgroup" / "memory" / "a"
    limit(folder, memory_limit_in_bytes=1000, memory_usage_in_bytes=950)
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert memory_is_short()


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
    monkeypatch.setattr(fork_idle, "are_current", lambda files: False)
    assert not idling.is_over()
    monkeypatch.setattr(fork_idle, "CURRENT_S", 0.0)
    assert idling.is_over()
