"""The loop's way through steps, epochs, checkpoints and interrupts, on one rank in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from ddp_hydra import heartbeat, results
from ddp_hydra.config.schema import TrainerConfig
from ddp_hydra.data.samplers import Distributed
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.errors import CheckpointError, ConfigError, NonFiniteLoss
from ddp_hydra.rank import fault_injection
from ddp_hydra.results import Record
from ddp_hydra.training import setup
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import fit, summarise
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.run import seed_step
from ddp_hydra.training.step_check import StepCheck

STEPS = 4
"""In an epoch: 9 samples, 2 in a step, one left over."""


class Numbers:
    """Samples of three classes."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
        self.y = torch.arange(n) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def config(**trainer: Any) -> Any:
    given = {"epochs": 2, "log_every_steps": 3, "device": "cpu", **trainer}
    return OmegaConf.create(
        {
            "seed": 0,
            "data": {"batch_size": 2},
            "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
            "sampler": {"_target_": "ddp_hydra.data.samplers.Distributed", "seed": 0},
            "task": {"_target_": "ddp_hydra.tasks.Classification", "metric": "accuracy"},
            "loss": {"_target_": "ddp_hydra.tasks.losses.CrossEntropy"},
            "mix": {},
            "metrics": {},
            "callbacks": {},
            "parallel": {"_target_": "ddp_hydra.training.parallel.ddp"},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
            "scheduler": {"_target_": "ddp_hydra.training.lr_schedules.cosine"},
            "trainer": OmegaConf.to_container(OmegaConf.structured(TrainerConfig(**given)), enum_to_str=True),
            "objective": {"metric": "val/accuracy", "direction": "maximize"},
        }
    )


class Run:
    """One run of the loop, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []
        self.value: dict[str, Any] = {}

    @property
    def saved(self) -> list[Record]:
        return [record for record in self.records if record.kind == "file"]

    @property
    def steps_saved(self) -> list[int]:
        return [record.step for record in self.saved]

    @property
    def last(self) -> Path:
        return Path(self.saved[-1].data["source"])

    def metrics(self, name: str) -> list[tuple[int, float]]:
        logged = [record for record in self.records if record.kind == "metrics"]
        return [(record.step, record.data["metrics"][name]) for record in logged if name in record.data["metrics"]]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    results.connect(None)
    fault_injection.install(0, 0, {})
    heartbeat.connect(None)


@pytest.fixture
def train(group, tmp_path):
    """Run the loop; `stop_at` is the place where it is asked to finish."""
    runs = 0

    def run(
        resume=None, stop_at=None, fault=(), val=5, parts=None, start=None, data=Numbers, into=None, **trainer: Any
    ) -> Run:
        nonlocal runs
        runs += 1
        made = Run(tmp_path / str(runs))
        if into is not None:  # also of a run that fails
            into.append(made)
        made.folder.mkdir()
        heartbeat.connect(None)
        shared_status = heartbeat.here()
        if stop_at is not None:
            heartbeat.on_phase(lambda *place: shared_status.ask_to_finish(1) if place == stop_at else None)
        results.connect(DirectSender(made.records.append, made.folder))
        fault_injection.install(0, 0, {})
        armed = fault_injection.activate(fault)
        cfg = OmegaConf.merge(config(**trainer), parts or {})
        stop_signal = StopSignal(cfg.trainer.time_limit_s)
        given = {**({"resume": resume} if resume else {}), **({"weights": start} if start else {})}
        run = setup.build(cfg, data(9), data(val) if val else None, given, armed, stop_signal)
        fit(run)
        made.value = summarise(run)
        return made

    return run


def same(one: Path, other: Path) -> bool:
    return flat(read(one)) == flat(read(other))


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items() if key != "config"}
    return [flat(part) for part in value] if isinstance(value, (list, tuple)) else value


# -- from end to end ---------------------------------------------------------------------------------------


def test_a_run_of_two_epochs_logs_validates_and_saves(train):
    run = train()
    assert (run.value["steps"], run.value["samples"], run.value["interrupted"]) == (8, 16, "")
    assert [step for step, _ in run.metrics("train/loss")] == [3, 4, 6, 8]
    assert [step for step, _ in run.metrics("val/loss")] == [4, 8]
    epochs = {record.step: record.data["epoch"] for record in run.records if record.kind == "metrics"}
    assert epochs == {3: 1, 4: 1, 6: 2, 8: 2}
    assert run.steps_saved == [4, 8]
    assert run.value["metrics"].keys() >= {"train/loss", "val/accuracy", "lr"}
    content = read(run.last)
    assert content["position"] == {"step": 8, "epoch": 2, "samples": 16, "offset": 0}
    assert content["validation_due"] is False


@pytest.mark.parametrize("epochs", [None, 99])
def test_a_run_may_end_in_the_middle_of_an_epoch(epochs, train):
    run = train(epochs=epochs, max_steps=6)
    assert (run.value["steps"], run.steps_saved) == (6, [4, 6])
    assert [step for step, _ in run.metrics("val/loss")] == [4, 6]
    assert read(run.last)["position"] == {"step": 6, "epoch": 1, "samples": 12, "offset": 4}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("by_steps", "by_epochs", "saved"),
    [(0, 0, [12]), (0, 2, [8, 12]), (3, 0, [3, 6, 9, 12]), (4, 0, [4, 8, 12]), (2, 1, [2, 4, 6, 8, 10, 12])],
)
def test_checkpoints_come_when_they_are_due_also_at_the_end_of_an_epoch(by_steps, by_epochs, saved, train):
    run = train(epochs=3, checkpoint_every_steps=by_steps, checkpoint_every_epochs=by_epochs)
    assert run.steps_saved == saved


def bests(run: Run) -> list[tuple[int, bool]]:
    return [(record.step, record.data["checkpoint"]["best"]) for record in run.saved]


RISING = {"objective": {"metric": "val/loss", "direction": "maximize"}}
"""An objective that gets better with each validation of so small a set."""


def test_only_a_checkpoint_whose_weights_were_just_validated_can_be_the_best(train):
    run = train(epochs=6, validate_every_epochs=2, checkpoint_every_epochs=3, parts=RISING)
    assert bests(run) == [(12, False), (24, True)]
    assert read(run.last)["best"] == dict(run.metrics("val/loss"))[24]


def test_a_rollback_remembers_the_best_value_of_its_checkpoint(train):
    falling = {"objective": {"metric": "val/loss", "direction": "minimize"}}  # so the first stays the best
    run = train(epochs=3, fault=["nan,step=6"], on_nonfinite="rollback", parts=falling)
    assert bests(run) == [(4, True), (8, False), (12, False)]
    assert read(run.last)["best"] == dict(run.metrics("val/loss"))[4]


def test_without_validation_data_a_run_trains_and_saves(train):
    run = train(val=0, parts=BY_LOSS)
    assert (run.steps_saved, run.metrics("val/loss")) == ([4, 8], [])


BY_LOSS = {"objective": {"metric": "train/loss", "direction": "minimize"}}


@pytest.mark.parametrize(("metric", "val"), [("val/acc", 5), ("train/acc", 0)])
def test_an_unknown_objective_is_said_at_the_first_validation_and_nothing_is_lost(metric, val, train):
    options = {"val": val, "checkpoint_every_epochs": 0, "early_stopping_patience": 9}
    found = []
    said = rf"objective.metric={metric}: .*there are train/accuracy, train/loss.*The run is saved.*={metric}uracy"
    with pytest.raises(ConfigError, match=said):
        train(parts={"objective": {"metric": metric}}, into=found, **options)
    assert found[0].steps_saved == [STEPS]
    again = train(resume=found[0].last, parts={"objective": {"metric": f"{metric}uracy"}}, **options)
    assert [step for step, _ in again.metrics("val/loss")] == ([4, 8] if val else [])
    assert again.value["steps"] == 2 * STEPS


class Line(Numbers):
    """What is to be learnt is a number."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.y = self.x.sum(1, keepdim=True) / 9


def test_a_regression_has_no_accuracy_and_its_best_is_that_of_the_least_loss(train):
    parts = {
        "model": {"out_features": 1}, "loss": {"_target_": "torch.nn.MSELoss"},
        "objective": {"metric": "val/loss", "direction": "minimize"},
    }  # fmt: skip
    run = train(data=Line, parts=parts, epochs=4, early_stopping_patience=2)
    assert not [name for name in run.value["metrics"] if "accuracy" in name]
    losses = [loss for _, loss in run.metrics("val/loss")]
    assert losses == sorted(losses, reverse=True)
    assert [record.data["checkpoint"]["best"] for record in run.saved] == [True] * 4


# -- resumed -----------------------------------------------------------------------------------------------


def test_a_finished_run_that_is_resumed_has_nothing_to_do(train):
    run = train()
    again = train(resume=run.last)
    assert (again.value["steps"], again.value["samples"], again.value["interrupted"]) == (8, 16, "")
    assert [record.kind for record in again.records] == ["start"]


def test_a_finished_run_goes_on_when_it_is_given_more_epochs(train):
    again = train(resume=train().last, epochs=3)
    assert (again.value["steps"], again.steps_saved) == (12, [12])
    assert [step for step, _ in again.metrics("train/loss")] == [9, 12]


def changed(run: Run) -> list[str]:
    return [line.removeprefix("changed   ") for line in run.records[0].data["lines"] if line.startswith("changed")]


def groups(run: Run) -> dict[str, Any]:
    return read(run.last)["optimizer"]["param_groups"][0]


@pytest.mark.medium
def test_what_is_typed_at_a_resume_wins_and_the_header_lists_it(train):
    options = {"log_every_steps": 1}
    never = train(**options)
    first = train(stop_at=("forward", 4), **options)
    assert changed(train(resume=first.last, **options)) == []
    parts = {"optimizer": {"lr": 0.05, "weight_decay": 0.3}, "scheduler": {"min_factor": 0.5}}
    again = train(resume=first.last, clip_norm=7.0, parts=parts, **options)
    assert changed(again) == [
        "optimizer.lr 0.1 -> 0.05, trainer.clip_norm null -> 7.0, optimizer.weight_decay (missing) -> 0.3, "
        "scheduler.min_factor (missing) -> 0.5"
    ]
    rates = dict(never.metrics("lr"))
    assert again.metrics("lr") == [(step, pytest.approx(0.025 + rates[step] / 4)) for step in (5, 6, 7, 8)]
    assert (groups(again)["weight_decay"], groups(again)["momentum"]) == (0.3, 0.9)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("first", "then", "rates"),
    [
        # torch's own: half, each two steps; then a tenth
        (
            {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5},
            {"gamma": 0.1},
            [0.025, 0.025, 0.0025, 0.0025],
        ),
        (
            {"_target_": "ddp_hydra.training.lr_schedules.constant"},
            {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5},
            [0.025, 0.025, 0.0125, 0.0125],
        ),
        (
            {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5},
            {"_target_": "ddp_hydra.training.lr_schedules.linear"},
            [0.05, 0.0375, 0.025, 0.0125],
        ),
    ],
    ids=["torch's key", "torch's instead", "ours instead"],
)
def test_a_schedule_may_be_another_one_after_a_resume(first, then, rates, train):
    before = train(stop_at=("forward", 4), log_every_steps=1, parts={"scheduler": first})
    parts = {"scheduler": then if "_target_" in then else {**first, **then}}
    again = train(resume=before.last, log_every_steps=1, parts=parts)
    assert again.metrics("lr") == [(step, pytest.approx(rate)) for step, rate in zip((5, 6, 7, 8), rates, strict=True)]


@pytest.mark.medium
def test_the_rate_that_goes_with_the_batch_follows_it_at_a_resume(train):
    options = {"base_batch_size": 8, "parts": {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.constant"}}}
    first = train(stop_at=("forward", 4), **options)
    options["parts"]["data"] = {"batch_size": 4}
    assert {rate for _, rate in train(resume=first.last, **options).metrics("lr")} == {0.1 * 4 / 8}


@pytest.mark.medium
def test_another_objective_forgets_the_best_of_the_one_before(train):
    first = train(stop_at=("forward", 5), parts={"objective": {"metric": "val/accuracy"}})
    parts = {"objective": {"metric": "val/loss", "direction": "maximize"}}  # it rises
    again = train(resume=first.last, parts=parts)
    assert [record.data["checkpoint"]["best"] for record in again.saved] == [True]
    assert read(again.last)["best"] == again.metrics("val/loss")[-1][1]


PLACES = [
    (phase, step)
    for step in (1, STEPS, 2 * STEPS)
    for phase in ("forward", "update", "validate", "save")
    if phase not in ("validate", "save") or step % STEPS == 0
]


def end_of(*runs: Run) -> dict[str, Any]:
    """All that tells one end from another; of a run and what it was resumed as."""
    validations = {
        name: dict(point for run in runs for point in run.metrics(name)) for name in ("val/loss", "val/accuracy")
    }
    best = runs[-1].saved[-1].data["checkpoint"]["best"]
    return {"state": flat(read(runs[-1].last)), "best": best, **validations}


@pytest.mark.medium
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} {place[1]}")
def test_a_run_that_is_stopped_anywhere_and_resumed_ends_as_if_it_never_had(place, train):
    runs = [train(stop_at=place)]
    if place != ("save", 2 * STEPS):  # there it is over before it can look
        assert runs[0].value["interrupted"] == "interrupt"
        assert runs[0].steps_saved[-1] == runs[0].value["steps"]
        runs.append(train(resume=runs[0].last))
    assert runs[-1].value["interrupted"] == ""
    if not NEVER_STOPPED:
        NEVER_STOPPED.update(end_of(train()))
    assert end_of(*runs) == NEVER_STOPPED


NEVER_STOPPED: dict[str, Any] = {}


@pytest.mark.medium
def test_a_validation_that_was_stopped_is_not_logged_and_comes_first_when_resumed(train):
    stopped = train(stop_at=("validate", 4))
    assert (stopped.metrics("val/loss"), stopped.steps_saved) == ([], [4])
    assert read(stopped.last)["validation_due"] is True
    resumed = train(resume=stopped.last)
    assert [record.kind for record in resumed.records][:2] == ["start", "metrics"]
    assert [step for step, _ in resumed.metrics("val/loss")] == [4, 8]


def test_a_run_whose_time_is_up_makes_one_step_and_saves_it(train):
    run = train(time_limit_s=0.0)
    assert (run.value["steps"], run.steps_saved, run.value["interrupted"]) == (1, [1], "time_limit")


# -- pauses ------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("val", [5, 0], ids=["validated", "no validation set"])
@pytest.mark.parametrize("settings", [{}, {"checkpoint_every_epochs": 0}, {"ema_decay": 0.9}, {"epochs": 3}], ids=str)
def test_a_run_pauses_after_a_validation_with_one_checkpoint_and_goes_on_to_the_same_end(settings, val, train):
    given = {"val": val, **settings} | ({} if val else {"parts": {"objective": {"metric": "train/loss"}}})
    whole = train(**given)
    paused = train(pause_after_validations=1, **given)
    assert (paused.value["interrupted"], paused.value["steps"], paused.steps_saved) == ("pause", STEPS, [STEPS])
    assert [step for step, _ in paused.metrics("val/loss")] == ([STEPS] if val else [])
    resumed = train(resume=paused.last, **given)
    assert resumed.value["interrupted"] == ""
    ends = [flat(read(run.last)) | {"best": None} for run in (resumed, whole)]  # the best of those that were saved
    assert ends[0] == ends[1]
    assert paused.metrics("lr") + resumed.metrics("lr") == whole.metrics("lr")
    assert "changed" not in str(resumed.records[0].data["lines"])


@pytest.mark.medium
def test_validations_are_counted_over_the_whole_run(train):
    first = train(epochs=5, pause_after_validations=1)
    second = train(epochs=5, pause_after_validations=3, resume=first.last)
    assert (second.value["interrupted"], second.steps_saved) == ("pause", [2 * STEPS, 3 * STEPS])
    assert read(second.last)["validations"] == 3
    again = train(epochs=5, pause_after_validations=3, resume=second.last)
    assert (again.value["interrupted"], again.value["steps"], again.steps_saved) == ("pause", 3 * STEPS, [])
    assert same(train(epochs=5, resume=second.last).last, train(epochs=5).last)


def test_a_validation_that_was_stopped_does_not_count_for_a_pause(train):
    stopped = train(stop_at=("validate", STEPS), pause_after_validations=1)
    assert (stopped.value["interrupted"], read(stopped.last)["validations"]) == ("interrupt", 0)
    resumed = train(resume=stopped.last, pause_after_validations=1)
    assert (resumed.value["interrupted"], resumed.value["steps"], resumed.steps_saved) == ("pause", STEPS, [STEPS])


@pytest.mark.parametrize(
    "more", [{"epochs": 2}, {"epochs": 9, "early_stopping_patience": 1, "early_stopping_min_delta": 9}]
)
def test_a_run_that_is_at_its_end_does_not_pause(more, train):
    run = train(pause_after_validations=2, **more)
    assert (run.value["interrupted"], run.value["steps"]) == ("", 2 * STEPS)


# -- losses that are not numbers ---------------------------------------------------------------------------


def test_a_step_with_a_bad_loss_ends_the_run_by_default(train):
    with pytest.raises(NonFiniteLoss, match="the loss is nan in step 6; samples of this rank: "):
        train(fault=["nan,step=6"])


def test_a_step_with_a_bad_loss_may_be_left_out(train):
    run = train(fault=["nan,step=6"], on_nonfinite="skip")
    assert (run.value["steps"], run.steps_saved) == (8, [4, 8])
    assert all(value == value for _, value in run.metrics("train/loss"))


@pytest.mark.medium
@pytest.mark.parametrize(("step", "every"), [(1, 3), (4, 0), (4, 3), (6, 3)])
def test_a_rollback_comes_to_the_same_end_as_leaving_the_step_out(step, every, train):
    fault, log = [f"nan,step={step}"], {"log_every_steps": 1}
    skipped = train(fault=fault, on_nonfinite="skip", checkpoint_every_steps=every, **log)
    rolled = train(fault=fault, on_nonfinite="rollback", checkpoint_every_steps=every, **log)
    assert same(rolled.last, skipped.last)
    assert (rolled.value["steps"], rolled.value["samples"]) == (8, 16)
    assert rolled.metrics("val/loss") == skipped.metrics("val/loss")
    assert dict(rolled.metrics("train/loss")) == dict(skipped.metrics("train/loss"))
    assert min(speed for _, speed in rolled.metrics("samples_per_s")) >= 0


def test_what_was_counted_before_a_rollback_is_not_counted_twice(train):
    options = {"log_every_steps": 4, "checkpoint_every_epochs": 0}
    skipped = train(fault=["nan,step=3"], on_nonfinite="skip", **options)
    rolled = train(fault=["nan,step=3"], on_nonfinite="rollback", **options)
    assert rolled.metrics("train/loss") == skipped.metrics("train/loss")
    assert all(speed > 0 for _, speed in rolled.metrics("samples_per_s"))


def test_a_rollback_may_go_back_into_the_epoch_before(train):
    options = {"epochs": 3, "checkpoint_every_epochs": 0, "checkpoint_every_steps": 3}
    run = train(fault=["nan,step=6"], on_nonfinite="rollback", **options)
    assert run.value["steps"] == 12
    assert [step for step, _ in run.metrics("val/loss")] == [4, 4, 8, 12]


def test_too_many_bad_steps_end_the_run(train):
    with pytest.raises(NonFiniteLoss, match="in step 3, and 2 such steps were allowed"):
        train(fault=["nan"], on_nonfinite="skip", max_nonfinite=2)


class Spoilt(torch.nn.Linear):
    """Has a loss that is finite, and in step 6 gradients that are not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training and heartbeat.here().step == 6:
            y.register_hook(lambda gradient: gradient * float("nan"))
        return y


SPOILT = {"model": {"_target_": f"{__name__}.Spoilt"}}


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def as_on_a_gpu(request, monkeypatch) -> None:
    """Look at gradients at once, and when the next loss is looked at."""
    late = request.param
    monkeypatch.setattr("ddp_hydra.training.build_updates.StepCheck", lambda *parts: StepCheck(*parts[:2], late=late))


def test_a_step_with_a_bad_gradient_ends_the_run_by_default(as_on_a_gpu, train):
    samples = ", ".join(map(str, list(Distributed(9, 2).batches(1))[1]))
    said = rf"the gradient of weight, bias is not finite in step 6, although the loss is \d.*; samples .*: {samples}\. "
    with pytest.raises(NonFiniteLoss, match=said):
        train(parts=SPOILT, log_every_steps=100)


@pytest.mark.medium
@pytest.mark.parametrize("every", [0, 5])
def test_a_step_with_a_bad_gradient_may_be_rolled_back_from(every, as_on_a_gpu, train):
    options = {"parts": SPOILT, "checkpoint_every_steps": every, "ema_decay": 0.9, "log_every_steps": 100}
    rolled = train(on_nonfinite="rollback", **options)
    assert weights(rolled).isfinite().all()
    assert same(rolled.last, train(fault=["nan,step=6"], on_nonfinite="skip", **{**options, "parts": None}).last)


@pytest.mark.medium
def test_leaving_out_a_step_with_a_bad_gradient_is_as_with_a_bad_loss(train):
    spoilt, fault = train(on_nonfinite="skip", parts=SPOILT), train(on_nonfinite="skip", fault=["nan,step=6"])
    assert same(spoilt.last, fault.last)
    assert weights(spoilt).isfinite().all()


def test_weights_that_are_not_finite_are_never_saved(train, tmp_path):
    steep = {"optimizer": {"lr": 3e38, "momentum": 0, "weight_decay": 10.0}}
    with pytest.raises(NonFiniteLoss, match=r"the state after step 1 is not finite \(weight"):
        train(max_steps=1, parts=steep)
    assert list((tmp_path / "1").iterdir()) == []


# -- randomness --------------------------------------------------------------------------------------------


class Noisy(torch.nn.Linear):
    """Draws from the global generators of torch, numpy and Python, and remembers what."""

    drawn: ClassVar[list[tuple[float, ...]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return super().forward(x) + sum(self.drawn[-1])


@pytest.mark.medium
def test_a_resumed_run_draws_the_same_from_every_generator(train):
    loss = {"metric": "train/loss", "direction": "minimize"}
    parts = {"model": {"_target_": f"{__name__}.Noisy"}, "objective": loss}
    whole = [train(val=0, parts=parts), *Noisy.drawn]
    Noisy.drawn.clear()
    train(resume=train(val=0, parts=parts, stop_at=("update", 3)).last, val=0, parts=parts)
    assert whole[1:] == Noisy.drawn
    assert len({numbers for drawn in Noisy.drawn for numbers in drawn}) == 3 * 8


def test_ranks_draw_different_numbers():
    drawn = set()
    for step, rank in product(range(3), range(4)):
        seed_step(0, step, rank)
        drawn |= {torch.rand(()).item(), np.random.rand(), random.random()}
    assert len(drawn) == 3 * 4 * 3


# -- what a step may be made of ----------------------------------------------------------------------------


def weights(run: Run) -> torch.Tensor:
    return torch.cat([part.flatten() for part in read(run.last)["model"].values()])


@pytest.mark.parametrize("parts", [2, 3])
def test_a_step_of_several_parts_is_one_of_a_larger_batch(parts, train):
    whole = train(epochs=1, parts={"data": {"batch_size": 2 * parts}})
    cut = train(epochs=1, gradient_accumulation_steps=parts)
    assert torch.allclose(weights(cut), weights(whole), atol=1e-6)
    losses = [dict(run.metrics("train/loss")) for run in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert cut.value["samples"] == whole.value["samples"]


def test_a_bad_part_spoils_the_whole_step(train):
    run = train(
        fault=["nan,rank=0,step=2"], gradient_accumulation_steps=2, on_nonfinite="skip", log_every_steps=1, epochs=1
    )
    assert [step for step, _ in run.metrics("train/loss")] == [1]
    assert weights(run).isfinite().all()


OPTIONS = {
    "ema": {"ema_decay": 0.9},
    "clip": {"clip_norm": 0.05},
    "parts": {"gradient_accumulation_steps": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "clip_norm": 1.0},
    "fused": {"parts": {"optimizer": {"fused": True}}},
    "fused fp16": {"precision": "fp16", "parts": {"optimizer": {"fused": True}}},
    "one cycle": {"parts": {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.one_cycle"}}},
    "by epoch": {"parts": {"scheduler": {"by": "epoch", "warmup_epochs": 0.5}}},
    "linear": {"parts": {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.linear", "min_factor": 0.1}}},
    "step": {"parts": {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.step", "milestones": [0.25, 0.5]}}},
    "warm-up": {"parts": {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.constant", "warmup_steps": 5}}},
    "torch's one cycle": {"parts": {"scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.2}}},
    "all": {"ema_decay": 0.9, "clip_norm": 0.05, "gradient_accumulation_steps": 2, "precision": "bf16"},
    "groups": {"decay_all": False, "parts": {"optimizer": {"weight_decay": 0.1}}},
    "alone": {"parts": {"parallel": {"_target_": "ddp_hydra.training.parallel.none"}}},
    "smooth": {"parts": {"loss": {"label_smoothing": 0.1}}},
}


@pytest.mark.medium
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_whatever_a_step_is_made_of_a_resumed_run_ends_as_if_never_stopped(options, train):
    first = train(stop_at=("update", 1), **options)
    resumed = train(resume=first.last, **options)
    whole = train(**options)
    assert flat(read(resumed.last)) == flat(read(whole.last))
    assert resumed.metrics("val/loss") == whole.metrics("val/loss")
    assert weights(whole).tolist() != weights(train(epochs=1)).tolist()


def test_gradients_are_clipped_to_a_length_that_is_logged_as_it_was(train):
    free, clipped = (
        train(epochs=1, log_every_steps=1, clip_norm=1e9),
        train(epochs=1, log_every_steps=1, clip_norm=0.01),
    )
    assert all(norm > 0.05 for _, norm in free.metrics("grad_norm"))
    assert clipped.metrics("grad_norm")[0] == pytest.approx(free.metrics("grad_norm")[0])
    moved = [
        (read(run.last)["optimizer"]["state"][0]["momentum_buffer"] ** 2).sum().sqrt().item() for run in (free, clipped)
    ]
    assert moved[1] < 0.05 < moved[0]


def test_the_moving_average_is_what_is_validated_and_saved(train):
    plain, averaged = train(), train(ema_decay=0.99)
    assert weights(plain).tolist() == weights(averaged).tolist()  # training is the same
    assert plain.metrics("val/loss") != averaged.metrics("val/loss")
    ema = read(averaged.last)["ema"]
    assert ema["steps"] == 8
    assert ema["model"].keys() == read(averaged.last)["model"].keys()
    judged = Numbers(5)
    logits = judged.x @ ema["model"]["weight"].T + ema["model"]["bias"]
    by_hand = torch.nn.functional.cross_entropy(logits, judged.y).item()
    assert averaged.metrics("val/loss")[-1] == (8, pytest.approx(by_hand))


@pytest.mark.medium
def test_frozen_parameters_stay_as_they_were(train):
    start = train(max_steps=1, epochs=None, parts={"optimizer": {"lr": 1e-30}})
    run = train(freeze=["bias"])
    before, after = read(start.last)["model"], read(run.last)["model"]
    assert torch.equal(before["bias"], after["bias"])
    assert not torch.equal(before["weight"], after["weight"])


def converted(model: torch.nn.Module) -> Parallel:
    """What sync_batchnorm does, which is for GPUs; in evaluation these layers work here, too."""
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return Parallel(model, model)


class Normed(torch.nn.Sequential):
    """With a BatchNorm in front."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(torch.nn.BatchNorm1d(in_features), torch.nn.Linear(in_features, out_features))


def test_frozen_norms_stay_as_they_were_also_where_sync_batchnorm_puts_others_in_their_places(train):
    parts = {"model": {"_target_": f"{__name__}.Normed"}, "parallel": {"_target_": f"{__name__}.converted"}}
    content = read(train(freeze=["0.*"], epochs=1, parts=parts).last)["model"]
    assert (content["0.running_mean"].tolist(), content["0.num_batches_tracked"].item()) == ([0.0] * 4, 0)


def test_the_rate_grows_with_the_global_batch(train):
    run = train(
        epochs=1, base_batch_size=8, parts={"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.constant"}}
    )
    assert {rate for _, rate in run.metrics("lr")} == {0.1 * 2 / 8}


def test_the_rate_of_each_step_is_logged(train):
    parts = {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.linear", "warmup_steps": 3}}
    run = train(max_steps=6, log_every_steps=1, parts=parts)
    rates = [0.025, 0.05, 0.075, 0.1, 0.1 * 2 / 3, 0.1 / 3]
    assert run.metrics("lr") == [(step, pytest.approx(rate)) for step, rate in enumerate(rates, start=1)]


@pytest.mark.medium
def test_a_run_whose_validation_gets_no_better_ends_early_and_stays_ended(train):
    options = {"early_stopping_patience": 2, "early_stopping_min_delta": 5.0, "epochs": 9}
    run = train(**options)
    assert run.value["steps"] == 3 * STEPS  # the first is the best, and two more are no better
    assert run.steps_saved[-1] == 3 * STEPS
    assert train(resume=run.last, **options).value["steps"] == 3 * STEPS


def test_only_what_was_validated_counts(train):
    options = {"early_stopping_patience": 1, "early_stopping_min_delta": 5.0, "epochs": 9, "validate_every_epochs": 3}
    assert train(**options).value["steps"] == 6 * STEPS


def test_a_run_without_validation_goes_by_its_training(train):
    run = train(val=0, early_stopping_patience=1, early_stopping_min_delta=5.0, epochs=9, parts=BY_LOSS)
    assert run.value["steps"] == 2 * STEPS


def test_a_run_that_gets_better_goes_on(train):
    loss = {"objective": {"metric": "val/loss", "direction": "maximize"}}  # which such a small set does
    run = train(early_stopping_patience=1, epochs=3, parts=loss)
    values = [value for _, value in run.metrics("val/loss")]
    assert values == sorted(values)
    assert run.value["steps"] == 3 * STEPS


@pytest.mark.medium
def test_other_metrics_are_validated_too_and_matrices_are_pictures(train):
    pytest.importorskip("torchmetrics")
    metrics = {
        "f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3, "average": "macro"},
        "each": {"_target_": "torchmetrics.classification.MulticlassRecall", "num_classes": 3, "average": None},
        "confusion": {"_target_": "torchmetrics.classification.MulticlassConfusionMatrix", "num_classes": 3},
    }
    run = train(epochs=2, parts={"metrics": metrics})
    assert [step for step, _ in run.metrics("val/f1")] == [4, 8]
    assert [step for step, _ in run.metrics("val/each/2")] == [4, 8]
    images = [record for record in run.records if record.kind == "image"]
    assert [(record.step, record.data["name"]) for record in images] == [(4, "val/confusion"), (8, "val/confusion")]


def test_metrics_that_are_not_installed_are_named_with_what_to_type(train, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    metrics = {"f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3}}
    with pytest.raises(ConfigError, match=r"the metrics f1 need torchmetrics.*pip install 'ddp-hydra\[metrics\]'"):
        train(parts={"metrics": metrics})


@pytest.mark.integration
def test_a_compiled_model_trains_the_same(train):
    compiled = train(epochs=1, compile="default")
    assert torch.allclose(weights(compiled), weights(train(epochs=1)), atol=1e-5)
    assert read(compiled.last)["model"].keys() == {"weight", "bias"}


# -- what it says of itself --------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_profile_is_a_trace_and_a_table(train):
    import gzip
    import json

    run = train(epochs=5, profile_steps=4)
    files = {record.data["path"]: record for record in run.records if record.kind == "file"}
    with gzip.open(files["profile/rank-0.json.gz"].data["source"]) as trace:
        events = json.load(trace)["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert {name: spans.count(name) for name in ("forward", "backward", "update")} == {
        "forward": 4, "backward": 4, "update": 4
    }  # fmt: skip
    (table,) = [record.data["text"] for record in run.records if record.kind == "text"]
    for part in ("| waiting for data |", "| forward pass |", "| optimizer |", "GFLOP a sample", "| all |", "Memory:"):
        assert part in table
    assert "profile/table.md" in files
    assert weights(run).tolist() == weights(train(epochs=5)).tolist()  # looking changes nothing


@pytest.mark.medium
def test_one_batch_can_be_learnt_by_heart(train):
    run = train(epochs=30, overfit_batches=1, val=0, parts=BY_LOSS)
    losses = [loss for _, loss in run.metrics("train/loss")]
    assert losses[-1] < 0.05 < losses[0]


def test_a_run_tells_its_memory(train):
    assert train(epochs=1).value["peak_memory"] > 2**25


# -- weights to begin with ---------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_run_may_begin_with_the_weights_of_another_but_its_last_layer(train, tmp_path):
    start = train(epochs=3)
    same = train(epochs=1, start=start.last, parts={"optimizer": {"lr": 1e-30}})
    assert torch.allclose(weights(same), weights(start))
    assert "weights   from a file, all but none" in same.records[0].data["lines"]
    wider = train(
        epochs=1, start=start.last, parts={"model": {"_target_": "tests.ddp_hydra.training.test_loop.Deeper"}}
    )
    assert "weights   from a file, all but head.weight, head.bias" in wider.records[0].data["lines"]


class Deeper(torch.nn.Linear):
    """With one layer more."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state}], ids=["bare", "wrapped"])
def test_anybodys_weights_will_do(wrap, train, tmp_path):
    file = tmp_path / "weights.pth"
    values = {"module.weight": torch.ones(3, 4), "module.bias": torch.zeros(3)}
    torch.save(wrap(values), file)
    run = train(epochs=1, start=file, parts={"optimizer": {"lr": 1e-30}})
    assert torch.equal(read(run.last)["model"]["weight"], torch.ones(3, 4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(2)},
            r"weights for 0 of the 2 tensors.*begin with a, b, the model's with",
        ),
        ([1, 2], r"holds no weights"),
        (b"nothing", r"can't be read as weights"),
    ],
)
def test_what_are_no_weights_of_this_model_are_refused(content, said, train, tmp_path):
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=said):
        train(start=file)
