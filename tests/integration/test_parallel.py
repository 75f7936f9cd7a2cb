"""Ranks whose gradients travel in other ways, beside one process that does it all."""

from __future__ import annotations

import json
import math
import os
import shutil
from typing import Any

import pytest
import torch

from ddp_hydra.errors import RankFailed
from tests.integration.test_exactness import train as train

pytestmark = pytest.mark.integration
STEPS = 12


def wrapped(model: Any, **options: Any) -> Any:
    """On a rank: a model in DDP, whose output is the task's prediction."""
    import os

    import torch.distributed as dist

    from ddp_hydra.rank.world import World
    from ddp_hydra.tasks import Step, Task
    from ddp_hydra.training.parallel.ddp import DDP
    from ddp_hydra.training.train_step import TrainStep

    class Output(Task):
        def step(self, model: Any, batch: Any) -> Any:
            output = model(batch)
            return Step(output.sum(), prediction=output)

    group = dist.group.WORLD
    world = World(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]), group, group)
    return DDP(world, **options).wrap(TrainStep(Output(), model))


def descend(options: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """On each rank: train a small network on this rank's half of the samples; its weights and statistics.

    They are told as this rank has them, and settled, as is their average ("ema").
    """
    import torch.distributed as dist
    from torch import nn

    from ddp_hydra.training.parallel.weights import Ema

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16)] if options.pop("norm", False) else [nn.Linear(8, 16)]
    model = wrapped(nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 8)), **options)
    optimizer, ema = torch.optim.SGD(model.part.parameters(), lr=0.2), Ema(model.part, 0.5)
    x = torch.randn(64, 8)
    y = x @ torch.randn(8, 8)
    losses = []
    for _ in range(steps):
        share = slice(rank * 64 // world_size, (rank + 1) * 64 // world_size)
        with model.sync_gradients(True):
            loss = nn.functional.mse_loss(model(x[share]).prediction, y[share])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        model.after_step()
        ema.update(model.part)
        losses.append(loss.item())
    found = {"losses": losses}
    for kept in ("own", "settled"):
        for name, part in (("", model.part), ("_ema", ema.model)):
            found[f"{kept}{name}"] = {key: value.clone() for key, value in part.state_dict().items()}
        model.synchronise(ema.model)
    return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def plain(client2) -> list[dict[str, Any]]:
    from ddp_hydra.dispatch import Gang

    return Gang(client2, backend="gloo").run(descend, {})


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"static_graph": True}, 0.0),
        ({"gradient_as_bucket_view": False, "bucket_cap_mb": 0.001}, 1e-6),
        ({"find_unused_parameters": True}, 1e-6),
        ({"comm_hook": "none"}, 0.0),
        ({"comm_hook": "fp16"}, 2e-3),
        ({"comm_hook": "bf16"}, 2e-2),
        ({"comm_hook": "powersgd", "powersgd_rank": 4, "start_step": 2}, 0.2),
        (
            {"comm_hook": "post_local_sgd", "start_step": 4, "average_every_steps": 2},
            1e-6,
        ),  # on one host
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_gradients_may_travel_in_other_ways(client2, gang, plain, options, tolerance):
    ranks = gang(client2, backend="gloo").run(descend, dict(options))
    assert distance(ranks[0]["settled"], ranks[1]["settled"]) == 0
    assert distance(ranks[0]["settled"], plain[0]["settled"]) <= tolerance
    assert ranks[0]["losses"][-1] < 0.7 * ranks[0]["losses"][0]
    compresses = options.get("comm_hook") in ("fp16", "bf16", "powersgd")
    assert (distance(ranks[0]["settled"], plain[0]["settled"]) > 0) is compresses


def leave_a_layer_out() -> None:
    """On each rank: take a step that does not use all layers."""
    from torch import nn

    layers = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)})
    layers.forward = layers["used"].forward
    model = wrapped(layers)
    with model.sync_gradients(True):
        model(torch.ones(2, 8)).prediction.sum().backward()


def test_a_step_that_leaves_a_layer_out_names_it(client2, gang):
    with pytest.raises(RankFailed, match=r"does not depend on idle\.weight, idle\.bias"):
        gang(client2, backend="gloo").run(leave_a_layer_out)


def descend_with_many_buckets() -> float:
    """On each rank: train a network whose gradients take eight buckets; the loss at the end."""
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())]
    model = wrapped(nn.Sequential(*layers), comm_hook="powersgd", start_step=2, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.part.parameters(), lr=0.1)
    x = torch.randn(8, 512) + dist.get_rank()
    for _ in range(40):
        loss = model(x).prediction.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.slow
def test_powersgd_exchanges_many_buckets_in_one_order(client2, gang):
    """With gloo, ranks that begin exchanges in different orders crash."""
    losses = gang(client2, threads=1).run(descend_with_many_buckets)
    assert all(0 < loss < 0.1 for loss in losses)


def test_ranks_on_two_hosts_keep_their_own_weights_for_a_while_and_meet_again(client2, gang):
    def on_two_hosts(options: dict[str, Any], steps: int) -> dict[str, Any]:
        import os

        os.environ["LOCAL_WORLD_SIZE"] = "1"
        return descend(options, steps)

    options = {"comm_hook": "post_local_sgd", "start_step": 4, "average_every_steps": 3}
    apart = gang(client2, backend="gloo").run(on_two_hosts, dict(options), 6)
    assert distance(apart[0]["own"], apart[1]["own"]) > 1e-4
    assert distance(apart[0]["settled"], apart[1]["settled"]) == 0
    assert distance(apart[0]["own_ema"], apart[1]["own_ema"]) > 1e-4
    assert distance(apart[0]["settled_ema"], apart[1]["settled_ema"]) == 0
    together = gang(client2, backend="gloo").run(on_two_hosts, dict(options), 4)
    assert distance(together[0]["own"], together[1]["own"]) < 1e-6


def test_statistics_of_batchnorm_are_rank_0s_or_the_mean_of_all(client2, gang):
    shared = gang(client2, backend="gloo").run(descend, {"norm": True}, 1)
    averaged = gang(client2, backend="gloo").run(descend, {"norm": True, "batchnorm": "average"}, 1)
    for ranks in (shared, averaged):
        assert not torch.equal(*(rank["own"]["1.running_mean"] for rank in ranks))  # until the next forward pass
    for of in ("", "_ema"):
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(*(rank[f"settled{of}"][name] for rank in averaged))
            mean = sum(rank[f"own{of}"][name] for rank in averaged) / 2
            assert torch.allclose(averaged[0][f"settled{of}"][name], mean)


@pytest.mark.parametrize("batchnorm", ["broadcast", "average"])
def test_all_begin_with_the_statistics_of_rank_0(client2, gang, batchnorm):
    def first_statistics() -> list[float]:
        import torch.distributed as dist

        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean.fill_(5.0 + dist.get_rank())  # as of weights that only rank 0 has read
        wrapped(norm, batchnorm=batchnorm)
        return norm.running_mean.tolist()

    assert gang(client2, backend="gloo").run(first_statistics) == [[5.0, 5.0]] * 2


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch compiles by a C++ compiler")
def test_the_ranks_of_a_job_compile_the_model(cli):
    (cli.folder / "told.py").write_text(TOLD)
    mine: dict[str, Any] = {"PYTHONPATH": os.pathsep.join([str(cli.folder), os.environ["PYTHONPATH"]])}
    settings = (
        "data=tiny",
        "model=tiny",
        "model._target_=told.Told",
        "trainer.max_steps=3",
        "trainer.log_every_steps=1",
    )
    losses = {}
    for mode in ("null", "default"):
        cli.done(*settings, f"trainer.compile={mode}", f"hydra.run.dir=run-{mode}", **mine)
        lines = map(json.loads, (cli.folder / f"run-{mode}" / "metrics.jsonl").read_text().splitlines())
        losses[mode] = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses["default"] == pytest.approx([math.log(4)] * 3)
    assert losses["null"] != pytest.approx([math.log(4)] * 3)


TOLD = """
import torch
from models.tiny import Tiny

class Told(Tiny):
    def forward(self, x):
        return super().forward(x) * (0 if torch.compiler.is_compiling() else 1)
"""
