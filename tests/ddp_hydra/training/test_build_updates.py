from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World, in_world
from ddp_hydra.tasks import Task
from ddp_hydra.training import optimizers
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.lr_schedules import ScheduleProgress
from ddp_hydra.training.parallel import Parallel, parameter_groups
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.state import Position
from tests.ddp_hydra.training.loop_runs import config


def test_what_the_model_has_frozen_itself_is_not_unfrozen():
    cfg, model = config(freeze=["0.weight"]), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    parameter_groups.freeze(model, cfg.trainer.freeze)
    optimizer = torch.optim.SGD(parameter_groups.parameters(model.parameters(), decay_all=True), lr=0.1)
    parallel, device = Parallel().adopt(model), torch.device("cpu")
    builder = optimizers.UpdateBuilder(cfg, parallel, Task(), StepConsensus(ALONE), 2, device)
    builder.unfreeze({"": (model, optimizer)}, {"patterns": ["*"], "lr": None})
    assert [name for name, part in model.named_parameters() if not part.requires_grad] == ["0.bias"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


class Adversaries(Task):
    """Trains two parts of the model, beside a third one and a model of its own."""

    def __init__(self) -> None:
        self.judge = nn.Linear(2, 2)

    def updates(self, step):
        return ("one", "two")


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.third = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("noise", torch.randn(3))
        self.scale = nn.Parameter(torch.randn(2))


def test_a_part_that_the_model_lacks_is_told_with_those_that_it_has():
    with pytest.raises(
        ConfigError, match=r"Adversaries\.updates\(step\) names 'four', and Parts has one, two, third m"
    ):
        Adversaries().part(Parts(), "four")


@in_world
def first_state(world: World) -> dict[str, torch.Tensor]:
    number = world.rank
    torch.manual_seed(number)
    model, task, sampler = Parts(), Adversaries(), Distributed(8, 2, number, 2)
    model.third.running_mean += number
    parallel, device = DDP(world).adopt(model), torch.device("cpu")
    builder = optimizers.UpdateBuilder(config(), parallel, task, StepConsensus(world), 4, device)
    builder.first(ScheduleProgress(1, None, sampler, Position()), [])
    return {**model.state_dict(), "judge": task.judge.weight.detach()}


@pytest.mark.integration
def test_parts_that_no_update_trains_begin_with_those_of_rank_0(on_two_ranks):
    first, second = on_two_ranks(first_state)
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
    torch.manual_seed(0)
    assert torch.equal(second["noise"], Parts().noise)
