"""What a config names becomes parts of a run."""

from __future__ import annotations

import pytest
import torch

from ddp_hydra.errors import ConfigError
from ddp_hydra.training import builders
from tests.ddp_hydra.training.loop_runs import Numbers, config


def model(**node):
    cfg = config()
    cfg.model = node
    return builders.model(cfg, Numbers(3))


def test_a_model_that_is_no_module_is_refused():
    with pytest.raises(
        ConfigError, match=r"model\._target_=builtins\.list returned a list: return a torch\.nn\.Module"
    ):
        model(_target_="builtins.list")


def test_a_model_with_a_parameter_without_a_shape_is_refused():
    with pytest.raises(ConfigError, match=r"nn\.LazyLinear: weight, bias has no shape yet.*give its size"):
        model(_target_="torch.nn.LazyLinear", out_features=3)


class Asks(torch.optim.SGD):
    """Its step() can't be called without an argument."""

    def step(self, closure, batch):
        return super().step(closure)


def test_an_optimizer_whose_step_needs_arguments_is_refused():
    cfg = config()
    cfg.optimizer = {"_target_": f"{__name__}.Asks", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"Asks: its step\(\) needs closure, batch.*such as optimizer=sgd"):
        builders.optimizer(cfg, torch.nn.Linear(1, 1))


def test_a_static_graph_with_micro_batches_is_refused_once_there_are_several_ranks(monkeypatch):
    cfg = config(gradient_accumulation_steps=2)
    cfg.parallel.static_graph = True
    monkeypatch.setattr(builders, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"parallel.static_graph=true does not go with .* on several ranks"):
        builders.parallel(cfg, None)
