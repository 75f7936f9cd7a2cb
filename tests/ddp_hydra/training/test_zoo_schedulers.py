"""Every schedule of torch: the rates of each step are plain torch's, and those of a run that was resumed, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import check_resume
from tests.ddp_hydra.training.plain_torch import Net, rates

NET = {"_target_": f"{Net.__module__}.Net"}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
STEPS = {"log_every_steps": 1, "decay_all": True}
VAL_LOSS = {"metric": "val/loss", "direction": "minimize"}


def fall(step: int) -> float:
    """Return the factor of a step."""
    return 1 / (1 + step)


def no_schedule(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer.param_groups)


def method(name: str) -> dict[str, str]:
    return {"_target_": "hydra.utils.get_method", "path": f"{__name__}.{name}"}


def node(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.lr_scheduler.{name}", **options}


SIMPLE: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 3},
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2, "mode": "triangular2"},
    "ExponentialLR": {"gamma": 0.7},
    "LambdaLR": {},
    "LinearLR": {"start_factor": 0.25, "total_iters": 4},
    "MultiStepLR": {"milestones": [2, 2, 5], "gamma": 0.5},
    "MultiplicativeLR": {},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 8},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
    "StepLR": {"step_size": 3},
}
Make = Callable[[torch.optim.Optimizer], Any]
TABLE: dict[str, tuple[dict[str, Any], Make]] = {
    **{
        name: (
            node(name, **options),
            lambda optimizer, name=name, options=options: getattr(lr_scheduler, name)(optimizer, **options),
        )
        for name, options in SIMPLE.items()
    },
    "LambdaLR": (
        node("LambdaLR", lr_lambda=method("fall")),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, fall),
    ),
    "MultiplicativeLR": (
        node("MultiplicativeLR", lr_lambda=method("fall")),
        lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, fall),
    ),
    "OneCycleLR, told the length": (
        node("OneCycleLR", max_lr=0.3),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8),
    ),
    "CyclicLR, a function": (
        node("CyclicLR", base_lr=0.01, max_lr=0.2, step_size_up=2, scale_fn=method("fall"), cycle_momentum=False),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, 2, scale_fn=fall, cycle_momentum=False),
    ),
    "SequentialLR": (
        node(
            "SequentialLR",
            schedulers=[node("LinearLR", start_factor=0.2, total_iters=3), node("CosineAnnealingLR", T_max=5)],
            milestones=[3],
        ),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
            [3],
        ),
    ),
    "ChainedScheduler": (
        node("ChainedScheduler", schedulers=[node("ConstantLR", total_iters=2), node("ExponentialLR", gamma=0.8)]),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.8)], optimizer
        ),
    ),
    "ChainedScheduler of a SequentialLR": (
        node(
            "ChainedScheduler",
            schedulers=[
                node("SequentialLR", schedulers=[node("ConstantLR"), node("StepLR", step_size=1)], milestones=[3]),
                node("ExponentialLR", gamma=0.5),
            ],
        ),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.SequentialLR(
                    optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)], [3]
                ),
                lr_scheduler.ExponentialLR(optimizer, 0.5),
            ],
            optimizer,
        ),
    ),
}


def trained(make: Make, **options: Any) -> tuple[list[float], Net]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return rates(model, optimizer, make(optimizer), **options), model


def test_the_table_has_all_of_torch():
    theirs = {
        name
        for name, one in vars(lr_scheduler).items()
        if isinstance(one, type) and issubclass(one, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert theirs - {"LRScheduler", "ReduceLROnPlateau"} == {name for name in TABLE if hasattr(lr_scheduler, name)}


@pytest.mark.medium
@pytest.mark.parametrize("name", TABLE)
def test_each_step_has_the_rate_of_plain_torch_and_so_has_a_resumed_run(name, train):
    written, make = TABLE[name]
    parts = {"model": NET, "optimizer": SGD, "scheduler": written}
    expected, model = trained(make)
    run, _ = check_resume(train, ("forward", 5), whole=parts, **STEPS)
    assert [rate for _, rate in run.metrics("lr")] == expected
    for key, value in model.state_dict().items():
        assert torch.equal(read(run.last)["model"][key], value)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (VAL_LOSS, {"patience": 0, "threshold": 0.5, "factor": 0.5}),
        ({"metric": "val/accuracy", "direction": "maximize"}, {"patience": 0, "factor": 0.1, "cooldown": 1}),
        ({"metric": "val/accuracy", "direction": "maximize"}, {"patience": 1, "mode": "min", "min_lr": 0.05}),
    ],
    ids=["loss", "accuracy", "a mode of its own"],
)
def test_a_plateau_goes_by_the_objective_after_each_validation(objective, options, train):
    parts = {"model": NET, "optimizer": SGD, "objective": objective}
    parts["scheduler"] = node("ReduceLROnPlateau", **options)
    run, _ = check_resume(train, ("forward", 13), whole=parts, epochs=5, **STEPS)
    values = dict(run.metrics(objective["metric"]))
    mode = options.get("mode", {"minimize": "min", "maximize": "max"}[objective["direction"]])
    expected, _ = trained(
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, **{**options, "mode": mode}),
        epochs=5,
        judge=lambda epoch: values[4 * epoch],
    )
    assert expected[-1] < expected[0]
    assert [rate for _, rate in run.metrics("lr")] == expected


@pytest.mark.medium
@pytest.mark.parametrize("stop_at", [("forward", 5), None], ids=["amid it", "at its end"])
def test_one_cycle_of_a_run_that_is_made_longer_is_that_of_the_longer_run(stop_at, train):
    parts = {"model": NET, "optimizer": SGD, "scheduler": node("OneCycleLR", max_lr=0.3)}
    first = train(whole=parts, stop_at=stop_at, **STEPS)
    longer = train(whole=parts, resume=first.last, epochs=3, **STEPS)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = rates(model, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12), epochs=3)
    assert [rate for _, rate in longer.metrics("lr")] == pytest.approx(expected[first.value["steps"] :], rel=1e-12)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("written", "match"),
    [
        (
            node(
                "SequentialLR",
                schedulers=[node("ConstantLR"), node("ReduceLROnPlateau")],
                milestones=[2],
            ),
            "ReduceLROnPlateau",
        ),
        (node("SequentialLR", schedulers=[node("ConstantLR")], milestones=[2]), "milestones"),
        (node("StepLR"), "step_size"),
        (node("StepLR", step_size=2, gama=0.1), "gama"),
        ({"_target_": f"{__name__}.no_schedule"}, "returned a int: return a schedule"),
    ],
    ids=["a plateau within", "too few milestones", "an argument is missing", "misspelt", "no schedule"],
)
def test_what_can_not_be_stepped_is_refused(written, match, train):
    parts = {"model": NET, "optimizer": SGD, "scheduler": written}
    with pytest.raises(ConfigError, match=match):
        train(whole=parts, **STEPS)


class Warm:
    """A user's schedule that holds two others."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.done = optimizer, 0
        self.after = lr_scheduler.CosineAnnealingLR(optimizer, 6)
        self.parts = {"first": lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)}

    def step(self) -> None:
        self.done += 1
        (self.parts["first"] if self.done <= 3 else self.after).step()

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "first": self.parts["first"].state_dict(), "after": self.after.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.parts["first"].load_state_dict(state["first"])
        self.after.load_state_dict(state["after"])


LINEAR = node("LinearLR", start_factor=0.2, total_iters=6)


@pytest.mark.medium
@pytest.mark.parametrize(
    "written",
    [
        *(pytest.param(written, id=name) for name, (written, _) in TABLE.items()),
        *(
            pytest.param(node("SequentialLR", schedulers=[LINEAR, after], milestones=[6]), id=f"then {name}")
            for name, (after, _) in TABLE.items()
            if name in SIMPLE.keys() - {"OneCycleLR", "CyclicLR"}
        ),
        pytest.param(
            node("ChainedScheduler", schedulers=[node("LambdaLR", lr_lambda=method("fall")), node("ConstantLR")]),
            id="LambdaLR and ConstantLR",
        ),
        pytest.param(
            node(
                "SequentialLR",
                schedulers=[
                    node("SequentialLR", schedulers=[LINEAR, node("ConstantLR", factor=0.5)], milestones=[3]),
                    node("ExponentialLR", gamma=0.5),
                ],
                milestones=[6],
            ),
            id="one in another",
            marks=pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # as of torch alone
        ),
        pytest.param({"_target_": f"{__name__}.Warm"}, id="a user's"),
    ],
)
def test_a_run_that_is_resumed_with_another_rate_has_the_rates_of_a_fresh_one(written, train):
    whole = {"model": NET, "optimizer": SGD, "scheduler": written}
    first = train(whole=whole, stop_at=("forward", 5), **STEPS)
    other = {**whole, "optimizer": {**SGD, "lr": 0.4}}
    fresh, again = train(whole=other, **STEPS), train(whole=other, resume=first.last, **STEPS)
    assert again.metrics("lr") == [point for point in fresh.metrics("lr") if point[0] > first.value["steps"]]
    groups = [read(run.last)["optimizer"]["param_groups"] for run in (again, fresh)]
    assert groups[0] == groups[1]


class Own(lr_scheduler.LRScheduler):
    """A user's schedule, which makes another number of its argument."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int) -> None:
        self.total, self.falling = total, total - 1
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        done = min(self.last_epoch, self.total)
        return [rate * (1 - max(0, done - 1) / self.falling) for rate in self.base_lrs]


OTHER_ARGUMENTS = {
    "ConstantLR": {"total_iters": 7},
    "CosineAnnealingLR": {"T_max": 8},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"max_lr": 0.4},
    "LinearLR": {"total_iters": 8},
    "OneCycleLR": {"max_lr": 0.2},
    "PolynomialLR": {"total_iters": 8},
}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((node(name, **SIMPLE[name]), node(name, **SIMPLE[name] | other)) for name, other in OTHER_ARGUMENTS.items()),
        ({"_target_": f"{__name__}.Own", "total": 4}, {"_target_": f"{__name__}.Own", "total": 8}),
        (TABLE["SequentialLR"][0], {**TABLE["SequentialLR"][0], "milestones": [2]}),
        (
            node("ChainedScheduler", schedulers=[LINEAR, node("StepLR", step_size=2)]),
            node("ChainedScheduler", schedulers=[{**LINEAR, "total_iters": 3}, node("StepLR", step_size=2)]),
        ),
    ],
    ids=[*OTHER_ARGUMENTS, "a user's", "SequentialLR", "ChainedScheduler"],
)
def test_a_schedule_of_torch_with_another_argument_is_that_of_a_fresh_run_after_a_resume(before, after, train):
    whole = {"model": NET, "optimizer": SGD}
    first = train(whole={**whole, "scheduler": before}, stop_at=("forward", 5), **STEPS)
    parts = {**whole, "scheduler": after}
    fresh, again = train(whole=parts, **STEPS), train(whole=parts, resume=first.last, **STEPS)
    assert again.metrics("lr") == fresh.metrics("lr")[first.value["steps"] :]
    assert first.metrics("lr") != fresh.metrics("lr")[: first.value["steps"]]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "PolynomialLR"])
def test_a_schedule_whose_argument_reads_the_length_is_that_of_the_longer_run(name, train):
    argument = {"CosineAnnealingLR": "T_max", "PolynomialLR": "total_iters"}[name]
    whole = {"model": NET, "optimizer": SGD, "scheduler": node(name, **{argument: "${trainer.max_steps}"})}
    given = {"whole": whole, "epochs": None, **STEPS}
    first = train(max_steps=6, **given)
    fresh, longer = train(max_steps=12, **given), train(max_steps=12, resume=first.last, **given)
    assert longer.metrics("lr") == fresh.metrics("lr")[6:]
    assert longer.metrics("lr")[0][1] > 0.04


@pytest.mark.medium
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize(
    ("optimizer", "key"),
    [(SGD, "momentum"), ({"_target_": "torch.optim.AdamW", "lr": 0.1, "betas": [0.9, 0.99]}, "betas")],
    ids=["momentum", "betas"],
)
def test_after_a_schedule_that_cycles_the_momentum_another_one_has_the_configs(name, optimizer, key, train):
    whole = {"model": NET, "optimizer": optimizer, "scheduler": TABLE[name][0]}
    first = train(whole=whole, stop_at=("forward", 3), **STEPS)
    other = {**whole, "scheduler": node("StepLR", step_size=3)}
    fresh, again = train(whole=other, **STEPS), train(whole=other, resume=first.last, **STEPS)
    cycled, right, found = (read(run.last)["optimizer"]["param_groups"][0][key] for run in (first, fresh, again))
    assert cycled != right
    assert found == right
    assert again.metrics("lr") == fresh.metrics("lr")[first.value["steps"] :]


@pytest.mark.medium
def test_a_rate_that_a_plateau_has_reduced_stays_where_the_optimizers_own_rate_does(train):
    plateau = node("ReduceLROnPlateau", patience=0, threshold=0.9)
    rule = {**SGD, "lr_rule": "linear", "lr_reference_batch": 4}
    for before, after in (
        (rule, rule),
        ({"_target_": "torch.optim.AdamW", "lr": 0.1}, {"_target_": "torch.optim.Adam", "lr": 0.1}),
    ):
        whole = {"model": NET, "scheduler": plateau, "objective": VAL_LOSS}
        first = train(whole={**whole, "optimizer": before}, epochs=3, **STEPS)
        again = train(whole={**whole, "optimizer": after}, epochs=4, resume=first.last, **STEPS)
        reduced, found = (read(run.last)["optimizer"]["param_groups"][0] for run in (first, again))
        assert reduced["lr"] < reduced["initial_lr"] == found["initial_lr"]
        assert again.metrics("lr")[0][1] == reduced["lr"]
        other = train(whole={**whole, "optimizer": {**after, "lr": 0.2}}, epochs=4, resume=first.last, **STEPS)
        assert other.metrics("lr")[0][1] == pytest.approx(2 * reduced["lr"])


@pytest.mark.medium
def test_a_rate_that_is_a_tensor_is_reduced_and_typed_as_a_number_is(train):
    plateau = node("ReduceLROnPlateau", patience=0, threshold=0.9)
    whole = {"model": NET, "scheduler": plateau, "objective": VAL_LOSS}
    found = []
    for make in (lambda rate: rate, lambda rate: {"_target_": "torch.tensor", "data": rate}):
        runs = [train(whole={**whole, "optimizer": {**SGD, "lr": make(0.1)}}, epochs=3, log_every_steps=1)]
        for rate in (0.1, 0.2):
            changed = {**whole, "optimizer": {**SGD, "lr": make(rate)}}
            runs.append(train(whole=changed, epochs=4, resume=runs[0].last, log_every_steps=1))
        found.append([rate for run in runs for _, rate in run.metrics("lr")])
    assert found[1] == pytest.approx(found[0])


@pytest.mark.medium
def test_a_rate_that_is_a_tensor_of_an_integer_falls_as_a_number_does(train):
    whole = {"model": NET, "scheduler": {"_target_": "ddp_hydra.training.lr_schedules.cosine"}}
    one = {"_target_": "torch.tensor", "data": 1}
    runs = [train(whole={**whole, "optimizer": {**SGD, "lr": lr}}, log_every_steps=1) for lr in (1, one)]
    wanted, found = ([rate for _, rate in run.metrics("lr")] for run in runs)
    assert found == pytest.approx(wanted)
    assert 0 < found[-1] < 1


@pytest.mark.medium
def test_schedules_of_several_updates_with_other_arguments_are_those_of_a_fresh_run(train):
    whole = {
        "model": NET,
        "optimizer": SGD,
        "parallel": {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"},
        "task": {"_target_": f"{__name__}.Apart"},
        "objective": {"metric": "train/one/loss", "direction": "minimize"},
    }
    fall, rise = node("PolynomialLR", total_iters=4), node("LinearLR", total_iters=6)
    first = train(whole={**whole, "scheduler": {"one": fall, "two": rise}}, val=0, stop_at=("forward", 5), **STEPS)
    other = {**whole, "scheduler": {"one": {**fall, "total_iters": 8}, "two": rise}}
    fresh, again = train(whole=other, val=0, **STEPS), train(whole=other, val=0, resume=first.last, **STEPS)
    for name in ("one/lr", "two/lr"):
        assert again.metrics(name) == fresh.metrics(name)[first.value["steps"] :]


class Apart(Task):
    """Trains the layers of the net apart."""

    def updates(self, step):
        return ("one", "two")

    def step(self, model, batch, update):
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.medium
def test_a_plateau_keeps_its_rate_where_the_schedule_of_another_part_begins_anew(train):
    plateau = node("ReduceLROnPlateau", patience=0, threshold=0.9)
    whole = {
        "model": NET,
        "optimizer": SGD,
        "parallel": {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"},
        "task": {"_target_": f"{__name__}.Apart"},
        "objective": {"metric": "train/one/loss", "direction": "minimize"},
        "scheduler": {"one": plateau, "two": node("OneCycleLR", max_lr=0.3)},
    }
    first = train(whole=whole, val=0, epochs=3, **STEPS)
    longer = train(whole=whole, val=0, epochs=4, resume=first.last, **STEPS)
    before, after = (read(run.last)["optimizer"] for run in (first, longer))
    assert before["one"]["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.1**2)
    assert after["one"]["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.1**3)
