from __future__ import annotations

import base64
import json
import pickle
import socket
from dataclasses import asdict

import pytest

from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError
from ddp_hydra.rank import torchrun_meeting as meeting
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.rank.torchrun_rank import comparable, replace_number


class Store(dict):
    """As much of torch's as `agree` touches."""

    set = dict.__setitem__

    def wait(self, keys: list[str], timeout: object) -> None:
        if not all(key in self for key in keys):
            raise RuntimeError("wait timeout after 1000ms\nmore of it")


FIRST, SECOND = (RankSpec(rank, 2, rank, 2, 0, "", "h") for rank in range(2))


@pytest.mark.medium
def test_ranks_that_do_not_come_are_waited_for_as_long_as_is_said(monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": nobody.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        said = r"rank 1 of 2 did not meet the others at 127.0.0.1:\d+ in 1 s: .*cluster.wait_timeout_s=3\. "
        with pytest.raises(ClusterError, match=said):
            meeting.meet(SECOND, 1.0, 1800.0)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('it was unpickled')",)


@pytest.mark.parametrize("payload", [base64.b64encode(pickle.dumps(Bomb())), b"[1]", b"\xff", b'{"files": 3}'])
def test_nothing_that_a_stranger_puts_into_the_store_is_run(payload):
    with pytest.raises(DdpHydraError, match="rank 1 can't read the files and arguments of rank 0"):
        meeting.agree(Store({meeting.CHOICES: payload}), SECOND, meeting.Choices(), 1.0)


def test_rank_0_tells_where_its_files_are_and_each_rank_runs_what_it_has_composed_itself():
    store = Store()
    mine = meeting.fingerprints(({"model": {"_target_": "models.Mine"}},))
    first = meeting.Choices({"resume": "/r/last.pt"}, mine, 2, {"port": 1}, {"data.batch_size": 8})
    assert meeting.agree(store, FIRST, first, 1.0) == first
    assert meeting.agree(store, SECOND, meeting.Choices(), 1.0) == first
    assert json.loads(store[meeting.CHOICES]) == asdict(first)
    assert "Mine" not in store[meeting.CHOICES]


def test_a_rank_0_that_says_nothing_is_not_waited_for_without_end():
    said = r"rank 1 of 2 has heard nothing of rank 0 \(wait timeout after 1000ms\): .*cluster.wait_timeout_s=3$"
    with pytest.raises(ClusterError, match=said):
        meeting.agree(Store(), SECOND, meeting.Choices(), 1.0)


def test_a_rank_that_has_composed_something_else_says_what_differs():
    one, other = ({"seed": seed, "data": {"root": "/a"}, "tags": []} for seed in (1, 2))
    meeting.check_same(meeting.fingerprints((one,)), meeting.fingerprints((dict(one),)), SECOND)
    with pytest.raises(ConfigError, match="rank 1 on h has composed another config than rank 0: seed differ"):
        meeting.check_same(meeting.fingerprints((one,)), meeting.fingerprints((other,)), SECOND)


def test_only_rank_0_knows_after_a_restart_what_is_resumed():
    assert comparable([{"seed": 1, "resume": "/r"}]) == comparable([{"seed": 1, "resume": None}])
    assert comparable([{"seed": 1}]) != comparable([{"seed": 2}])


def test_the_batch_of_all_ranks_is_what_rank_0_says():
    config = {"data": {"batch_size": 8}, "seed": 1}
    replace_number(config, "data.batch_size", 16)
    replace_number(config, "seed", 2)
    assert config == {"data": {"batch_size": 16}, "seed": 2}
