"""Ranks whose gradients travel in several ways: in shared memory every sum is right, however the ranks come and go."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hydra.errors import RankFailed
from tests.integration.test_exactness import assert_equal

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


def leave_a_layer_out_at_last() -> None:
    """On each rank: accumulate a step whose last micro-batch does not use all layers."""
    from torch import nn

    layers = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)})
    layers.forward = lambda x: layers["used"](layers["idle"](x) if x.sum() else x)
    model = wrapped(layers)
    for is_last in (False, True):
        with model.sync_gradients(is_last):
            model(torch.full((2, 8), float(not is_last))).prediction.sum().backward()


def test_an_accumulated_step_whose_last_micro_batch_leaves_a_layer_out_names_it(client2, gang):
    with pytest.raises(RankFailed, match=r"step's last micro-batch does not depend on idle\.weight, idle\.bias: if"):
        gang(client2, backend="gloo").run(leave_a_layer_out_at_last)


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


# -- in shared memory ------------------------------------------------------------------------------------------


def wrong_sums(few: int, bucket_cap_mb: float, steps: int = 25) -> list[str]:
    """On each rank: steps whose gradients are known beforehand, at an uneven pace; those that came out wrong.

    Numbers travel along in each step, and are read late.
    """
    import random
    import time

    import torch.distributed as dist
    from torch import nn

    from ddp_hydra.training.parallel import shared_memory

    shared_memory.FEW_RANKS = few
    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.ParameterList([torch.zeros(1000 * (index + 1)) for index in range(5)])

        def forward(self, gradient):
            return sum((weight * gradient).sum() for weight in self.all)

    model = wrapped(Weights(), comm_hook="shared", bucket_cap_mb=bucket_cap_mb)
    pace, wrong = random.Random(rank), []
    for step in range(steps):
        loss = model(float(step * (rank + 1))).prediction
        numbers = torch.tensor([step * 10 + rank, -rank], dtype=torch.float64)
        wait = model.shared.send_along(numbers)
        loss.backward()
        expected = step * sum(range(1, ranks + 1)) / ranks
        for index, weight in enumerate(model.part.all):
            time.sleep(pace.choice((0, 0, 0, 0.002)))
            if (weight.grad != expected).any():
                wrong.append(f"step {step}, weight {index}: {weight.grad.unique().tolist()} for {expected}")
            weight.grad.zero_()
        wait()
        if numbers.tolist() != [step * 10 + ranks - 1, 0]:
            wrong.append(f"step {step}: the numbers are {numbers.tolist()}")
    return wrong


@pytest.mark.parametrize(
    ("few", "bucket_cap_mb"),
    [
        pytest.param(4, 0.01, id="each-sums-all-many-buckets"),
        pytest.param(1, 25, id="each-sums-a-part-one-bucket"),
        pytest.param(4, 25, id="each-sums-all-one-bucket", marks=pytest.mark.slow),
        pytest.param(1, 0.01, id="each-sums-a-part-many-buckets", marks=pytest.mark.slow),
    ],
)
def test_every_sum_is_right(client4, gang, few, bucket_cap_mb):
    assert gang(client4, threads=1).run(wrong_sums, few, bucket_cap_mb) == [[]] * 4


def weights_after(comm_hook: str, **options: Any) -> list[torch.Tensor]:
    """On each rank: the weights of a network after some steps."""
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())]
    model = wrapped(nn.Sequential(*layers, nn.Linear(64, 2)), comm_hook=comm_hook, **options)
    optimizer = torch.optim.SGD(model.part.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=inputs)).prediction.square().mean().backward()
        optimizer.step()
    return [weight.detach() for weight in model.part.parameters()]


def test_two_ranks_come_to_the_same_bits_as_with_sockets(client2, gang):
    sockets, memory = (gang(client2, threads=1).run(weights_after, hook) for hook in ("none", "shared"))
    assert_equal(memory, sockets)


def test_more_ranks_come_to_the_same_bits_in_buckets_of_any_size(client4, gang):
    """With sockets, the order of a sum changes with the place in the bucket."""
    large = gang(client4, threads=1).run(weights_after, "shared")
    small = gang(client4, threads=1).run(weights_after, "shared", bucket_cap_mb=0.01)
    sockets = gang(client4, threads=1).run(weights_after, "none")
    assert_equal(small, large)
    for memory, other in zip(large[0], sockets[0], strict=True):
        assert torch.allclose(memory, other, atol=1e-5)


def told_without(part: str, comm_hook: str) -> str:
    """On each rank: what becomes of a hook where one rank does not see the memory or the pipes of the others."""
    import torch.distributed as dist

    from ddp_hydra.errors import ConfigError
    from ddp_hydra.training.parallel import shared_memory

    if dist.get_rank() == 1:
        setattr(shared_memory, {"memory": "mapped", "pipes": "opened"}[part], lambda *_: None)
    try:
        model = wrapped(torch.nn.Linear(2, 2), comm_hook=comm_hook)
    except ConfigError as error:
        return str(error)
    model(torch.full((1, 2), float(dist.get_rank()))).prediction.sum().backward()
    return str(model.part.weight.grad.tolist())


@pytest.mark.parametrize("part", ["memory", "pipes"])
def test_ranks_that_do_not_see_each_others_use_sockets_or_say_so(client2, gang, part):
    assert gang(client2).run(told_without, part, "auto") == ["[[0.5, 0.5], [0.5, 0.5]]"] * 2
    said = gang(client2).run(told_without, part, "shared")
    assert all("parallel.comm_hook=shared is for dense gradients" in words for words in said)


def test_sparse_gradients_travel_as_they_are(client2, gang):
    def gradient() -> list[int]:
        import torch.distributed as dist

        model = wrapped(torch.nn.Embedding(9, 2, sparse=True))
        model(torch.tensor([dist.get_rank()])).prediction.sum().backward()
        return model.part.weight.grad.coalesce().indices().flatten().tolist()

    assert gang(client2).run(gradient) == [[0, 1]] * 2


def left_over() -> dict[str, Any]:
    """On each rank: threads, mappings, pipes and open files that are left when the model is gone."""
    import gc
    import threading
    import time

    def pipes() -> list[str]:
        return [name for fd in Path("/proc/self/fd").iterdir() if (name := link(fd)).startswith("pipe:")]

    def found() -> list[str]:
        names = [f"pipe {name}" for name in pipes() if name not in before]
        names += [thread.name for thread in threading.enumerate() if thread.name == "gradients"]
        names += [line for line in Path("/proc/self/maps").read_text().splitlines() if "ddp_hydra-gradients" in line]
        return names + [
            name for fd in Path("/proc/self/fd").iterdir() if "memfd:ddp_hydra-gradients" in (name := link(fd))
        ]

    def link(fd: Path) -> str:
        try:
            return str(fd.readlink())
        except OSError:  # closed by now
            return ""

    before = pipes()
    model = wrapped(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).prediction.sum().backward()
    during = found()
    del model
    gc.collect()
    until = time.monotonic() + 60
    while (after := found()) and time.monotonic() < until:
        time.sleep(0.01)
    return {"during": [name.split()[-1][:20] for name in during], "after": after}


def test_nothing_is_left_of_it(client2, gang):
    for rank in gang(client2).run(left_over):
        assert len(rank["during"]) == 5  # a thread, a mapping, the file that belongs to it, a pipe in and one out
        assert rank["after"] == []


def killed_in_a_step() -> None:
    """On each rank: train; rank 1 is killed where the other waits for its gradients."""
    import torch.distributed as dist

    model = wrapped(torch.nn.Linear(2, 2), comm_hook="shared")
    for step in range(10):
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 2)).prediction.sum().backward()


def test_a_dead_rank_is_the_cause_and_the_other_says_who_is_gone(client2, gang):
    with pytest.raises(RankFailed) as caught:
        gang(client2, max_restarts=0).run(killed_in_a_step)
    assert "rank 1" in str(caught.value).splitlines()[0]
    assert "SIGKILL" in str(caught.value).splitlines()[0]


def error_of_a_lonely_rank() -> str:
    """On each rank: what a step says when rank 1 has left."""
    import torch.distributed as dist

    model = wrapped(torch.nn.Linear(2, 2), comm_hook="shared")
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    try:
        model(torch.ones(1, 2)).prediction.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "none"


def test_a_rank_that_lost_the_others_says_so(client2, gang):
    """By its words a loss is known to be another's."""
    from ddp_hydra.errors import SYMPTOMS

    assert SYMPTOMS.search(gang(client2).run(error_of_a_lonely_rank)[0])
