"""Optimizers of other libraries: those that draw random numbers, save a part of their settings, or have no rate."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank.fault_injection import FaultInjector
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.load_run import needed
from ddp_hydra.training.loop import fit
from ddp_hydra.training.parallel.fsdp2 import FSDP2
from ddp_hydra.training.run import TrainingRun
from ddp_hydra.training.seeds import seeded
from tests.ddp_hydra.training.loop_runs import BY_LOSS, Numbers, Run, check_resume, config
from tests.ddp_hydra.training.plain_torch import CONSTANT, Net, rates

STEP = "ddp_hydra.training.lr_schedules.step"


def own(name: str, **options: Any) -> dict[str, Any]:
    model = {"_target_": f"{__name__}.{Dropping.__name__}"}
    return {"model": model, "scheduler": CONSTANT, "optimizer": {"_target_": f"{__name__}.{name}", **options}}


class Dropping(Net):
    """Draws random numbers in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.25, self.training))


@torch.no_grad()
def add_noise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add numbers of all generators."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.add_(torch.randn_like(parameter) * 0.01 + random.random() * 0.01 + np.random.rand() * 0.01)


class Langevin(torch.optim.SGD):
    """Adds noise to its weights."""

    def step(self, closure: Any = None) -> None:
        super().step()
        add_noise(self)


@in_world
def trained_on_ranks(world: World) -> list[list[float]]:
    # torch's own optimizer, whose hook draws: the workers can't import this module
    cfg = config(epochs=1)
    cfg.model = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Dropout"}, cfg.model]}
    cfg.objective = BY_LOSS["objective"]
    run = TrainingRun(cfg, Numbers(9), None, None, FaultInjector(), StopSignal(), world=world)
    run.updates[""].optimizer.register_step_post_hook(add_noise)
    fit(run)
    return [parameter.tolist() for parameter in run.model.parameters()]


@pytest.mark.integration
def test_ranks_that_draw_in_their_update_stay_alike(on_two_ranks):
    first, second = on_two_ranks(trained_on_ranks)
    assert first == second


def test_an_update_draws_the_same_after_a_resume(train):
    whole, _ = check_resume(train, ("forward", 5), whole=own("Langevin", lr=0.1))
    plain = train(whole=own("torch.optim.SGD", lr=0.1) | {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}})
    assert not torch.equal(*(read(run.last)["model"]["one.weight"] for run in (whole, plain)))


def test_what_comes_after_the_update_draws_as_before_it():
    def drawn() -> tuple[Any, ...]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    with seeded(0, 5):
        first = drawn()
    after = drawn()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    assert drawn() == after
    with seeded(0, 5):
        assert drawn() == first
    with seeded(0, 6):
        assert drawn() != first


def test_each_share_of_a_parameter_has_draws_of_its_own_and_replicas_of_it_have_the_same():
    def share(rank: int) -> int:
        parallel = FSDP2.__new__(FSDP2)
        vars(parallel).update(world=SimpleNamespace(rank=rank, size=4, group=object()), replicas=2)
        return parallel.share

    assert [share(rank) for rank in range(4)] == [0, 1, 0, 1]


class Saving(torch.optim.SGD):
    """Leaves settings out of its state_dict, as heavyball's do, and needs one of them."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.defaults.update(kind=Saving, scale=scale)
        for group in self.param_groups:
            group.update(kind=Saving, scale=scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("scale", 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(group["scale"])
        super().step()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        groups = [
            {key: value for key, value in group.items() if key not in ("kind", "scale")}
            for group in state["param_groups"]
        ]
        return {**state, "param_groups": groups}


class Counting(Saving):
    """Saves a setting at a place of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scales": [group["scale"] for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scales"})
        for group, scale in zip(self.param_groups, state_dict["scales"], strict=True):
            group["scale"] = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["scale"] *= 0.9


@pytest.mark.parametrize("name", ["Saving", "Counting"])
def test_an_optimizer_may_save_a_part_of_its_settings(name, train):
    check_resume(train, ("forward", 5), whole=own(name, lr=0.1, scale=0.5))


class Bare(torch.optim.SGD):
    """Saves its momenta only, in a layout of its own."""

    def _momenta(self) -> list[Any]:
        return [self.state[one] for group in self.param_groups for one in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": [dict(one) for one in self._momenta()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for own, saved in zip(self._momenta(), state_dict["momenta"], strict=True):
            own.update(saved)


@pytest.mark.parametrize("scheduler", [{"warmup_steps": 3}, {"_target_": STEP, "milestones": [0.25, 0.5]}], ids=str)
def test_an_optimizer_may_not_save_its_rate(scheduler, train):
    check_resume(train, ("forward", 6), whole=own("Bare", lr=0.1) | {"scheduler": {**CONSTANT, **scheduler}})


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD: it trains weights y, and evaluates x."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "train_mode": False, "k": 0})

    def _move(self, train_mode: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != train_mode else ():
                if self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train_mode

    def eval(self) -> None:
        self._move(False, 1 - 1 / self.defaults["momentum"])

    def train(self) -> None:
        self._move(True, 1 - self.defaults["momentum"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "Please insert .train() and .eval() calls on the optimizer"
            lr, momentum, share = group["lr"], group["momentum"], 1 / (group["k"] + 1)
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, share).add_(y.grad, alpha=lr * (momentum * (1 - share) - 1))
                z.sub_(y.grad, alpha=lr)


FREE = own("Averaging", lr=0.3) | {"model": {"_target_": f"{Net.__module__}.{Net.__name__}"}}


def test_weights_to_evaluate_are_validated_and_saved_beside_those_that_train(train):
    model, data = Net(), Numbers(5)
    optimizer = Averaging(model.parameters(), 0.3)
    optimizer.train()
    rates(model, optimizer)
    run = train(whole=FREE, decay_all=True)
    saved = read(run.last)
    assert all(torch.equal(saved["model"][name], value) for name, value in model.state_dict().items())
    optimizer.eval()
    evaluated = needed(saved)["model"]
    assert all(torch.equal(evaluated[name], value) for name, value in model.state_dict().items())
    loss = nn.functional.cross_entropy(model(data.x), data.y).item()
    assert run.metrics("val/loss")[-1] == (8, pytest.approx(loss))


def test_a_validation_or_a_save_changes_no_bit_of_the_training(train):
    few, many = train(whole=FREE), train(whole=FREE, validate_every_steps=1, checkpoint_every_steps=1)
    for part in ("model", "ema", "optimizer"):
        assert str(read(few.last)[part]) == str(read(many.last)[part])
    check_resume(train, ("forward", 5), whole=FREE)


def test_parameters_that_are_unfrozen_join_it(train):
    callbacks = {"thaw": {"_target_": "ddp_hydra.training.callbacks.Unfreeze", "after_epochs": 1}}
    run, _ = check_resume(train, ("forward", 7), whole=FREE, parts={"callbacks": callbacks}, freeze=["one.*"])
    assert all(group["train_mode"] for group in read(run.last)["optimizer"]["param_groups"])


def test_a_rate_of_an_average_of_ones_own_goes_before(train):
    saved = read(train(whole=FREE, ema_decay=0.9).last)
    assert saved["ema"]["steps"] == 8


class Finding(torch.optim.Optimizer):
    """Finds its rate itself, as the Adafactor of transformers."""

    def __init__(self, params: Any, lr: float | None = None, steps: int = 0) -> None:
        super().__init__(params, {"lr": lr, "steps": steps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=1 / (10 + group["steps"]) if group["lr"] is None else group["lr"])


class WithoutRate(Finding):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        del self.defaults["lr"]
        for group in self.param_groups:
            del group["lr"]

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("name", ["Finding", "WithoutRate"])
def test_an_optimizer_without_a_rate_finds_it_itself(name, train):
    run, _ = check_resume(train, ("forward", 5), whole=own(name))
    assert not run.metrics("lr")
    assert not [line for line in run.header if line.startswith("rate")]


@pytest.mark.parametrize(
    "scheduler",
    [
        {"_target_": "ddp_hydra.training.lr_schedules.cosine"},
        {**CONSTANT, "warmup_steps": 2},
        {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2},
    ],
)
def test_a_schedule_of_no_rate_is_refused(scheduler, train):
    with pytest.raises(ConfigError, match=r"Finding has none \(optimizer.lr=null\): give scheduler=none"):
        train(whole=own("Finding") | {"scheduler": scheduler})


def test_a_rule_for_no_rate_is_refused(train):
    whole = own("Finding")
    whole["optimizer"] |= {"lr_rule": "linear", "lr_reference_batch": 4}
    with pytest.raises(ConfigError, match=r"lr_rule=linear multiplies optimizer.lr, and there is none"):
        train(whole=whole)


@pytest.mark.parametrize(("before", "after"), [(None, 0.1), (0.1, None)])
def test_a_rate_may_come_and_go_with_a_resume(before, after, train):
    stopped = train(stop_at=("update", 1), whole=own("Finding", lr=before))
    resumed = train(resume=stopped.last, whole=own("Finding", lr=after))
    assert [group["lr"] for group in read(resumed.last)["optimizer"]["param_groups"]] == [after]
    assert bool(resumed.metrics("lr")) == (after is not None)


class SecondOrder(torch.optim.SGD):
    """Needs the graph of the gradients, as Adahessian."""

    def step(self, closure: Any = None) -> None:
        parameter = self.param_groups[0]["params"][0]
        torch.autograd.grad(parameter.grad.sum(), parameter)


def test_an_optimizer_that_needs_second_derivatives_is_told(train):
    said = r"optimizer: the step\(\) of SecondOrder needs gradients of loss.backward\(create_graph=True\)"
    with pytest.raises(ConfigError, match=said):
        train(whole=own("SecondOrder", lr=0.1))


class Sharp(torch.optim.SGD):
    """Computes the loss again, as SAM."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


def test_an_optimizer_that_needs_a_closure_is_told(train):
    with pytest.raises(ConfigError, match=r"optimizer: the step\(\) of Sharp needs a closure, and gets none"):
        train(whole=own("Sharp", lr=0.1))


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer without settings of its own, as schedulefree's does."""

    def __init__(self, params: Any, lr: float) -> None:
        self.base = torch.optim.SGD(params, lr=lr, momentum=0.9)

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class Halving(torch.optim.SGD):
    """Adapts its rate itself."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.5


def test_an_optimizer_may_adapt_its_rate(train):
    model = Net()
    taken = rates(model, Halving(model.parameters(), lr=0.1))
    options = own("Halving", lr=0.1) | {"model": {"_target_": "tests.ddp_hydra.training.plain_torch.Net"}}
    whole, stopped = check_resume(train, ("forward", 5), whole=options, log_every_steps=1)
    assert [rate for _, rate in whole.metrics("lr")] == taken
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in read(whole.last)["model"].items())
    again = options | {"optimizer": {**options["optimizer"], "lr": 0.8}}
    resumed = train(resume=stopped.last, whole=again, log_every_steps=1)
    assert resumed.metrics("lr")[0] == (6, 0.8)


def test_a_schedule_sets_the_rate_of_an_optimizer_that_adapts_it(train):
    warm = own("Halving", lr=0.1) | {"scheduler": {**CONSTANT, "warmup_steps": 3}}
    found = [rate for _, rate in train(whole=warm, log_every_steps=1).metrics("lr")]
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.05, 0.025, 0.0125, 0.00625])


class Remembers(torch.optim.SGD):
    """Keeps an object for each parameter, once it has made some steps."""

    def __init__(self, params: Any, lr: float, after: int = 1) -> None:
        super().__init__(params, lr)
        self.left = after

    def step(self, closure: Any = None) -> None:
        super().step()
        self.left -= 1
        for parameter in self.param_groups[0]["params"] if not self.left else ():
            self.state[parameter]["memory"] = object()


def test_a_state_that_can_not_be_saved_is_refused_after_the_first_step(train):
    runs: list[Run] = []
    with pytest.raises(CheckpointError, match=r"^optimizer: .*memory is a builtins\.object, which a checkpoint can't"):
        train(whole=own("Remembers", lr=0.1), into=runs, log_every_steps=1)
    assert runs[0].metrics("train/loss") == []


def test_a_state_that_an_optimizer_makes_later_is_checked_then(train):
    runs: list[Run] = []
    with pytest.raises(CheckpointError, match=r"^optimizer: .*memory is a builtins\.object, which a checkpoint can't"):
        train(whole=own("Remembers", lr=0.1, after=3), into=runs, log_every_steps=1)
    assert [step for step, _ in runs[0].metrics("train/loss")] == [1, 2]


def test_an_optimizer_may_wrap_another_one(train):
    check_resume(train, ("forward", 5), whole=own("Wrapper", lr=0.1))
