"""What a switch of the trainer does is seen by the model in its steps, however alike the results are."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.training import builders
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.parallel.none import Unwrapped
from tests.ddp_hydra.training.loop_runs import STEPS, Numbers, flat
from tests.ddp_hydra.training.test_precision import cfg


class Block(nn.Module):
    """Counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Looks(nn.Module):
    """Notes in each training step how it is called."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.conv, self.block = nn.Conv2d(3, 3, 2), Block()

    def forward(self, x: Tensor) -> Tensor:
        images = self.conv(x)
        if self.training:
            self.seen.append(
                {
                    "dtype": images.dtype,
                    "products": torch.get_float32_matmul_precision(),
                    "input is channels_last": x.is_contiguous(memory_format=torch.channels_last),
                    "weight is channels_last": self.conv.weight.is_contiguous(memory_format=torch.channels_last),
                    "samples": len(x),
                    "blocks before": self.block.calls,
                    "trained": [name for name, value in self.named_parameters() if value.requires_grad],
                }
            )
        return self.block(images.mean((2, 3)))


class Pictures(Numbers):
    """Images of three classes."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].expand(3, 4, 4).contiguous(), self.y[index]


ALL = ["conv.weight", "conv.bias", "block.layer.weight", "block.layer.bias"]
AS_IT_IS = {
    "dtype": torch.float32,
    "products": "highest",
    "input is channels_last": True,
    "weight is channels_last": True,
    "samples": 2,
    "trained": ALL,
}
SWITCHES = [
    ({}, {}),
    ({"precision": "bf16"}, {"dtype": torch.bfloat16}),
    ({"precision": "fp16"}, {"dtype": torch.float16}),
    ({"precision": "tf32"}, {"products": "high"}),
    ({"channels_last": False}, {"input is channels_last": False, "weight is channels_last": False}),
    ({"freeze": ["*", "!block.*"]}, {"trained": ALL[2:]}),
]


@pytest.fixture
def train_pictures(train):
    def run(**trainer: Any) -> list[dict[str, Any]]:
        Looks.seen.clear()
        model = {"_target_": f"{__name__}.Looks"}
        train(epochs=1, data=Pictures, parts={"model": model}, **trainer)
        return list(Looks.seen)

    yield run
    builders.set_float32(cfg("fp32"))


@pytest.mark.parametrize(("switch", "changed"), SWITCHES, ids=[", ".join(switch) for switch, _ in SWITCHES])
def test_each_step_is_as_the_switch_says(train_pictures, switch, changed):
    seen = train_pictures(**switch)
    assert len(seen) == STEPS
    assert [{name: step[name] for name in AS_IT_IS} for step in seen] == [AS_IT_IS | changed] * STEPS


class WithoutView(nn.Module):
    """A small model that needs no layout."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.conv, self.scores = nn.Conv2d(3, 4, 2), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.flat(torch.relu(self.conv(x))))

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Net(WithoutView):
    """As many tutorials write it."""

    def flat(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


def as_rows(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


def timed(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Decorated(WithoutView):
    """Its method is inside another one."""

    @timed
    def flat(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class Static(WithoutView):
    """Its method is a function."""

    @staticmethod
    def flat(x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class Inside(WithoutView):
    """It calls `view` in a function of a function."""

    def flat(self, x: Tensor) -> Tensor:
        return torch.cat([(lambda one: one.view(one.size(0), -1))(part) for part in [x]])


class Hidden(WithoutView):
    """It calls `view` in a function that nothing sees before a step."""

    def flat(self, x: Tensor) -> Tensor:
        return as_rows(x)


def test_a_model_that_calls_view_trains_as_it_does_in_torch(train):
    trained = [
        read(train(epochs=1, data=Pictures, parts={"model": {"_target_": f"{__name__}.{kind}"}}, **switch).last)
        for kind, switch in [("Net", {}), ("WithoutView", {"channels_last": False})]
    ]
    assert flat(trained[0]["model"]) == flat(trained[1]["model"])
    assert weights.lay_out(WithoutView(), None)
    for kind in (Net, Decorated, Static, Inside):
        assert not weights.lay_out(kind(), None)
    assert not weights.lay_out(nn.Sequential(nn.Conv2d(3, 4, 2), Net()), None)
    assert weights.lay_out(Net(), True)


class Filtered(nn.Module):
    """As GFNet and models of videos: a filter of complex numbers, and weights of five axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 2), nn.ConvTranspose2d(4, 2, 2)
        self.time, self.filter = nn.Conv3d(1, 1, 1), nn.Parameter(torch.ones(2, 4, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.time((self.up(self.conv(x)) * torch.view_as_complex(self.filter).abs())[:, None])


def test_only_weights_of_2d_convolutions_are_laid_out_by_default():
    model, images = Filtered(), torch.ones(2, 3, 4, 4)
    expected = model(images)
    assert weights.lay_out(model, None)
    assert torch.allclose(model(images.to(memory_format=torch.channels_last)), expected)
    layers = [model.conv.weight, model.up.weight]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in layers)
    assert model.filter.is_contiguous()
    with pytest.raises(ConfigError, match=r"channels_last=true.*time\.weight of the model has five: leave it out"):
        weights.lay_out(model, True)


def test_an_error_of_a_complex_view_says_which_key_changes_the_layout():
    model, parallel = Filtered(), Unwrapped()
    model.time = nn.Identity()
    parallel.channels_last = weights.lay_out(model, True)
    with pytest.raises(RuntimeError, match="last dimension with stride 1") as raised, parallel.explain_errors():
        model(torch.zeros(2, 3, 4, 4))
    assert "give trainer.channels_last=false" in raised.value.__notes__[0]


@pytest.mark.parametrize("kind", [Net, Hidden])
def test_an_error_of_the_layout_says_which_key_changes_it(kind):
    model, parallel = kind(), Unwrapped()
    parallel.channels_last = weights.lay_out(model, True)
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view size is not compatible") as raised, parallel.explain_errors():
        model(images)
    assert "give trainer.channels_last=false" in raised.value.__notes__[0]


def test_activations_are_computed_again(train_pictures):
    assert [step["blocks before"] for step in train_pictures()] == [0, 1, 2, 3]
    assert [step["blocks before"] for step in train_pictures(activation_checkpointing=["Block"])] == [0, 2, 4, 6]


def test_a_step_has_as_many_micro_batches_as_asked_for(train_pictures):
    assert len(train_pictures(gradient_accumulation_steps=2)) == 4  # nine samples make two steps of two by two
