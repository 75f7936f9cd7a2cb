from __future__ import annotations

from itertools import count

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.fault_injection import FaultInjector
from ddp_hydra.rank.world import ALONE, World, in_world
from ddp_hydra.tasks import Task
from ddp_hydra.training import optimizers
from ddp_hydra.training.callbacks import Callback
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import StepConsensus, StopSignal
from ddp_hydra.training.loop import fit
from ddp_hydra.training.lr_schedules import ScheduleProgress
from ddp_hydra.training.parallel import Parallel, parameter_groups
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.run import TrainingRun
from ddp_hydra.training.state import Position
from tests.ddp_hydra.training.loop_runs import BY_LOSS, Numbers, config, flat
from tests.ddp_hydra.training.plain_torch import Net


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


class Freeze(Callback):
    """Freezes a layer for two steps amid an epoch."""

    changes_training = True

    def on_step(self, run):
        run.model.one.requires_grad_(run.step not in (1, 2))


NET = {"model": {"_target_": f"{Net.__module__}.{Net.__name__}"}, **BY_LOSS}


@in_world
def frozen_amid_epochs(world: World) -> dict[str, torch.Tensor]:
    # the workers can't import this module
    cfg = OmegaConf.create({**config(epochs=3), **NET})
    run = TrainingRun(cfg, Numbers(9), None, None, FaultInjector(), StopSignal(), world=world)
    run.callbacks.callbacks["it"] = Freeze()
    fit(run)
    return {name: value.detach() for name, value in run.model.state_dict().items()}


@pytest.mark.integration
def test_what_a_callback_freezes_and_thaws_trains_alike_on_any_number_of_ranks(on_two_ranks, train):
    first, second = on_two_ranks(frozen_amid_epochs)
    parts = {"data": {"batch_size": 4}, "callbacks": {"it": {"_target_": f"{__name__}.Freeze"}}}
    alone = read(train(whole=NET, parts=parts, epochs=3).last)["model"]
    assert flat(first) == flat(second)
    torch.testing.assert_close(first, dict(alone))


@in_world
def trained_in_turns(world: World) -> dict[str, torch.Tensor]:
    cfg = OmegaConf.create({**config(), **NET})
    cfg.parallel.find_unused_parameters = True
    run = TrainingRun(cfg, Numbers(16), None, None, FaultInjector(), StopSignal(), world=world)
    forward, layers, steps = run.model.forward, (run.model.one, run.model.two), count()

    def in_turns(x: torch.Tensor) -> torch.Tensor:
        step = next(steps)
        for number, layer in enumerate(layers):
            layer.requires_grad_(step % 2 == number)
        return forward(x)

    run.model.forward = in_turns
    fit(run)
    return {name: value.detach() for name, value in run.model.state_dict().items()}


@pytest.mark.integration
def test_layers_that_a_step_itself_freezes_and_thaws_are_exchanged(on_two_ranks):
    first, second = on_two_ranks(trained_in_turns)
    assert flat(first) == flat(second)


def test_an_update_freezes_the_others_only_while_it_lasts_and_thaws_nothing_else():
    model = Parts()
    parallel, sampler = Parallel().adopt(model), Distributed(8, 2)
    builder = optimizers.UpdateBuilder(config(), parallel, Adversaries(), StepConsensus(ALONE), 2, torch.device("cpu"))
    update = builder.first(ScheduleProgress(1, None, sampler, Position()), [])["one"]
    before = {name: name not in ("one.bias", "two.bias") for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before[name])  # as a callback freezes them
    with update.others_frozen():
        update.begin()
        found = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert found == ["scale", "one.weight", "third.weight", "third.bias"]
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


@pytest.mark.integration
def test_parts_that_no_update_trains_begin_with_those_of_rank_0(on_two_ranks):
    first, second = on_two_ranks(first_state)
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
    torch.manual_seed(0)
    assert torch.equal(second["noise"], Parts().noise)
