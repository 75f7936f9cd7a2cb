"""`parallel=fsdp2` beside a loop written by hand: the same bits, and the same collectives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_fsdp2_build import this_world, trainer

pytestmark = pytest.mark.integration

STEPS, ACCUMULATED = 4, 2


def both(kind: str) -> dict[str, Any]:
    """On each rank: weights after some steps, and the collectives of the last one, of us and by hand."""
    from collections import Counter
    from unittest import mock

    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ddp_hydra.data.draws import seed_all
    from ddp_hydra.tasks import Step, Task
    from ddp_hydra.training.consensus import StepConsensus
    from ddp_hydra.training.parallel.fsdp2 import FSDP2
    from ddp_hydra.training.update import Update, Weighing

    world, cpu = this_world(), torch.device("cpu")
    batches = torch.randn(STEPS, ACCUMULATED, 4, 6, generator=torch.Generator().manual_seed(world.rank))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm, self.head = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))
            if kind in ("kept", "changed"):
                self.register_buffer("rates", torch.linspace(1, 2, 9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x) * (self.rates.clone() if hasattr(self, "rates") else 1)
            if kind == "changed":
                self.rates += 0
            for block in self.blocks:
                x = x + block(x)
            return self.head(self.norm(x))

    class Squares(Task):
        def step(self, model: Any, batch: Any) -> Step:
            return Step(model(batch).square().mean())

    def trained(model: nn.Module, take: Any) -> tuple[Any, ...]:
        for number, micro_batches in enumerate(batches):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                take(micro_batches)
            counted = Counter(one.name for one in profile.events() if one.name.startswith("c10d::"))
            if number == STEPS - 1:
                found = dict(counted)
        return {name: value.full_tensor() for name, value in model.state_dict().items() if name != "rates"}, found

    def ours() -> tuple[Any, ...]:
        parallel, settings = FSDP2(world, min_params=100), trainer(compile="default" if kind == "compiled" else None)
        seed_all(5)
        compile_by = nn.Module.compile
        with mock.patch.object(nn.Module, "compile", lambda block, mode: compile_by(block, backend="eager")):
            parallel.build(settings, Net, cpu)
        assert parallel.state().keys() == Net().state_dict().keys()
        part = parallel.build_part(settings, Squares(), "")
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=0.1, fused=False)
        scaler, weighing = torch.amp.GradScaler("cpu", enabled=False), Weighing(4 * ACCUMULATED, StepConsensus(world))
        update = Update("", part, optimizer, None, scaler, weighing)

        def take(micro_batches: torch.Tensor) -> None:
            update.begin()
            losses = []
            for number, batch in enumerate(micro_batches):
                is_last = number == ACCUMULATED - 1
                with part.sync_gradients(is_last):
                    loss = update.weighing.weigh(part(batch), len(batch))
                    losses.append(loss.detach())
                    if is_last:
                        decision = update.vote(losses, stop=0)
                    update.backward(loss)
            assert update.find_nonfinite(decision(), losses) is None
            update.apply()

        return trained(parallel.model, take)

    def by_hand() -> tuple[Any, ...]:
        seed_all(5)
        model: Any = Net()
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)

        def take(micro_batches: torch.Tensor) -> None:
            optimizer.zero_grad()
            for number, batch in enumerate(micro_batches):
                model.set_requires_gradient_sync(number == ACCUMULATED - 1)
                (model(batch).square().mean() / ACCUMULATED).backward()
            optimizer.step()

        return trained(model, take)

    (weights, collectives), (wanted, wanted_collectives) = ours(), by_hand()
    return {
        "same": all(torch.equal(weights[name], value) for name, value in wanted.items()),
        "ours": collectives,
        "by hand": wanted_collectives,
    }


def of_each(kinds: tuple[str, ...]) -> dict[str, Any]:
    return {kind: both(kind) for kind in kinds}


@pytest.mark.parametrize("kinds", [("kept", "changed"), pytest.param(("plain", "compiled"), marks=pytest.mark.slow)])
def test_it_has_the_bits_and_the_collectives_of_a_loop_by_hand(client2, gang, kinds):
    """Models with a buffer that stays, and one that changes, without any, and compiled.

    One all-reduce is the vote, and one adds up the norms of gradients, by which all ranks know of a NaN.
    """
    for found in gang(client2, backend="gloo").run(of_each, kinds):
        for kind, one in found.items():
            assert one["same"], kind
            more = {"c10d::allreduce_": 2} | ({"c10d::broadcast_": 1} if kind == "changed" else {})
            assert one["ours"] == one["by hand"] | more, kind
            assert one["by hand"] == {"c10d::_allgather_base_": 14, "c10d::_reduce_scatter_base_": 4}
