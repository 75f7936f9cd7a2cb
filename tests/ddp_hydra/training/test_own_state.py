"""Models whose own `state_dict`, `load_state_dict` or hooks leave names out, change them, or answer otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.parallel.fsdp2 import FSDP2
from ddp_hydra.training.parallel.weights import Ema
from tests.ddp_hydra.training.loop_runs import check_resume, config
from tests.ddp_hydra.training.plain_torch import begin_alike


class Net(nn.Module):
    """A frozen backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.head = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)
        begin_alike(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.back(x)))


class Drops(Net):
    """Leaves the backbone out of its state."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return type(state)((name, value) for name, value in state.items() if not name.startswith("back."))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class NoAnswer(Net):
    """Returns nothing, and takes the state alone."""

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)


class Hooked(Net):
    """Leaves the backbone out by a hook, and a hook says that this is right."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.drop)
        self.register_load_state_dict_post_hook(lambda module, found: found.missing_keys.clear())

    @staticmethod
    def drop(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}back.")]:
            del state[name]


class Renamed(Net):
    """Calls the head otherwise in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.save)
        self.register_load_state_dict_pre_hook(self.load)

    @staticmethod
    def save(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}fc.{name}"] = state.pop(f"{prefix}head.{name}")

    @staticmethod
    def load(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}head.{name}"] = state.pop(f"{prefix}fc.{name}")


KINDS = (Drops, NoAnswer, Hooked, Renamed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}], ids=str)
def test_they_are_resumed(train, kind, options):
    whole, _ = check_resume(
        train, ("update", 3), whole={"model": {"_target_": f"{__name__}.{kind.__name__}"}}, **options
    )
    assert ("back.weight" in read(whole.last)["model"]) == (kind in (NoAnswer, Renamed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_an_average_begins_one(train, kind):
    parts = {"model": {"_target_": f"{__name__}.{kind.__name__}"}}
    stopped = train(whole=parts, stop_at=("update", 3))
    resumed = train(whole=parts, resume=stopped.last, ema_decay=0.9)
    assert read(resumed.last)["ema"]["model"].keys() == read(stopped.last)["model"].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_they_begin_with_the_weights_of_another_run(train, kind):
    parts = {"model": {"_target_": f"{__name__}.{kind.__name__}"}}
    first = train(whole=parts)
    assert train(whole=parts, start=first.last).last.exists()


class Forgets(Drops):
    """Leaves the backbone out, and its load_state_dict asks for it."""

    load_state_dict = nn.Module.load_state_dict


class Refuses(Net):
    """Takes no state."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        raise NotImplementedError("later")


@pytest.mark.parametrize(
    ("kind", "said"), [(Forgets, r"Missing key\(s\) in state_dict: \"back.weight\""), (Refuses, "later")]
)
def test_a_model_that_does_not_take_its_own_state_is_refused_before_the_first_step(train, kind, said):
    runs: list[Any] = []
    with pytest.raises(
        ConfigError, match=rf"^{kind.__name__}.load_state_dict does not take what .*{said}.*strict=False"
    ):
        train(whole={"model": {"_target_": f"{__name__}.{kind.__name__}"}}, into=runs)
    assert runs[0].records == []


class Rounds(Net):
    """Saves 16 bits of each number, and counts its loads."""

    loads = 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value.half() for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.loads += 1
        return super().load_state_dict({name: value.float() for name, value in state_dict.items()})


def test_the_check_changes_nothing():
    model, before = Rounds(), Rounds()
    weights.check_own_state(model)
    assert model.loads == 0
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before.parameters(), strict=True))


def test_plain_models_are_not_copied(monkeypatch):
    monkeypatch.setattr("copy.deepcopy", None)
    layers = [nn.BatchNorm1d(2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.LSTM(2, 2)]
    own = nn.Module()
    own.register_buffer("late", None)
    own.register_buffer("mask", torch.ones(2), persistent=False)
    weights.check_own_state(nn.Sequential(*layers, own, layers[0]))


@in_world
def sharded(world: World) -> dict[str, bool]:
    found = {}
    for kind in (Drops, Hooked):
        parallel, again = FSDP2(world), FSDP2(world)
        for one in (parallel, again):
            one.build(config().trainer, kind, torch.device("cpu"))
        with torch.no_grad():
            for parameter in parallel.model.head.parameters():  # type: ignore[operator, union-attr]
                parameter += 1
        again.load({"model": parallel.state()})
        average: Ema = again.build_average(0.9)
        average.load_state_dict({"model": again.state(), "steps": 3})
        pairs = [weights.tensors_of(one) for one in (parallel.model, again.model, average.model)]
        same = all(
            torch.equal(weights.local(first), weights.local(other))
            for first, *others in zip(*pairs, strict=True)
            for other in others
        )
        found[kind.__name__] = same and average.steps == 3
    return found


@pytest.mark.integration
def test_a_sharded_model_and_its_average_have_what_the_state_leaves_out(on_two_ranks):
    assert on_two_ranks(sharded) == [{"Drops": True, "Hooked": True}] * 2
