"""Every optimizer of torch: two epochs end with the weights of plain torch, also after a resume amid one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import check_resume
from tests.ddp_hydra.training.plain_torch import CONSTANT, Net, begin_alike, rates


class Looked(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        begin_alike(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x > 0).long().cumsum(1)).sum(1)


class Flat(Net):
    """Has matrices only."""

    def __init__(self) -> None:
        super().__init__(bias=False)


TABLE: list[tuple[str, type[nn.Module], dict[str, Any]]] = [
    ("ASGD", Net, {"lr": 0.1, "t0": 3, "lambd": 0.01}),
    ("Adadelta", Net, {}),
    ("Adafactor", Net, {"lr": 0.05}),
    ("Adagrad", Net, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adam", Net, {"lr": 0.05}),
    ("Adam", Net, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1, "foreach": False}),
    ("Adam", Net, {"lr": 0.05, "fused": True}),
    ("AdamW", Net, {"lr": 0.05, "betas": [0.8, 0.9], "maximize": True}),
    ("Adamax", Net, {"lr": 0.05}),
    ("Muon", Flat, {"lr": 0.05}),
    ("NAdam", Net, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", Net, {"lr": 0.05}),
    ("RMSprop", Net, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    ("Rprop", Net, {"lr": 0.01}),
    ("SGD", Net, {"lr": 0.1}),
    ("SGD", Net, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", Looked, {"lr": 0.1}),
    ("SparseAdam", Looked, {"lr": 0.05}),
]


def test_the_table_has_all_of_torch():
    theirs = {
        name
        for name, one in vars(torch.optim).items()
        if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)
    }
    assert theirs - {"Optimizer", "LBFGS"} == {name for name, _, _ in TABLE}  # LBFGS needs a closure


@pytest.mark.medium
@pytest.mark.parametrize(("name", "net", "options"), TABLE, ids=str)
def test_two_epochs_are_those_of_plain_torch_and_a_resume_changes_nothing(name, net, options, train):
    model = net()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    rates(model, getattr(torch.optim, name)(model.parameters(), **given))
    parts = {
        "model": {"_target_": f"{__name__}.{net.__name__}"},
        "scheduler": CONSTANT,
        "optimizer": {"_target_": f"torch.optim.{name}", **options},
    }
    run, _ = check_resume(train, ("forward", 5), whole=parts, decay_all=True)
    for key, value in model.state_dict().items():
        assert torch.equal(read(run.last)["model"][key], value), key
