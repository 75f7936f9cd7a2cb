from __future__ import annotations

import torch
from torch import nn

from ddp_hydra.training import build_updates, parameter_groups
from tests.ddp_hydra.training.loop_runs import config


def test_what_the_model_has_frozen_itself_is_not_unfrozen():
    cfg, model = config(freeze=["0.weight"]), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    parameter_groups.freeze(model, cfg.trainer.freeze)
    optimizer = torch.optim.SGD(parameter_groups.parameters(model.parameters(), decay_all=True), lr=0.1)
    build_updates.unfreeze(cfg, model, [(model, optimizer)], {"patterns": ["*"], "lr": None})
    assert [name for name, part in model.named_parameters() if not part.requires_grad] == ["0.bias"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
