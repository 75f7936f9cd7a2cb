"""What a config names becomes parts of a run."""

from __future__ import annotations

import pytest

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
