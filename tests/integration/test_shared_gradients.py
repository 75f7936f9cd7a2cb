"""Ranks that average their gradients in shared memory: every sum is right, however the ranks come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hydra.errors import RankFailed
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration


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
        return str(fd.readlink()) if fd.is_symlink() else ""

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
