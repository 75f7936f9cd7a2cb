"""A loss that computes otherwise in evaluation, and whose training changes its buffers: as in a loop by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import CheckpointError
from ddp_hydra.rank.world import ALONE, World, in_world
from ddp_hydra.tasks import Classification
from ddp_hydra.training import builders, cost, inference
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.loop import first_step
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.parallel.fsdp2 import FSDP2
from ddp_hydra.training.parallel.parameter_groups import evaluation_mode
from tests.ddp_hydra.training.loop_runs import Numbers, check_resume, config, flat
from tests.ddp_hydra.training.plain_torch import CONSTANT, begin_alike


class Net(nn.Linear):
    """Its first weights are always the same."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        begin_alike(self)


class Counts(nn.Module):
    """Weighs classes by the numbers of their samples in training, and knows how often it was called there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("counts", torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3, affine=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.counts += torch.bincount(target, minlength=3)
            self.mean = 0.9 * self.mean + 0.1 * prediction.detach().mean(0)
        return F.cross_entropy(self.norm(prediction) - self.mean, target, self.counts.sum() / self.counts)


class Prior(Counts):
    """The same with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(prediction * self.scale, target)


class Keeps(nn.Module):
    """Scales the outputs in training alone."""

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction * (0.5 if self.training else 1.0), target)


class Unsaved(Counts):
    """The same, of which checkpoints have nothing."""

    made: list[Unsaved]

    def __init__(self) -> None:
        super().__init__()
        self._non_persistent_buffers_set = {"counts", "mean"}
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.made.append(self)

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state


class Unloadable(nn.Module):
    """Weighs classes by their numbers, which it has after the first batch."""

    counts: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", None)

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.counts is None:
            self.counts = torch.ones(prediction.shape[-1])
        if self.training:
            self.counts += torch.bincount(target, minlength=3)
        return F.cross_entropy(prediction, target, self.counts.sum() / self.counts)


class Late(Unloadable):
    """The same as torch wants it: it takes the buffer from a state."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}counts" in state:
            self.counts = state[f"{prefix}counts"].clone()
        super()._load_from_state_dict(state, prefix, *rest)


KINDS = (Counts, Prior, Keeps, Late)


def parts_of(kind: type[nn.Module]) -> dict[str, Any]:
    return {
        "model": {"_target_": f"{__name__}.Net"},
        "loss": {"_target_": f"{__name__}.{kind.__name__}"},
        "scheduler": CONSTANT,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    }


def by_hand(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module, list[float]]:
    model, loss, data, val, sampler = Net(), kind(), Numbers(9), Numbers(2), Distributed(9, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    found = []
    for epoch in range(2):
        loss.train()
        for indices in sampler.batches(epoch):
            optimizer.zero_grad()
            loss(model(data.x[list(indices)]), data.y[list(indices)]).backward()
            optimizer.step()
        loss.eval()
        with torch.no_grad():
            found.append(float(loss(model(val.x), val.y)))
    return model, loss, found


F1 = {"f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3}}
"""Metrics are tried before the first step."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("metrics", "options"),
    [({}, {}), (F1, {"validate_first": True}), ({}, {"profile_steps": 2}), ({}, {"validate_every_steps": 2})],
    ids=["plain", "tried", "profiled", "amid the epoch"],
)
def test_it_is_validated_in_evaluation_mode_and_trains_on_in_its_own(train, kind, metrics, options):
    model, loss, found = by_hand(kind)
    run = train(whole={**parts_of(kind), "metrics": metrics}, val=2, **options)
    saved = read(run.last)
    assert flat(saved["model"]) == flat(model.state_dict())
    assert flat(saved.get("loss") or {}) == flat(loss.state_dict())
    assert [value for step, value in run.metrics("val/loss") if step in (4, 8)] == pytest.approx(found, rel=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_the_uninterrupted_one(train, kind):
    check_resume(train, ("update", 3), whole=parts_of(kind))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_left_out_does_not_count_in_buffers(train, policy):
    run = train(whole=parts_of(Counts), fault=["nan,step=2"], on_nonfinite=policy)
    assert read(run.last)["loss"]["counts"].sum() == 3 + 2 * 7


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_nor_in_what_a_loss_keeps_outside_of_buffers(train, policy):
    run = train(whole=parts_of(Counts), fault=["nan,step=2"], on_nonfinite=policy)
    assert read(run.last)["loss"]["_extra_state"] == {"calls": 7}


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_nor_in_a_buffer_that_the_step_has_made(train, policy):
    run = train(whole=parts_of(Late), fault=["nan,step=1"], on_nonfinite=policy)
    assert read(run.last)["loss"]["counts"].sum() == 3 + 2 * 7


def test_a_buffer_that_the_loss_does_not_take_is_named(train):
    stopped = train(whole=parts_of(Unloadable), stop_at=("update", 3))
    said = (
        r"^Unloadable does not take its state of the checkpoint: it has the buffer counts of shape \(3,\), "
        r"which is None where it is built.*let its class's _load_from_state_dict make it$"
    )
    with pytest.raises(CheckpointError, match=said):
        train(whole=parts_of(Unloadable), resume=stopped.last)


def test_a_loss_without_a_state_is_in_no_checkpoint(train):
    assert read(train().last).keys().isdisjoint(("loss", "task"))


def test_nor_in_buffers_that_no_checkpoint_has(train, monkeypatch):
    monkeypatch.setattr(Unsaved, "made", [], raising=False)
    run = train(whole=parts_of(Unsaved), fault=["nan,step=2"], on_nonfinite="skip")
    assert not read(run.last).get("loss")
    assert Unsaved.made[-1].counts.sum() == 3 + 2 * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_evaluated_as_in_its_run(train, kind, tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = {"batch_size": 2, "val": {"_target_": "tests.ddp_hydra.training.loop_runs.Numbers", "n": 5}}
    run = train(whole={**parts_of(kind), "data": data})
    job = {"faults": [], "overrides": [], "groups": [], "split": "val", "trust": True}
    with inference.opened(job, str(run.last), ALONE) as opened:
        cfg, task, trained = opened.trained.cfg, opened.task, opened.trained
        assert not task.criterion.training  # type: ignore[attr-defined]
        evaluation = builders.evaluation(cfg, opened.data, task, trained.device, trained.parallel)
        assert evaluation.run(trained.model, lambda: 0)["val/loss"] == run.metrics("val/loss")[-1][1]


def test_a_dry_run_predicts_in_evaluation_mode(group, monkeypatch):
    modes = []

    def predict(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
        modes.append((model.training, self.criterion.training))
        found: torch.Tensor = model(batch[0])
        return found

    monkeypatch.setattr(Classification, "predict", predict)
    parts = {"cluster": {"n_workers": 1}, "dispatch": {"ranks": None}}
    first_step(OmegaConf.merge({**config(), **parts_of(Counts)}, parts), Numbers(9), Numbers(5))
    assert modes == [(False, False)]


class Moving(Counts):
    """Changes a buffer in evaluation, too."""

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + prediction.detach().mean(0)
        return super().forward(prediction, target)


@pytest.mark.parametrize("kind", [Counts, Moving])
def test_a_pass_for_the_size_of_activations_changes_nothing(kind):
    loss = kind()
    cfg = OmegaConf.create({"trainer": {"precision": "fp32", "activation_checkpointing": []}})
    batch = torch.zeros(4, 4, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
    before = {name: (one, one.clone()) for name, one in loss.named_buffers()}
    cost.forward_pass(nn.Linear(4, 3, device="meta"), Classification(loss), "", batch, cfg)
    assert (loss.calls, loss.training) == (0, True)
    for name, buffer in loss.named_buffers():
        assert buffer is before[name][0]
        assert buffer.equal(before[name][1])


class Merging(nn.Module):
    """Does more than torch where its mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.merged, self.inner = False, nn.Dropout()

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        super().train(mode)
        return self


def test_modules_are_in_the_modes_again_that_they_had():
    one, teacher = Merging(), nn.Sequential(nn.Dropout(), nn.Dropout()).eval()
    one.inner.eval()
    teacher[1].train()
    with evaluation_mode([one, teacher]):
        assert one.merged
        assert not any(part.training for module in (one, teacher) for part in module.modules())
    assert (one.merged, one.training, one.inner.training) == (False, True, False)
    assert (teacher.training, teacher[0].training, teacher[1].training) == (False, False, True)


class Two(Classification):
    """Trains two parts of the model, one after the other."""

    def updates(self, step):
        return ("one", "two")

    def step(self, model, batch, update=""):
        return super().step(getattr(model, update), batch)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)


def steps(world: World, parallel: Any, task: Classification, names: tuple[str, ...]) -> list[Any]:
    cfg, seen = config(), []
    parts = [parallel.build_part(cfg.trainer, task, name) for name in names]
    for number in range(3):
        for part in parts:
            x, y = torch.arange(8.0).reshape(2, 4).sin() + world.rank, torch.tensor([(world.rank + number) % 3, 0])
            part((x, y)).loss.backward()
        seen.append({name: one.clone() for name, one in task.criterion.named_buffers()})  # type: ignore[attr-defined]
    return seen


@in_world
def trained(world: World) -> list[Any]:
    found = []
    for kind in (DDP, FSDP2):
        torch.manual_seed(0)
        parallel = kind(world)
        parallel.build(config().trainer, Net, torch.device("cpu"))
        found.append(steps(world, parallel, Classification(Counts()), ("",)))
    torch.manual_seed(0)
    found.append(steps(world, DDP(world).adopt(Parts()), Two(Counts()), ("one", "two")))
    return found


@pytest.mark.integration
def test_ranks_take_the_buffers_of_rank_0_as_those_of_a_model(on_two_ranks):
    first, second = on_two_ranks(trained)
    for own, other, updates in zip(first, second, (1, 1, 2), strict=True):
        for number in range(1, 3):
            # Of rank 1: what rank 0 had counted, and its own samples since.
            since = torch.bincount(torch.tensor([(1 + number) % 3, 0]), minlength=3)
            before = own[number]["counts"] - torch.bincount(torch.tensor([number % 3, 0]), minlength=3)
            assert other[number]["counts"].equal(before + since), updates
    assert flat(first[0]) == flat(first[1])
