"""What a rank does by itself, in this process."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_hydra import heartbeat
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import process


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_groups_made_beside_the_main_one_have_its_timeout():
    usual = distributed_c10d.default_pg_timeout
    with process.process_group(dist.HashStore(), 0, 1, "gloo", timeout_s=77.0):
        assert timeout_of(dist.new_group()) == timedelta(seconds=77)
        assert timeout_of(dist.new_group(backend="gloo", timeout=timedelta(seconds=5))) == timedelta(seconds=5)
    with process.process_group(dist.HashStore(), 0, 1, timeout_s=77.0, init=False):  # a script makes it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert timeout_of(dist.group.WORLD) == timedelta(seconds=77)
    assert distributed_c10d.default_pg_timeout == usual


def test_a_rank_that_waits_for_room_in_its_spool_claims_progress_only_where_there_is_some(tmp_path, monkeypatch):
    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 50:  # the client takes a file, and the rank's other thread adds one
            (tmp_path / "0").rename(tmp_path / "new")
        if len(waited) == 100:
            (tmp_path / "1").unlink()

    waited = []
    monkeypatch.setattr(process.time, "sleep", wait)
    heartbeat.connect(None)
    for number in range(process.MAX_FILES):
        (tmp_path / str(number)).touch()
    assert process.PipeSender(None, tmp_path).outbox == tmp_path
    assert (len(waited), heartbeat.here().ticks) == (100, 2)
    heartbeat.connect(None)


def test_two_ranks_on_one_gpu_are_told_what_to_give_before_nccl_starts(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for number, uuid in enumerate(("a", "b", None)):
        monkeypatch.setattr(process, "gpu_uuid", lambda uuid=uuid: uuid)
        process.check_gpu_is_own(store, number, 4)
    monkeypatch.setattr(process, "gpu_uuid", lambda: "a")
    said = "rank 3 .* has the same GPU as another rank .a.*2 ranks that see 1 GPU.*ranks=1.*backend=gloo.*device=cpu"
    with pytest.raises(ConfigError, match=said):
        process.check_gpu_is_own(store, 3, 4)
    process.check_gpu_is_own(store, 0, 1)
    assert process.describe(ConfigError("x"))["mistake"]  # so it is not tried again


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (("a", "b", "c"), "cpu:gloo,cuda:nccl"),
        (("a", "b", "a"), "gloo"),
        (("a", "a", "a"), "gloo"),
        ((None, None, None), "cpu:gloo,cuda:nccl"),  # torch does not know them
    ],
)
def test_all_ranks_choose_gloo_where_two_share_a_gpu(monkeypatch, gpus, backend):
    store, here, warned = dist.HashStore(), threading.local(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process, "gpu_uuid", lambda: here.gpu)
    monkeypatch.setattr(process.results, "warn", warned.append)

    def choose(rank: int) -> str:
        here.gpu = gpus[rank]
        return process.choose_backend(store, rank, 3)

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(choose, range(3))) == [backend] * 3
    assert len(warned) == (backend == "gloo")


def test_a_rank_without_a_gpu_does_not_wait_for_the_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process.choose_backend(dist.HashStore(), 0, 2) == "gloo"


def test_ranks_look_for_their_gpu_only_where_nccl_may_come_into_play(monkeypatch):
    asked = []
    monkeypatch.setattr(process, "check_gpu_is_own", lambda store, number, world_size: asked.append("nccl"))
    monkeypatch.setattr(process, "choose_backend", lambda *args: asked.append("auto") or "gloo")
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("gloo", "auto", "nccl"):
        with process.process_group(dist.HashStore(), 0, 1, backend):
            pass
    assert asked == ["auto", "nccl"]


class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")


def test_what_was_raised_is_told_within_bounds_also_by_an_error_that_cannot_say_what_it_is():
    end = process.describe(ValueError("x" * 10_000_000))
    assert end["message"].startswith("ValueError: xxx")
    assert len(json.dumps(end)) < 100_000
    assert len(json.dumps(process.describe(SystemExit("x" * 10_000_000)))) < 100_000
    assert process.describe(Mute())["message"] == "Mute: (its message is not available: Mute.__str__ raised KeyError)"
    assert process.describe(KeyError())["message"] == "KeyError"
