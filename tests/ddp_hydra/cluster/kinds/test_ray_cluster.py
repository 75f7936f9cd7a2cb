"""A Dask cluster on a Ray of which only is seen what it is asked for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.medium  # it imports Ray


class Actor:
    """Makes itself, with any options; its methods can be called."""

    def __init__(self, *_: Any) -> None:
        self.address = self

    def options(self, **_: Any) -> Actor:
        return self

    def remote(self, *_: Any) -> Actor:
        return self


@pytest.mark.parametrize("keep", [False, True])
def test_of_a_cluster_that_does_not_start_nothing_is_left_on_ray(keep, monkeypatch):
    pytest.importorskip("ray")
    from ddp_hydra.cluster.kinds import ray_cluster as module

    removed: list[Any] = []

    def get(*_: Any, timeout: float) -> None:
        raise TimeoutError("no scheduler")

    ray = SimpleNamespace(
        remote=Actor,
        get=get,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0" * 56),
        kill=lambda actor, no_restart: removed.append(type(actor)),
        util=SimpleNamespace(placement_group=lambda *_: "the group", remove_placement_group=removed.append),
    )
    monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setattr(module, "connected", lambda *_: contextlib.nullcontext())
    with pytest.raises(TimeoutError, match="no scheduler"):
        module.RayCluster(address="auto", keep=keep)
    assert removed == [Actor, "the group"]
