from __future__ import annotations

import base64
import pickle
import socket
import sys

import pytest
from omegaconf import OmegaConf

from ddp_hydra.dispatch import inline, torchrun
from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError
from ddp_hydra.rank.spec import RankSpec

TORCHRUN = OmegaConf.create({"_target_": "ddp_hydra.dispatch.torchrun.Torchrun"})
LOCAL = OmegaConf.create({"_target_": "distributed.LocalCluster"})


@pytest.fixture(autouse=True)
def clean(monkeypatch) -> None:
    for name in (*torchrun.NEEDED, "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["ddp_hydra", "seed=1"])


@pytest.fixture
def started(monkeypatch):
    """Be a process of a launcher."""

    def start(rank: int, **more: str) -> None:
        values = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "MASTER_ADDR": "h", "MASTER_PORT": 1, **more}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return start


def test_the_place_is_what_the_launcher_says(started):
    started(3, LOCAL_WORLD_SIZE="2", GROUP_RANK="1")
    spec = torchrun.place(TORCHRUN)
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_world_size, spec.node_rank) == (3, 4, 1, 2, 1)


def test_without_a_launcher_jobs_start_their_ranks():
    assert torchrun.place(LOCAL) is None
    assert torchrun.arguments(["a=1"]) == ["a=1"]


def test_only_rank_0_has_a_run_directory(started):
    started(0)
    assert torchrun.arguments(["a=1"]) == ["a=1"]
    started(1)
    assert torchrun.arguments(["a=1"]) == ["a=1", *torchrun.NO_FOLDER]


def test_variables_that_are_missing_are_named_with_what_to_type(started, monkeypatch):
    with pytest.raises(ConfigError, match=r"RANK, .*MASTER_PORT are not set here: type torchrun .* ddp_hydra seed=1$"):
        torchrun.place(TORCHRUN)
    started(1)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="but MASTER_ADDR is not set here"):
        torchrun.place(TORCHRUN)


def test_what_starts_ranks_itself_does_not_go_with_a_launcher(started):
    started(0)
    with pytest.raises(ConfigError, match=r"rank 0 of 4 .* cluster distributed\.LocalCluster starts ranks itself"):
        torchrun.place(LOCAL)
    with pytest.raises(ConfigError, match="a sweep starts its jobs itself"):
        torchrun.arguments(["-m", "seed=1,2"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_workers": 2}, r"cluster.n_workers=2, but torchrun has started 4 ranks: give it --nproc-per-node 2, or"),
        ({"keep": True}, r"cluster.keep=true: cluster=torchrun has no cluster that could be kept"),
        ({"pip": ["pytest", "not-there>=1"]}, r"lacks: not-there>=1 \(not installed\): .* pip install 'not-there>=1'$"),
        ({"pip": ["=1"]}, r"cluster.pip names '=1', which is no requirement"),
    ],
)
def test_the_keys_of_every_cluster_are_held_against_what_was_started(started, given, said):
    started(0)
    fits = {"n_workers": 4, "wait_timeout_s": 5, "keep": False, "pip": ["pytest"]}
    assert torchrun.place(OmegaConf.merge(TORCHRUN, fits)) is not None
    with pytest.raises(DdpHydraError, match=said):
        torchrun.place(OmegaConf.merge(TORCHRUN, given))


def test_ranks_that_do_not_come_are_waited_for_as_long_as_is_said(started, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        started(1, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(nobody.getsockname()[1]))
        spec = torchrun.place(TORCHRUN)
        said = r"rank 1 of 4 did not meet the others at 127.0.0.1:\d+ in 1 s: .*cluster.wait_timeout_s=3\. "
        with pytest.raises(ClusterError, match=said):
            inline.meet_launched(spec, 1800.0, 1.0)


def test_what_is_no_number_is_refused(started):
    started(0, WORLD_SIZE="all")
    with pytest.raises(ConfigError, match=r"must be whole numbers: .*'all'"):
        torchrun.place(TORCHRUN)


# -- what the ranks tell each other ------------------------------------------------------------------------


class Store(dict):
    """As much of torch's as `agree` touches."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


FIRST, SECOND = (RankSpec(rank, 2, rank, 2, 0, "", "h") for rank in range(2))


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('it was unpickled')",)


@pytest.mark.parametrize("payload", [base64.b64encode(pickle.dumps(Bomb())), b"[1]", b"\xff", b'{"files": 3}'])
def test_nothing_that_a_stranger_puts_into_the_store_is_run(payload):
    with pytest.raises(DdpHydraError, match="rank 1 can't read the files and arguments of rank 0"):
        inline.agree(Store({"ddp_hydra/call": payload, inline.CHOICES: payload}), SECOND, {}, {})


def test_rank_0_tells_where_its_files_are_and_each_rank_runs_what_it_has_composed_itself():
    store = Store()
    mine = inline.fingerprints(({"model": {"_target_": "models.Mine"}},))
    assert inline.agree(store, FIRST, {"files": {"resume": "/r/last.pt"}, "kept": {}}, mine)[0]["kept"] == {}
    assert inline.agree(store, SECOND, {}, mine) == ({"files": {"resume": "/r/last.pt"}}, mine)
    assert "Mine" not in store[inline.CHOICES]


def test_a_rank_that_has_composed_something_else_says_what_differs():
    one, other = ({"seed": seed, "data": {"root": "/a"}, "tags": []} for seed in (1, 2))
    inline.check_same(inline.fingerprints((one,)), inline.fingerprints((dict(one),)), SECOND)
    with pytest.raises(ConfigError, match="rank 1 on h has composed another config than rank 0: seed differ"):
        inline.check_same(inline.fingerprints((one,)), inline.fingerprints((other,)), SECOND)
