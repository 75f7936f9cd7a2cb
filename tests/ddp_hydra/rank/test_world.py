"""How ranks come together, in this process."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import world as module
from ddp_hydra.rank.process import describe
from ddp_hydra.rank.world import joined


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_groups_made_beside_the_main_one_have_its_timeout():
    usual = distributed_c10d.default_pg_timeout
    with joined(dist.HashStore(), 0, 1, 1, "gloo", timeout_s=77.0):
        assert timeout_of(dist.new_group()) == timedelta(seconds=77)
        assert timeout_of(dist.new_group(backend="gloo", timeout=timedelta(seconds=5))) == timedelta(seconds=5)
    with joined(dist.HashStore(), 0, 1, timeout_s=77.0, makes_group=False):  # a script makes it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert timeout_of(dist.group.WORLD) == timedelta(seconds=77)
    assert distributed_c10d.default_pg_timeout == usual


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"has no GPU for torch: give dispatch.backend=auto"):
        module.check_gpu_is_own(dist.HashStore(), 0, 2)


def test_two_ranks_on_one_gpu_are_told_what_to_give_before_nccl_starts(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for number, uuid in enumerate(("a", "b", None)):
        monkeypatch.setattr(module, "gpu_uuid", lambda uuid=uuid: uuid)
        module.check_gpu_is_own(store, number, 4)
    monkeypatch.setattr(module, "gpu_uuid", lambda: "a")
    said = "rank 3 .* has the same GPU as another rank .a.*2 ranks that see 1 GPU.*ranks=1.*backend=gloo.*device=cpu"
    with pytest.raises(ConfigError, match=said):
        module.check_gpu_is_own(store, 3, 4)
    module.check_gpu_is_own(store, 0, 1)
    assert describe(ConfigError("x")).mistake  # so it is not tried again


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
    monkeypatch.setattr(module, "gpu_uuid", lambda: here.gpu)
    monkeypatch.setattr(module.results, "warn", warned.append)

    def choose(rank: int) -> str:
        here.gpu = gpus[rank]
        return module.choose_backend(store, rank, 3)

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(choose, range(3))) == [backend] * 3
    assert len(warned) == (backend == "gloo")


def test_a_rank_without_a_gpu_does_not_wait_for_the_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.choose_backend(dist.HashStore(), 0, 2) == "gloo"


def test_ranks_look_for_their_gpu_only_where_nccl_may_come_into_play(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "check_gpu_is_own", lambda store, number, world_size: asked.append("nccl"))
    monkeypatch.setattr(module, "choose_backend", lambda *args: asked.append("auto") or "gloo")
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("gloo", "auto", "nccl"):
        with joined(dist.HashStore(), 0, 1, 1, backend):
            pass
    assert asked == ["auto", "nccl"]


def test_large_tensors_are_not_pickled_but_sent_one_by_one():
    images = torch.randn(4, 8, 8, 8).to(memory_format=torch.channels_last)
    large, half = torch.randn(40, 40), torch.randn(50, 60).bfloat16().T
    weights = OrderedDict(
        large=large,
        half=half,
        small=torch.ones(3),
        tiny=torch.ones(3).to(torch.float8_e4m3fn),
        none=torch.ones(0),
        images=images,
        part=torch.randn(60, 60)[:, 5:50],
    )
    weights._metadata = {"": {"version": 2}}
    sparse = torch.eye(3).to_sparse()
    small = torch.ones(2)
    content = {"model": weights, "step": 3, "more": [sparse], "shared": [large, small, large, small]}
    sent, found, frame = [], [], io.BytesIO()
    module._Frame(frame, sent).dump(content)
    assert len(frame.getvalue()) < 4000
    assert [tuple(one.shape) for one in sent] == [(40, 40), (60, 50), (4, 8, 8, 8), (60, 45)]
    read = module._Filled(io.BytesIO(frame.getvalue()), found).load()
    for one, other in zip(found, sent, strict=True):
        module.as_bytes(one).copy_(module.as_bytes(other))
    for name, value in weights.items():
        assert torch.equal(
            module.as_bytes(read["model"][name]),
            module.as_bytes(value.contiguous()) if not module.is_dense(value) else module.as_bytes(value),
        )
        assert read["model"][name].stride() == (value if module.is_dense(value) else value.contiguous()).stride()
    assert (read["step"], read["model"]._metadata) == (3, {"": {"version": 2}})
    assert torch.equal(read["more"][0].to_dense(), torch.eye(3))
    first, second, *again = read["shared"]
    assert [first is read["model"]["large"], first is again[0], second is again[1]] == [True] * 3
    assert torch.equal(second, small)
