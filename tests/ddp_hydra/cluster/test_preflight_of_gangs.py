"""Workers are checked once for all gangs of a client that need the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.cluster import preflight
from ddp_hydra.cluster.preflight import check_workers
from ddp_hydra.errors import ClusterError


@pytest.fixture
def probed(monkeypatch) -> list[list[str]]:
    """The workers that were looked at, call by call."""
    calls: list[list[str]] = []

    def probe(client: Any, workers: list[str], *_: Any) -> dict[str, Any]:
        calls.append(workers)
        return dict.fromkeys(workers)

    monkeypatch.setattr(preflight, "probe", probe)
    for name in ("check", "check_packages", "check_network"):
        monkeypatch.setattr(preflight, name, lambda *_: None)
    return calls


def test_a_worker_is_looked_at_once_for_each_need(probed):
    client: Any = SimpleNamespace()
    check_workers(client, ["a", "b"], [], None)
    check_workers(client, ["b", "c"], [], None)
    check_workers(client, ["a"], ["timm"], None)
    check_workers(client, ["a"], [], "eth1")
    other: Any = SimpleNamespace()
    check_workers(other, ["a"], [], None)
    assert probed == [["a", "b"], ["c"], ["a"], ["a"], ["a"]]


def test_a_worker_that_lacks_something_is_looked_at_again(probed, monkeypatch):
    def refuse(found: Any) -> None:
        raise ClusterError("no torch")

    client: Any = SimpleNamespace()
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "check", refuse)
        with pytest.raises(ClusterError):
            check_workers(client, ["a"], [], None)
    check_workers(client, ["a"], [], None)
    assert probed == [["a"], ["a"]]


def test_a_new_worker_has_to_fit_together_with_those_looked_at_before(probed, monkeypatch):
    client: Any = SimpleNamespace()
    check_workers(client, ["a", "b", "gone"], [], None)
    together: list[list[str]] = []
    monkeypatch.setattr(preflight, "check", lambda found: together.append(sorted(found)))
    check_workers(client, ["a", "b", "c"], [], None)
    check_workers(client, ["a", "c"], [], None)
    assert together == [["a", "b", "c"]]
