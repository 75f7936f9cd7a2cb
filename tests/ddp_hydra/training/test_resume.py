"""A run that is resumed ends as if it had never been stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import CheckpointError
from ddp_hydra.training.callbacks import Callback
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import BY_LOSS, STEPS, Run, check_resume, flat


def test_a_finished_run_that_is_resumed_has_nothing_to_do(train):
    run = train()
    again = train(resume=run.last)
    assert (again.value["steps"], again.value["samples"], again.value["interrupted"]) == (8, 16, "")
    assert [record.kind for record in again.records] == ["start"]


def test_a_finished_run_goes_on_when_it_is_given_more_epochs(train):
    again = train(resume=train().last, epochs=3)
    assert (again.value["steps"], again.steps_saved) == (12, [12])
    assert [step for step, _ in again.metrics("train/loss")] == [9, 12]


class Drawing(Distributed):
    """Draws its order from a global generator."""

    def order(self, epoch):
        return np.random.permutation(self.n_samples)


@pytest.mark.medium
def test_a_resume_amid_an_epoch_goes_on_in_an_order_that_a_sampler_of_ones_own_has_drawn(train):
    check_resume(train, stop_at=("update", 6), parts={"sampler": {"_target_": f"{__name__}.Drawing"}})


def changed(run: Run) -> list[str]:
    return [line.removeprefix("changed   ") for line in run.header if line.startswith("changed")]


@pytest.mark.medium
def test_a_resume_whose_steps_have_other_samples_says_so(train):
    first = train(stop_at=("forward", 4))
    larger = train(resume=first.last, parts={"data": {"batch_size": 4}})
    assert "batch     4 x 1 rank = 4 effective; 2 when the run began" in larger.header
    assert "batch     2 x 1 rank = 2 effective" in train(resume=first.last).header


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


def optimized(name: str, **options: Any) -> dict[str, Any]:
    constant = {"_target_": "ddp_hydra.training.lr_schedules.constant"}
    return {"scheduler": constant, "optimizer": {"_target_": f"torch.optim.{name}", **options}}


@pytest.mark.medium
@pytest.mark.parametrize(("before", "after", "decay"), [("AdamW", "Adam", 0.5), ("Adam", "AdamW", 0.01)])
def test_another_optimizer_has_the_settings_of_a_fresh_one(before, after, decay, train):
    first = train(whole=optimized(before), stop_at=("forward", 4))
    other = optimized(after, weight_decay=decay)
    assert groups(train(whole=other, resume=first.last)) == groups(train(whole=other))


class Quick(torch.optim.Adam):
    """An optimizer whose own rate is another than Adam's."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr)


@pytest.mark.medium
def test_another_optimizer_has_its_own_rate_if_none_is_given(train):
    first = train(whole=optimized("Adam"), stop_at=("forward", 4))
    other = optimized("Adam")
    other["optimizer"]["_target_"] = f"{__name__}.Quick"
    assert groups(train(whole=other, resume=first.last)) == groups(train(whole=other))


@pytest.mark.medium
@pytest.mark.parametrize(("before", "after"), [("Adam", "NAdam"), ("SGD", "RMSprop")])
def test_an_optimizer_that_needs_what_another_has_not_kept_is_refused(before, after, train):
    first = train(whole=optimized(before), stop_at=("forward", 4))
    with pytest.raises(CheckpointError, match="the checkpoint does not fit this optimizer"):
        train(whole=optimized(after), resume=first.last)


@pytest.mark.medium
def test_the_rate_that_goes_with_the_batch_follows_it_at_a_resume(train):
    rule = {"optimizer": {"lr_rule": "linear", "lr_reference_batch": 8}}
    parts = {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.constant"}} | rule
    first = train(stop_at=("forward", 4), parts=parts)
    parts["data"] = {"batch_size": 4}
    assert {rate for _, rate in train(resume=first.last, parts=parts).metrics("lr")} == {0.1 * 4 / 8}


def test_a_start_says_the_best_value_before_it(train):
    run = train(parts=BY_LOSS)
    again = train(resume=run.last, parts=BY_LOSS)
    (best,) = [record.data.checkpoint for record in run.saved if record.data.checkpoint.best][-1:]
    assert [one.records[0].data.best for one in (run, again)] == [{}, {"train/loss": best.metrics["train/loss"]}]


@pytest.mark.medium
def test_another_objective_forgets_the_best_of_the_one_before(train):
    first = train(stop_at=("forward", 5), parts={"objective": {"metric": "val/accuracy"}})
    parts = {"objective": {"metric": "val/loss", "direction": "maximize"}}  # it rises
    again = train(resume=first.last, parts=parts)
    assert [record.data.checkpoint.best for record in again.saved] == [True]
    assert read(again.last)["best"] == again.metrics("val/loss")[-1][1]


def test_a_plateau_goes_by_the_new_objective(train):
    plateau = {"scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0}}
    plateau["data"] = {"batch_size": 2, "val": {}}
    first = train(whole=plateau, parts={"objective": {"metric": "val/loss", "direction": "minimize"}}, epochs=3)
    again = train(whole=plateau, resume=first.last, epochs=4)
    schedule = read(again.last)["scheduler"]
    assert (schedule["mode"], schedule["best"]) == ("max", again.metrics("val/accuracy")[-1][1])
    assert schedule["num_bad_epochs"] == 0


def test_a_resume_has_the_value_of_a_key_that_a_list_refers_to(train):
    first, again = optimized("Adam", betas=["${share}", 0.9]), optimized("Adam", betas=["${share}", 0.9])
    begun = train(whole={**first, "share": 0.5}, stop_at=("forward", 4))
    assert groups(train(whole={**again, "share": 0.8}, resume=begun.last))["betas"] == (0.8, 0.9)


ADAM, SGD = ({"_target_": f"torch.optim.{name}", "lr": 0.01} for name in ("Adam", "SGD"))
CYCLIC = {
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
}


@pytest.mark.parametrize("name", CYCLIC)
@pytest.mark.parametrize("value", ["${share}", "${oc.decode:${oc.env:SHARE}}"])
def test_a_schedule_goes_on_to_cycle_what_an_interpolation_gives(train, name, value, monkeypatch):
    monkeypatch.setenv("SHARE", "0.9")
    schedule = {"_target_": f"torch.optim.lr_scheduler.{name}", **CYCLIC[name]}
    for optimizer in (ADAM | {"betas": [value, 0.99]}, SGD | {"momentum": value}):
        check_resume(train, ("update", 5), whole={"share": 0.9, "optimizer": optimizer, "scheduler": schedule})


def test_a_resume_has_the_second_of_the_betas_whose_first_is_cycled(train):
    schedule = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", **CYCLIC["OneCycleLR"]}
    whole = {"optimizer": ADAM | {"betas": [0.9, "${share}"]}, "scheduler": schedule}
    stopped = train(stop_at=("update", 5), whole={**whole, "share": 0.99})
    run = train(resume=stopped.last, whole={**whole, "share": 0.5})
    there, here = (groups(one)["betas"] for one in (train(whole={**whole, "share": 0.99}), run))
    assert here == (there[0], 0.5)


class Marked(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that makes something else of its argument, and counts what no replay counts."""

    def __init__(self, optimizer: Any, marks: Any) -> None:
        self.highest, self.seen = max(marks), 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate / (1 + self.seen) for rate in self.base_lrs]


class Sees(Callback):
    changes_training = True

    def on_validation(self, run: Any) -> None:
        run._run.state.scheduler.seen += 1


@pytest.mark.parametrize("first", [1, "${one}", "${ones[a]}", "${ones.${which}}"])
def test_a_list_with_an_interpolation_that_gives_the_same_changes_nothing(train, first):
    here = __name__
    seen = {"sees": {"_target_": f"{here}.Sees"}}
    marked = {"_target_": f"{here}.Marked", "marks": [first, 2]}
    keys = {"one": 1, "ones": {"a": 1}, "which": "a"}
    whole, _ = check_resume(train, ("update", 6), whole={**keys, "scheduler": marked, "callbacks": seen})
    assert read(whole.last)["scheduler"]["seen"] == 2


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "task"])
def test_a_group_may_be_another_node(train, name):
    node = {**optimized("SGD", lr=0.1), "task": {"_target_": "ddp_hydra.tasks.Classification", "metric": "accuracy"}}
    check_resume(train, whole={name: "${mine}", "mine": node[name]})


@pytest.mark.parametrize("node", ["${opts.${which}}", "${opts[b]}", "${oc.create:${opts.b}}"])
def test_a_resume_has_the_settings_of_the_node_that_a_group_refers_to(train, node):
    options = {"a": SGD | {"weight_decay": 0.1}, "b": SGD | {"weight_decay": 0.1}}
    whole = {"optimizer": node, "which": "a", "opts": options}
    stopped = train(whole=whole, stop_at=("update", 4))
    changed = {**options, "b": SGD | {"weight_decay": 0.5}}
    again = train(whole={**whole, "which": "b", "opts": changed}, resume=stopped.last)
    assert groups(again)["weight_decay"] == 0.5


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
    best = runs[-1].saved[-1].data.checkpoint.best
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


class Padded:
    """Texts: one of the second batch has padding, and the later batches have one token only, whose scores stay 0."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = (torch.arange(6) + index) % 3
        ids = labels if index < 4 else torch.full((6,), 3)
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": (torch.arange(6) < (4 if index == 3 else 6)).long(),
        }


class LeavesOutPadding(nn.Module):
    """Computes its own loss, of tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(4, 3, padding_idx=3)
        nn.init.normal_(self.scores.weight[:3].detach(), generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        scores = self.scores(input_ids)
        counted = labels.where(attention_mask == 1, -100)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), counted.flatten()), "logits": scores}


@pytest.mark.parametrize("policy", ["abort", "skip"])
def test_what_the_batches_have_told_of_a_loss_is_kept_where_the_first_batch_of_a_resume_tells_nothing(
    train, capsys, policy
):
    whole = {
        **BY_LOSS,
        "model": {"_target_": f"{__name__}.LeavesOutPadding"},
        "task": {"_target_": "ddp_hydra.tasks.ModelLoss", "metric": "loss"},
        "sampler": {"_target_": "ddp_hydra.data.samplers.Distributed", "seed": 0, "shuffle": False},
    }
    run, _ = check_resume(train, whole=whole, data=Padded, val=0, on_nonfinite=policy)
    assert flat(read(run.last)["task"]) == {"own": {"rules": ["masked all"]}, "parts": {}}
    assert "ModelLoss" not in capsys.readouterr().err
