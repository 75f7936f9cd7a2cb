"""Layers, parameters and buffers of all kinds train with a moving average, are saved, and go on after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import check_resume
from tests.ddp_hydra.training.plain_torch import CONSTANT, begin_alike, rates


class Middle(nn.Module):
    """Has a layer in its middle, 6 features wide."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        begin_alike(self)
        torch.manual_seed(2)  # of the layer
        self.middle = MIDDLES[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.middle(self.one(x)).reshape(len(x), 6))


class Images(nn.Module):
    """Gives a layer images of two channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(len(x), 2, 3, 1))


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class Frozen(nn.Module):
    """Has a layer that is not trained, and a mask that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.mask = nn.Parameter(torch.tensor([0.0] * 5 + [-torch.inf]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(x) * torch.softmax(x.detach() + self.mask, 1)


class Complex(nn.Module):
    """Has complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Buffer(nn.Module):
    """Has a buffer, and a number that counts in it where it can."""

    def __init__(self, buffer: torch.Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer, persistent)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x


class Extra(nn.Module):
    """Keeps an extra state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(6)), state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and isinstance(self.state, dict):
            self.state["calls"] = self.state.get("calls", 0) + 1
        if self.training and isinstance(self.state, torch.Tensor):
            self.state = self.state + 1
        return x * self.weight

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def first_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(6, 6))


LAYERS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "BatchNorm1d, cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "BatchNorm1d, no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "BatchNorm2d": lambda: Images(nn.BatchNorm2d(2, affine=False)),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "InstanceNorm2d": lambda: Images(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "spectral_norm, the first": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "weight_norm, the first": first_weight_norm,
    "tied": Tied,
    "frozen": Frozen,
    "complex": Complex,
}
BUFFERS = {
    "-inf mask": lambda: Buffer(torch.triu(torch.full((3, 3), -torch.inf), 1)),
    "complex": lambda: Buffer(torch.polar(torch.ones(3), torch.arange(3.0))),
    "bool": lambda: Buffer(torch.tensor([True, False])),
    "int16": lambda: Buffer(torch.tensor([1, -2], dtype=torch.int16)),
    "uint16": lambda: Buffer(torch.tensor([1, 2], dtype=torch.uint16)),
    "float8": lambda: Buffer(torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)),
    "bfloat16": lambda: Buffer(torch.tensor([1.0, -torch.inf], dtype=torch.bfloat16)),
    "float64": lambda: Buffer(torch.tensor([0.1], dtype=torch.float64)),
    "expanded": lambda: Buffer(torch.ones(1).expand(4)),
    "not persistent": lambda: Buffer(torch.full((2,), torch.inf), persistent=False),
    "empty": lambda: Buffer(torch.zeros(0, 3)),
}
EXTRAS = {
    "a dict": lambda: Extra({"names": ["a", ("b", 1)]}),
    "none": lambda: Extra(None),
    "a tensor": lambda: Extra(torch.zeros(2)),
}
MIDDLES: dict[str, Any] = {
    **LAYERS,
    "buffers and extra states": lambda: nn.Sequential(*(make() for make in (*BUFFERS.values(), *EXTRAS.values()))),
}


def node(kind: str) -> dict[str, Any]:
    return {"_target_": f"{__name__}.Middle", "kind": kind}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and torch.equal(one.float(), other.float())
            if not one.is_complex()
            else (torch.equal(one, other))
        )
    return one == other


@pytest.mark.medium
@pytest.mark.parametrize("kind", MIDDLES)
def test_it_trains_as_in_plain_torch_and_goes_on_after_a_resume(kind, train):
    whole = {"model": node(kind), "scheduler": CONSTANT}
    options = {"ema_decay": 0.9, "decay_all": True, "val": 4}
    run, _ = check_resume(train, ("forward", 5), whole=whole, **options)
    saved = read(run.last)
    model = Middle(kind)
    rates(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9))
    for name, value in model.state_dict().items():
        assert equal(saved["model"][name], value), name
    average = saved["ema"]["model"]
    assert average.keys() == saved["model"].keys()
    for name, value in saved["model"].items():
        if isinstance(value, torch.Tensor) and value.dtype != torch.float8_e4m3fn:
            assert torch.equal(average[name].isfinite(), value.isfinite()), name
