"""The modules whose parameters are gathered together, where a model is sharded, and the slots that are shares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import World
from ddp_hydra.tasks import Task
from ddp_hydra.training.parallel.fsdp2 import FSDP2, whole_slots
from ddp_hydra.training.parallel.units import units_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + self.mlp(self.attention(x, x, x, need_weights=False)[0])


class Decoder(nn.Module):
    """A table, blocks, a norm and a head."""

    def __init__(self, tied: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(50, 8), nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 50, bias=False)
        self.rotary = nn.Identity()
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the next token."""
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Whole(nn.Module):
    """Is a decoder in a model, as those of transformers are."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        decoder = Decoder(tied)
        self.model, self.head = decoder, decoder.head
        decoder.head = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the next token."""
        return self.head(self.model(tokens))


class Generates(Task):
    """Predicts three times without gradients, and then with them."""

    def step(self, model: Any, batch: Any) -> torch.Tensor:
        """Return a loss."""
        with torch.no_grad():
            for _ in range(3):
                model(batch)
        return model(batch).square().mean()


def sharded(make: Callable[[], nn.Module], precision: str = "fp32", **options: Any) -> FSDP2:
    """Shard a model over the one rank of a group."""
    parallel = FSDP2(World(0, 1, 1, dist.group.WORLD, dist.group.WORLD, "gloo"), **options)
    without = {"channels_last": None, "compile": None, "freeze": [], "activation_checkpointing": []}
    parallel.build(OmegaConf.create({"precision": precision, **without}), make, torch.device("cpu"))
    return parallel


def names(model: nn.Module, classes: list[str] | None = None, least: float | None = 300) -> list[list[str]]:
    known = {module: name for name, module in model.named_modules()}
    return [[known[module] for module in unit] for unit in units_of(model, classes, least)]


BLOCKS = [["blocks.2"], ["blocks.1"], ["blocks.0"]]


def test_large_modules_outside_of_blocks_are_units_and_the_last_one_takes_its_norm():
    assert names(Decoder()) == [*BLOCKS, ["table"], ["norm", "head"]]
    assert names(Whole())[-2:] == [["model.table"], ["model.norm", "head"]]
    assert names(Decoder(), least=1e6) == names(Decoder(), least=None) == BLOCKS
    assert names(Decoder(), ["Block"]) == BLOCKS  # what was named, and nothing else


def layers(norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    """Return blocks."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), norm(8)) for _ in range(2)))


def net(*parts: nn.Module) -> nn.Module:
    """Return a model whose first layer takes 6 numbers."""
    return nn.Sequential(nn.Linear(6, 8), *parts)


def with_one_norm() -> nn.Module:
    """Return a model that calls a norm twice."""
    shared = nn.LayerNorm(8)
    return net(shared, layers(), shared, nn.Linear(8, 50))


NETS: dict[str, tuple[Callable[[], nn.Module], list[list[str]]]] = {
    "a stem's norm, and blocks before the head": (
        lambda: net(nn.BatchNorm1d(8), layers(nn.BatchNorm1d), nn.Linear(8, 50)),
        [["2.1"], ["2.0"], ["3"]],
    ),
    "a stem's norm of samples": (
        lambda: net(nn.GroupNorm(2, 8), layers(), nn.Linear(8, 50)),
        [["2.1"], ["2.0"], ["3"]],
    ),
    "a norm of a batch before the head": (
        lambda: net(layers(), nn.BatchNorm1d(8), nn.Linear(8, 50)),
        [["1.1"], ["1.0"], ["3"]],
    ),
    "a final norm": (
        lambda: net(nn.LayerNorm(8), layers(), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 50)),
        [["2.1"], ["2.0"], ["3", "5"]],
    ),
    "a norm in the head": (
        lambda: net(layers(), nn.Sequential(nn.LayerNorm(8), nn.Flatten(), nn.Linear(8, 50))),
        [["1.1"], ["1.0"], ["2.0", "2.2"]],
    ),
    "a norm that is large itself": (
        lambda: net(nn.Linear(8, 200), nn.LayerNorm(200), nn.Linear(200, 4)),
        [["1"], ["2"], ["3"]],
    ),
    "a norm of a batch that is large itself": (
        lambda: net(nn.Linear(8, 200), nn.BatchNorm1d(200), nn.Linear(200, 4)),
        [["1"], ["2"], ["3"]],
    ),
    "a norm at the end of another large module": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.LayerNorm(40)), nn.Linear(40, 16)),
        [["0"], ["1"]],
    ),
    "layers with norms": (
        lambda: net(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.LayerNorm(8), nn.Linear(8, 50)),
        [["2", "3"]],
    ),
    "one norm at two places": (with_one_norm, [["2.1"], ["2.0"], ["4"]]),
}


MAKES = [*(make for make, _ in NETS.values()), Decoder, partial(Decoder, True), Whole, partial(Whole, True)]
IDS = [*NETS, "decoder", "tied decoder", "whole", "tied whole"]


@pytest.mark.parametrize(("make", "wanted"), NETS.values(), ids=NETS)
def test_a_norm_goes_with_the_last_module_where_it_is_called_right_before(make, wanted):
    assert names(make()) == wanted


@pytest.mark.parametrize("make", MAKES, ids=IDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_parameter_is_sharded_once(group, make, precision):
    """Torch refuses a module or a parameter that is in two units."""
    for least in (1, 20, 100, 300, 450, None):
        model = sharded(make, precision, min_params=least).model
        with_tokens = isinstance(model, Decoder | Whole)
        inputs = torch.zeros(2, 3, dtype=torch.long) if with_tokens else torch.randn(4, 6)
        model(inputs).square().mean().backward()
        assert all(isinstance(tensor, DTensor) for one in model.parameters() for tensor in (one, one.grad)), least


def test_tied_parameters_stay_together():
    assert names(Decoder(tied=True)) == BLOCKS
    assert names(Whole(tied=True)) == [[f"model.{name}"] for (name,) in BLOCKS]


def test_without_blocks_modules_go_by_their_size():
    net = nn.Sequential(
        nn.Linear(8, 40), nn.Tanh(), nn.Sequential(nn.Linear(40, 5), nn.Linear(5, 30)), nn.Linear(30, 2)
    )
    assert names(net) == [["0"], ["2"]]
    # Attention computes with its parts' weights.
    assert names(Decoder(blocks=1)) == [["table"], ["blocks.0"], ["norm", "head"]]
    assert names(nn.Linear(30, 30)) == []


def test_parts_that_are_not_called_or_have_no_parameters_are_no_units():
    net = nn.Sequential(nn.ParameterList(torch.ones(9, 9) for _ in range(9)), nn.Linear(2, 2), nn.Tanh())
    assert names(net, least=0) == [["1"]]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    assert names(nn.Sequential(encoder), least=0) == [["0.layers.1"], ["0.layers.0"]]


def test_named_classes_have_to_be_there():
    with pytest.raises(ConfigError, match=r"parallel.blocks has Stage, but the model has Block, Decoder"):
        units_of(Decoder(), ["Stage"], None)


TOKENS = torch.zeros(2, 3, dtype=torch.long)


def whole(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if not isinstance(one, DTensor)}


@pytest.mark.parametrize("reshards", [True, False])
def test_parameters_are_shares_after_a_validation(group, reshards):
    """Also the ones that stay whole for a backward pass; the average takes them at the next step."""
    parallel = sharded(Decoder, min_params=300, reshard_after_forward=reshards)
    average = parallel.build_average(0.9)
    for model in (parallel.model, average.model):
        with torch.no_grad():
            model(TOKENS)
        assert whole(model) == set()
    average.update(parallel.model)
    loss = parallel.model(TOKENS).square().mean()
    kept = {"norm.weight", "norm.bias", "head.weight"}
    assert kept <= whole(parallel.model)  # a training does not gather them twice
    loss.backward()
    assert whole(parallel.model) == set()


def test_a_pass_with_gradients_changes_no_fingerprint(group):
    parallel = sharded(Decoder, min_params=300)
    before = parallel.fingerprint()
    parallel.model(TOKENS)
    assert parallel.fingerprint() == before
    assert whole(parallel.model) == set()


class Shuffled(Decoder):
    """Draws what is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.random.permutation(50)


def test_an_average_has_drawn_what_the_model_has(group):
    parallel = sharded(Shuffled)
    np.random.rand()
    average: Any = parallel.build_average(0.9).model
    assert np.array_equal(average.order, parallel.model.order)


@pytest.fixture
def gathers(group, monkeypatch) -> list[str]:
    """A list that has an entry for each unit that is gathered."""
    found = []

    def gathered(self: FSDPParamGroup) -> None:
        found.extend([] if self.is_unsharded else [repr(self)])
        to_unsharded(self)

    to_unsharded = FSDPParamGroup._to_unsharded
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", gathered)
    return found


PER_PASS = [(True, 1, 4), (False, 5, 0)]
"""Whether a table and three blocks are resharded, and how many of the five units are gathered once, and for each pass.

The norm and the head stay whole.
"""


@pytest.mark.parametrize(("reshards", "once", "again"), PER_PASS)
def test_what_stays_whole_is_gathered_once_for_a_validation(gathers, reshards, once, again):
    parallel = sharded(Decoder, min_params=300, reshard_after_forward=reshards)
    average = parallel.build_average(0.9)
    for model in (average.model, parallel.model):
        gathers.clear()
        with parallel.many_passes(), torch.no_grad():
            for _ in range(3):
                model(TOKENS)
        assert len(gathers) == once + 3 * again
        assert whole(model) == set()
    average.update(parallel.model)


@pytest.mark.parametrize(("reshards", "once", "again"), PER_PASS)
def test_what_stays_whole_is_gathered_once_for_a_step_that_generates(gathers, reshards, once, again):
    parallel = sharded(Decoder, min_params=300, reshard_after_forward=reshards)
    step = parallel.build_part(OmegaConf.create({"compile": None}), Generates(), "")
    loss = step(TOKENS).loss
    assert len(gathers) == once + 4 * again
    loss.backward()
    assert len(gathers) == once + 5 * again
    assert whole(parallel.model) == set()
    with torch.no_grad():  # as a callback may
        parallel.model(TOKENS)
    assert whole(parallel.model) == set()


def test_a_validation_that_fails_is_over(group):
    parallel = sharded(Decoder, min_params=300, reshard_after_forward=False)
    with pytest.raises(IndexError), parallel.many_passes(), torch.no_grad():
        parallel.model(TOKENS + 100)
    with torch.no_grad():
        parallel.model(TOKENS)
    assert whole(parallel.model) == set()


def test_a_slot_of_one_shape_whatever_its_parameters_is_no_share():
    weight, bias, one = torch.zeros(8, 4), torch.zeros(8), torch.zeros(1)

    def slots(of: torch.Tensor) -> dict[str, Any]:
        nested = {"mean": of.clone(), "last": [of.clone(), torch.zeros(1)]}
        return {"step": torch.zeros(1), "history": torch.zeros(8), "mean": of.clone(), "n": 3, "nested": nested}

    counters = {"step", "history", "nested.last[1]"}
    assert {path.replace(": ", ".") for path in whole_slots((of, slots(of)) for of in (weight, bias, one))} == counters
    assert whole_slots([(one, {"step": torch.zeros(1), "mean": torch.zeros(1)})]) == {"step"}  # only the name says it
    assert whole_slots([(bias, {"step": bias.clone(), "mean": bias.clone()})]) == set()
    rows = [(weight, {"rows": weight.mean(1)}), (one, {"rows": one.clone()})]  # it goes by its parameter
    assert whole_slots(rows) == set()
