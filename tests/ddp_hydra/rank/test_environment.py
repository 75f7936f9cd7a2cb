"""What the environment of a rank is made of."""

from __future__ import annotations

from ddp_hydra.rank import environment


def test_relative_entries_of_the_search_path_become_absolute_and_those_of_hooks_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "libs").mkdir()
    hook = "__editable__.myco-1.0.finder.__path_hook__"
    entries = ["", "libs", str(tmp_path / "libs"), hook, "/gone.zip"]
    places = [environment.search_place(entry) for entry in entries]
    assert places == [str(tmp_path), str(tmp_path / "libs"), str(tmp_path / "libs"), hook, "/gone.zip"]
