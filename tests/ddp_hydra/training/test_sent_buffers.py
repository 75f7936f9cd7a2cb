"""Buffers of a loss on several ranks: all ranks take rank 0's, and only after a step that changed one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.tasks import Classification
from ddp_hydra.training import builders, optimizers
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.lr_schedules import ScheduleProgress
from ddp_hydra.training.parallel import PartStep
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.parallel.fsdp2 import FSDP2
from ddp_hydra.training.parallel.sent_buffers import SentBuffers
from ddp_hydra.training.state import Position
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import Update, Weighing
from tests.ddp_hydra.training.loop_runs import Numbers, config


class Counts(nn.Module):
    """Counts the samples of each class in some of its calls."""

    def __init__(self, calls: tuple[int, ...]) -> None:
        super().__init__()
        self.calls, self.call = calls, 0
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.call in self.calls:
                self.counts += torch.bincount(target, minlength=3)
            self.call += 1
        return F.cross_entropy(prediction, target)


class Late(Counts):
    """The same, whose first call makes the buffer."""

    def __init__(self) -> None:
        super().__init__((0,))
        self.counts: Any = None

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.counts is None:
            self.counts = torch.zeros(3)
        return super().forward(prediction, target)


class Noting(World):
    """Two ranks, of which this is the only one."""

    def send_from_rank_0(self, tensor: torch.Tensor) -> None:
        self.kept["sends"] = self.kept.get("sends", 0) + 1


def step(update: Update, batches: list[Any], consensus: StepConsensus) -> None:
    update.begin()
    losses = []
    for number, (x, y) in enumerate(batches, 1):
        with update.part.sync_gradients(number == len(batches)):
            loss = update.weighing.weigh(update.part((x, y)), len(x))
            losses.append(loss.detach())
            if number == len(batches):
                decide = update.vote(losses, 0)
            update.backward(loss)
    update.find_nonfinite(decide(), losses)
    update.apply()


def test_a_step_sends_what_the_step_before_has_changed():
    world, loss, model = Noting(0, 2), Counts((4, 5)), nn.Linear(4, 3)
    part = PartStep(TrainStep(Classification(loss), model), world=world)
    part.buffers = SentBuffers(world, loss)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    update = Update("", part, optimizer, None, scaler, Weighing(4, StepConsensus()))
    batches, sends = [(torch.randn(2, 4), torch.tensor([0, 1]))] * 2, []
    for number in range(6):
        if number == 5:
            part.leave_out_step()
        world.kept["sends"] = 0
        step(update, batches, StepConsensus())
        sends.append(world.kept["sends"])
    # The first one, the one after a change in the third, and the one after a step that is left out.
    assert sends == [1, 0, 0, 1, 0, 1]


def test_after_a_validation_they_are_sent(train, monkeypatch):
    """A validation or a callback may have changed them."""
    due = []
    call = PartStep.__call__
    monkeypatch.setattr(PartStep, "__call__", lambda self, batch: due.append(self.buffers.are_due) or call(self, batch))
    train(validate_every_steps=3, max_steps=7)
    assert [number for number, is_due in enumerate(due) if is_due] == [0, 3, 4, 6]  # an epoch has four steps


class Pair(Classification):
    """Trains two parts of the model, one after the other."""

    def updates(self, step):
        return ("one", "two")

    def step(self, model, batch, update=""):
        return super().step(getattr(model, update), batch)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)


def sends_of(world: World, model: nn.Module, task: Classification) -> tuple[list[int], torch.Tensor]:
    parallel, consensus, sampler = DDP(world).adopt(model), StepConsensus(world), Distributed(8, 2, world.rank, 2)
    cfg, device = config(), torch.device("cpu")
    if isinstance(task, Pair):
        cfg.optimizer = {"one": cfg.optimizer, "two": cfg.optimizer}
    builder = optimizers.UpdateBuilder(cfg, parallel, task, consensus, 4, device)
    updates = builder.first(ScheduleProgress(1, None, sampler, Position()), [])
    x, y = torch.randn(2, 4), torch.tensor([world.rank, world.rank])
    sends = []
    for update in 4 * list(updates.values()):
        with mock.patch.object(World, "send_from_rank_0", autospec=True, side_effect=World.send_from_rank_0) as sent:
            step(update, [(x, y)], consensus)
        sends.append(sent.call_count)
        assert not list(update.part.wrapped.modules_buffers)  # type: ignore[operator, union-attr]
    return sends, next(task.criterion.buffers())  # type: ignore[attr-defined]


@in_world
def sent(world: World) -> list[Any]:
    return [
        sends_of(world, nn.Linear(4, 3), Classification(nn.CrossEntropyLoss(torch.ones(3)))),
        # Rank 1 counts in its second step.
        sends_of(world, nn.Linear(4, 3), Classification(Counts((1,) if world.rank else ()))),
        # The first update counts in its second step, which is the third call of the loss.
        sends_of(world, Parts(), Pair(Counts((2,)))),
        sends_of(world, nn.Linear(4, 3), Classification(Late())),
    ]


@pytest.mark.integration
def test_buffers_that_stay_the_same_cost_no_exchange(on_two_ranks):
    (weighted, of_rank_1, of_parts, late), (_, other_of_rank_1, other_of_parts, other_late) = on_two_ranks(sent)
    assert weighted[0] == [1, 0, 0, 0]
    assert of_rank_1[0] == other_of_rank_1[0] == [1, 0, 1, 0]
    assert of_parts[0] == other_of_parts[0] == [1, 0, 0, 1, 0, 0, 0, 0]
    assert of_rank_1[1].tolist() == other_of_rank_1[1].tolist() == [0, 0, 0]
    assert of_parts[1].tolist() == other_of_parts[1].tolist() == [2, 0, 0]
    assert late[0] == other_late[0] == [0, 1, 0, 0]
    assert late[1].tolist() == other_late[1].tolist() == [2, 0, 0]


class Features(nn.Module):
    """Compares frozen features, which each rank draws for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.features = nn.Linear(3, 3).requires_grad_(False)
        nn.init.constant_(self.features.weight, rank)
        self.register_buffer("mean", torch.full((3,), float(rank)))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.features(prediction) - self.mean, target)


@in_world
def first_features(world: World) -> list[Any]:
    found = []
    for kind in (DDP, FSDP2):
        parallel, task = kind(world), Classification(Features(world.rank))
        parallel.build(config().trainer, lambda: nn.Linear(4, 3), torch.device("cpu"))
        part = parallel.build_part(config().trainer, task, "")
        parallel.broadcast_rest(task)
        part((torch.ones(2, 4), torch.tensor([0, 1])))
        found.append([one.tolist() for one in task.criterion.state_dict().values()])  # type: ignore[attr-defined]
    return found


@pytest.mark.integration
def test_frozen_parameters_of_a_loss_with_buffers_begin_with_those_of_rank_0(on_two_ranks):
    first, second = on_two_ranks(first_features)
    assert first == second
    assert first[0][0] == [0, 0, 0]
    assert first[0][1] == torch.zeros(3, 3).tolist()


class Own(Classification):
    """Counts samples in a module of its own, too."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__(criterion)
        self.seen = Counts((0,))

    def step(self, model, batch):
        self.seen(model(batch[0]), batch[1])
        return super().step(model, batch)


@in_world
def validated(world: World) -> tuple[list[float], list[float]]:
    parallel, task, device = DDP(world), Own(Counts((0,))), torch.device("cpu")
    parallel.build(config().trainer, lambda: nn.Linear(4, 3), device)
    part = parallel.build_part(config().trainer, task, "")
    part((torch.ones(2, 4), torch.tensor([world.rank, world.rank])))
    builders.evaluation(config(), Numbers(4), task, device, parallel).run(parallel.model, lambda: 0)
    return task.seen.counts.tolist(), task.criterion.counts.tolist()  # type: ignore[attr-defined]


@pytest.mark.integration
def test_a_validation_takes_buffers_of_rank_0_for_model_and_loss_alone(on_two_ranks):
    assert on_two_ranks(validated) == [([2, 0, 0], [2, 0, 0]), ([0, 2, 0], [2, 0, 0])]
