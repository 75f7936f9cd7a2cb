"""The only rank of a job: no wrapper, the bits of DDP, and parameters without a gradient are noticed."""

from __future__ import annotations

import weakref

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import World
from ddp_hydra.tasks import Task
from ddp_hydra.training import builders, optimizers
from ddp_hydra.training.loop import first_step
from ddp_hydra.training.parallel import Parallel, PartStep
from ddp_hydra.training.parallel.ddp import DDPStep
from ddp_hydra.training.train_step import TrainStep
from tests.ddp_hydra.training.loop_runs import Numbers, config, weights


class Branches(nn.Module):
    """Has two layers, and uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x)


class InDDP(Parallel):
    """Wraps the step of the only rank, too."""

    def __init__(self, world: World, **options) -> None:
        super().__init__(world)

    def wrap(self, step: TrainStep) -> PartStep:
        return DDPStep(step, DistributedDataParallel(step, gradient_as_bucket_view=True), uses_all=True)


DDP = {"parallel": {"_target_": f"{__name__}.InDDP"}}


def part(model: nn.Module, cfg=None) -> PartStep:
    cfg = cfg or config()
    return builders.parallel(cfg).adopt(model).build_part(cfg.trainer, Task(), "")


def test_it_has_no_wrapper(group):
    wrapped = part(nn.Linear(4, 3))
    assert wrapped.wrapped is wrapped.step


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"clip_norm": 0.1}, {"precision": "bf16"}])
def test_it_has_the_bits_of_ddp(train, options):
    alone, wrapped = train(**options), train(parts=DDP, **options)
    assert torch.equal(weights(alone), weights(wrapped))
    assert alone.metrics("val/loss") == wrapped.metrics("val/loss")


@pytest.mark.parametrize("parts", [{}, DDP], ids=["one rank", "ddp"])
def test_parameters_without_a_gradient_are_named(group, parts):
    wrapped = part(Branches(), OmegaConf.merge(config(), parts))
    with (
        pytest.raises(ConfigError, match=r"does not depend on other\.weight, other\.bias: .*find_unused_parameters"),
        wrapped.sync_gradients(True),
    ):
        wrapped.part(torch.ones(2, 4)).sum().backward()
    with wrapped.sync_gradients(False):  # only the end of a step counts
        pass


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_they_may_be_there_where_the_config_says_so(group, option):
    cfg = OmegaConf.merge(config(), {"parallel": {option: True}})
    wrapped = part(Branches(), cfg)
    with wrapped.sync_gradients(True):
        wrapped.part(torch.ones(2, 4)).sum().backward()


def test_frozen_ones_need_no_gradient(group):
    model = Branches()
    model.other.requires_grad_(False)
    wrapped = part(model)
    with wrapped.sync_gradients(True):
        model(torch.ones(2, 4)).sum().backward()


def test_in_another_world_a_model_trains_what_it_trained_when_it_was_built(group):
    model, ended = Branches(), []
    model.other.requires_grad_(False)
    owner = builders.parallel(OmegaConf.merge(config(), DDP)).adopt(model)
    wrapped = owner.build_part(config().trainer, Task(), "").wrapped
    weakref.finalize(wrapped, ended.append, "DDP")
    model(torch.ones(2, 4)).sum().backward()
    del wrapped
    for parameter in (model.other.weight, model.one.weight):  # unfrozen, and frozen by another update
        parameter.requires_grad_(not parameter.requires_grad)
    owner.rebind(World())
    assert (ended, owner.parts) == (["DDP"], {})
    assert [part.requires_grad for part in model.parameters()] == [True, True, False, False]
    assert [part.grad for part in model.parameters()] == [None] * 4


def unused_from_the_start(in_features: int, out_features: int) -> nn.Module:
    return Branches()


def test_a_dry_run_finds_them(group):
    cfg = OmegaConf.merge(
        config(), {"model": {"_target_": f"{__name__}.unused_from_the_start"}, "dispatch": {"ranks": 1}, "cluster": {}}
    )
    with pytest.raises(ConfigError, match=r"other\.weight"):
        first_step(cfg, Numbers(9), None)


class OnGpu(nn.Module):
    """A model whose parameters say that they are on a GPU."""

    def parameters(self, recurse: bool = True):
        class Told:
            is_cuda = True

            def __init__(self, real):
                self.real = real

            def is_floating_point(self):
                return self.real

        return iter([Told(True), Told(getattr(self, "real", True))])


@pytest.mark.parametrize(
    ("node", "real", "found"),
    [
        ({"_target_": "torch.optim.SGD"}, True, {"fused": True}),
        ({"_target_": "torch.optim.AdamW", "lr": 0.1}, True, {"fused": True}),
        ({"_target_": "torch.optim.AdamW", "fused": False}, True, {}),
        ({"_target_": "torch.optim.AdamW", "foreach": True}, True, {}),
        ({"_target_": "torch.optim.RMSprop"}, True, {}),
        ({"_target_": "torch.optim.SGD"}, False, {}),
    ],
)
def test_torchs_optimizers_are_fused_on_gpus(node, real, found):
    model = OnGpu()
    model.real = real
    assert optimizers.fused(OmegaConf.create(node), list(model.parameters())) == found
    assert optimizers.fused(OmegaConf.create(node), list(nn.Linear(1, 1).parameters())) == {}
