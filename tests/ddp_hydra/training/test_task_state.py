"""Tasks that keep something: a teacher that the steps move, a counter; resumed, rolled back and evaluated."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra.errors import CheckpointError, NonFiniteLoss
from ddp_hydra.rank.fault_injection import FaultInjector
from ddp_hydra.rank.world import ALONE, World, in_world
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training import builders, inference
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import fit
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.run import TrainingRun
from ddp_hydra.training.task_state import checksum, fingerprint
from tests.ddp_hydra.training.loop_runs import BY_LOSS, Numbers, check_resume, config, flat, same
from tests.ddp_hydra.training.plain_torch import CONSTANT


class Teaching(Task):
    """A teacher follows the model, as in BYOL, from some step on. It is written as in papers' code: through `.data`."""

    def __init__(self, begins_at: int = 1, width: int = 3) -> None:
        self.teacher, self.frozen = nn.Linear(4, width), nn.Linear(4, 3).requires_grad_(False)
        self.begins_at, self.step_of = begins_at, Steps()

    def step(self, model: Any, batch: Any) -> Step:
        x, y = batch
        with torch.no_grad():
            if model.training:
                self.step_of.n += 1
                for own, other in zip(self.teacher.parameters(), model.parameters(), strict=True):
                    own.data.lerp_(other, 0.1 * (self.step_of.n >= self.begins_at))
            goal = self.teacher(x) + self.frozen(x)
        out = model(x)
        return Step(F.cross_entropy(out, y) + F.mse_loss(out, goal), len(y))


class TeachingModule(Teaching, nn.Module):
    """Is a module itself."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)

    def step(self, model: Any, batch: Any) -> Step:
        assert self.training or not model.training
        self.norm(batch[0])
        return super().step(model, batch)


class ModuleTeaching(TeachingModule):
    """Has the state of a module."""

    state_dict, load_state_dict = nn.Module.state_dict, nn.Module.load_state_dict


class Steps:
    """Counts, and has a state."""

    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Counting(Task):
    """Weighs the loss by its own counter."""

    def __init__(self) -> None:
        self.n = 0

    def step(self, model: Any, batch: Any) -> Step:
        self.n += model.training
        return Step(F.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.1 * self.n), len(batch[1]))


class Kept(Counting):
    """Says what a resume needs."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def parts_of(task: type[Task], **options: Any) -> dict[str, Any]:
    return {**BY_LOSS, "task": {"_target_": f"{__name__}.{task.__name__}", "metric": "loss", **options}}


@pytest.mark.parametrize("task", [Teaching, Kept, TeachingModule, ModuleTeaching])
@pytest.mark.parametrize("step", [2, 6])
def test_a_resumed_run_ends_as_the_uninterrupted_one(train, task, step, capsys):
    check_resume(train, ("update", step), whole=parts_of(task))
    assert task.__name__ not in capsys.readouterr().err


def test_checkpoints_have_the_modules_that_have_changed(train):
    saved = read(train(whole=parts_of(Teaching)).last)["task"]
    assert saved["parts"]["teacher"].keys() == {"weight", "bias"}
    assert saved["parts"]["frozen"] is None
    parts = read(train(whole=parts_of(TeachingModule)).last)["task"]["parts"]
    assert parts["norm"]["num_batches_tracked"] == 8, "the module is evaluated in evaluation mode"
    assert parts["frozen"] is None
    assert flat(parts["teacher"]) == flat(saved["parts"]["teacher"])
    assert (saved["parts"]["step_of"], saved["own"]) == ({"n": 8}, None)
    assert "task" not in read(train().last)


class Moves(Task):
    """Counts its steps in all that a task can keep."""

    def __init__(self) -> None:
        self.n, self.steps, self.norm = 0, Steps(), nn.BatchNorm1d(4, affine=False)
        self.codes = nn.ParameterList([torch.zeros(3)]).requires_grad_(False)

    def step(self, model: Any, batch: Any) -> Step:
        x, y = batch
        if model.training:
            self.n += 1
            self.steps.n += 1
            self.codes[0].data.add_(x.mean() * 0 + 1)
            self.norm(x)
        return Step(F.cross_entropy(model(x), y), len(y))

    state_dict, load_state_dict = Steps.state_dict, Steps.load_state_dict


class WithNan(Numbers):
    """One sample is not finite."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x * torch.nan if index == 3 and len(self) == 9 else x), y


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_left_out_moves_nothing_of_the_task(train, policy):
    saved = read(train(whole=parts_of(Moves), data=WithNan, on_nonfinite=policy).last)
    left = 8 - len(saved["nonfinite"])
    assert saved["nonfinite"] == [1, 7]
    of_task = saved["task"]
    assert of_task["own"] == of_task["parts"]["steps"] == {"n": left}
    assert of_task["parts"]["codes"]["0"].tolist() == [left] * 3
    assert of_task["parts"]["norm"]["num_batches_tracked"] == left
    assert of_task["parts"]["norm"]["running_var"].isfinite().all()


class Seldom(Counting):
    """Has a state once there is something to keep."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n} if self.n else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state.get("n", 0)


def test_a_rollback_goes_back_to_a_state_that_was_empty(train):
    run = train(whole=parts_of(Seldom), fault=["nan,step=3"], on_nonfinite="rollback", epochs=1)
    assert read(run.last)["task"]["own"] == {"n": 3}


class Picky(Seldom):
    """Takes no empty state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


class PickySteps(Steps):
    """Takes no empty state, and has one before the first step."""

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n} if self.n else {}


class WithPicky(Counting):
    """Has a part that takes no empty state."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = PickySteps()

    def step(self, model: Any, batch: Any) -> Step:
        self.steps.n += model.training
        return super().step(model, batch)


@pytest.mark.parametrize(("policy", "bad"), [("skip", 1), ("rollback", 3), ("rollback", 1)])
@pytest.mark.parametrize(("task", "name"), [(Picky, "Picky"), (WithPicky, "WithPicky.steps")])
def test_a_state_that_can_not_be_empty_is_kept_and_its_owner_is_named_once(train, task, name, policy, bad, capsys):
    run = train(whole=parts_of(task), fault=[f"nan,step={bad}"], on_nonfinite=policy, epochs=1)
    assert capsys.readouterr().err.count(f"{name} keeps the state that it has") == 1
    assert run.value["steps"] == 4


def test_an_empty_state_of_a_checkpoint_is_not_given_to_a_resumed_task(train, tmp_path):
    stopped = train(whole=parts_of(Kept), stop_at=("update", 2), epochs=1)
    torch.save(read(stopped.last) | {"task": {"own": {}, "parts": {}}}, tmp_path / "before.pt")
    run = train(whole=parts_of(Kept), resume=tmp_path / "before.pt", epochs=1)
    assert read(run.last)["task"]["own"] == {"n": 4 - stopped.value["steps"]}


class OfInstance(Counting):
    """Has a state that no class defines."""

    def __init__(self) -> None:
        super().__init__()
        self.state_dict = lambda: {"n": self.n}


def test_a_state_that_the_instance_defines_is_saved(train):
    assert read(train(whole=parts_of(OfInstance), epochs=1).last)["task"]["own"] == {"n": 4}


class Late(nn.Module):
    """Makes its buffer in the first step."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "counts"):
            self.register_buffer("counts", torch.zeros(()))
        if self.training:
            self.counts += len(y) + 0 * x.detach().mean()
        return F.cross_entropy(x, y)


class WithLate(Task):
    """Has such a module of its own."""

    def __init__(self) -> None:
        self.late = Late()

    def step(self, model: Any, batch: Any) -> Step:
        return Step(self.late(model(batch[0]), batch[1]), len(batch[1]))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("place", ["task", "loss"])
def test_a_buffer_that_a_step_has_made_goes_with_the_step(train, policy, place):
    whole = parts_of(WithLate) if place == "task" else {"loss": {"_target_": f"{__name__}.Late"}}
    saved = read(train(whole={**BY_LOSS, **whole}, data=WithNan, on_nonfinite=policy).last)
    of_task = saved["task"]["parts"]["late"] if place == "task" else saved["loss"]
    assert saved["nonfinite"] == [1, 7]
    assert of_task["counts"] == 2 * (8 - 2)


class Centered(nn.Module):
    """Moves a center that no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center.add_(x.detach().mean() * 0 + 1)
        return F.cross_entropy(x - self.center, y)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_left_out_moves_no_center_of_a_loss(train, policy):
    whole = {**BY_LOSS, "loss": {"_target_": f"{__name__}.Centered"}}
    saved = read(train(whole=whole, data=WithNan, on_nonfinite=policy).last)
    assert saved["nonfinite"] == [1, 7]
    assert saved["loss"]["center"].tolist() == [8 - 2] * 3


class Versioned(nn.CrossEntropyLoss):
    """Saves what it does not take back."""

    def get_extra_state(self) -> int:
        return 1


def test_an_extra_state_that_no_method_takes_is_not_put_back(train):
    whole = {**BY_LOSS, "loss": {"_target_": f"{__name__}.Versioned"}}
    assert read(train(whole=whole, data=WithNan, on_nonfinite="skip").last)["nonfinite"] == [1, 7]
    model = nn.Sequential(Versioned())
    with weights.restored_state(model):
        pass


class Carrying(nn.Linear):
    """Carries something from batch to batch in an attribute, and has other weights while it is evaluated."""

    state: torch.Tensor | None = None
    is_merged = False

    def train(self, mode: bool = True) -> nn.Module:
        if self.is_merged == mode:
            self.is_merged = not mode
            self.weight.data.neg_()
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.state is None else x + self.state
        self.state = x.detach().mean()
        return super().forward(x)


def test_metrics_that_are_tried_leave_no_trace_in_attributes_of_the_model(train):
    whole = {"model": {"_target_": f"{__name__}.Carrying", "in_features": 4, "out_features": 3}}
    tried = {"metrics": {"other": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}}}
    without, with_trial = train(whole=whole), train(whole=whole | tried)
    assert flat(read(without.last)["model"]) == flat(read(with_trial.last)["model"])


class Odd(nn.Linear):
    """Has an extra state that no checkpoint holds."""

    def get_extra_state(self) -> Any:
        return Steps()

    def set_extra_state(self, state: Any) -> None: ...


class Counted(nn.Linear):
    """Counts its steps in a plain attribute."""

    n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += torch.is_grad_enabled()
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.n

    def set_extra_state(self, state: int) -> None:
        self.n = state


class Taught(Task):
    """Has two teachers."""

    def __init__(self) -> None:
        self.odd, self.counted = Odd(4, 3).requires_grad_(False), Counted(4, 3).requires_grad_(False)

    def step(self, model: Any, batch: Any) -> Any:
        goal = self.odd(batch[0]) + self.counted(batch[0])
        return F.mse_loss(model(batch[0]), goal)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_left_out_leaves_the_extra_states_of_teachers(train, policy):
    saved = read(train(whole=parts_of(Taught), data=WithNan, on_nonfinite=policy).last)
    assert saved["nonfinite"] == [1, 7]
    assert saved["task"]["parts"]["odd"] is None, "it has not changed"
    assert saved["task"]["parts"]["counted"]["_extra_state"] == 8 - 2


class Spoilt(Task):
    """Its teacher gets numbers that are not finite, though the losses are; masks are infinite on purpose."""

    def __init__(self, spoils: bool = True) -> None:
        self.spoils, self.teacher = spoils, nn.Linear(4, 3).requires_grad_(False)
        self.teacher.register_buffer("mask", torch.full((3,), -torch.inf))
        self.teacher.limit = nn.Parameter(torch.full((3,), torch.inf), requires_grad=False)

    def step(self, model: Any, batch: Any) -> Any:
        if model.training:
            self.teacher.bias.add_(torch.nan if self.spoils else 1)
        return F.cross_entropy(model(batch[0]), batch[1])


def test_no_checkpoint_holds_a_teacher_that_is_not_finite(train):
    with pytest.raises(NonFiniteLoss, match=r"not finite \(task\.teacher\.bias\), although"):
        train(whole=parts_of(Spoilt))
    assert read(train(whole=parts_of(Spoilt, spoils=False)).last)["task"]["parts"]["teacher"]["bias"].isfinite().all()


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("options", [{}, {"begins_at": 5}], ids=str)
def test_a_rollback_goes_back_to_the_teacher_of_its_checkpoint(train, every, options):
    given: dict[str, Any] = {"checkpoint_every_epochs": 0, "checkpoint_every_steps": every, "fault": ["nan,step=6"]}
    given |= {"whole": parts_of(Teaching, **options)}
    skipped, rolled = (train(on_nonfinite=way, **given) for way in ("skip", "rollback"))
    assert same(rolled.last, skipped.last)


def test_an_evaluation_has_the_teacher_of_the_checkpoint(train, tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = {"batch_size": 2, "val": {"_target_": "tests.ddp_hydra.training.loop_runs.Numbers", "n": 5}}
    run = train(whole={**parts_of(Teaching), "data": data})
    job = {"faults": [], "overrides": [], "groups": [], "split": "val", "trust": True}
    with inference.opened(job, str(run.last), ALONE) as opened:
        trained = opened.trained
        evaluation = builders.evaluation(trained.cfg, opened.data, opened.task, trained.device, trained.parallel)
        assert evaluation.run(trained.model, lambda: 0)["val/loss"] == run.metrics("val/loss")[-1][1]


def test_a_teacher_of_another_shape_is_refused_in_a_sentence(train):
    stopped = train(whole=parts_of(Teaching), stop_at=("update", 3))
    said = r"^Teaching\.teacher does not take its state of the checkpoint \(RuntimeError: .*size mismatch.*resume with"
    with pytest.raises(CheckpointError, match=said):
        train(whole=parts_of(Teaching, width=1), resume=stopped.last)


def test_a_resume_with_another_task_begins_its_state(train):
    stopped = train(whole=parts_of(Teaching), stop_at=("update", 3))
    own = read(train(whole=parts_of(Kept), resume=stopped.last).last)["task"]["own"]
    assert own == {"n": 8 - stopped.value["steps"]}


class Lazy(Task):
    """Makes in the first step what stays, and a teacher."""

    teacher: Any = None

    def __init__(self) -> None:
        self.mask: Any = None
        self.criterion = Annealed()

    def step(self, model: Any, batch: Any) -> Any:
        if self.mask is None:
            self.mask, self.teacher = torch.ones(3), copy.deepcopy(model)
        return self.criterion(model(batch[0]) * self.mask, batch[1])


class Annealed(nn.Module):
    """Counts in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.k = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.k += torch.is_grad_enabled()
        return F.cross_entropy(x, y) * (1 + self.k / 10)


class Resumable(Annealed):
    """The same with a state."""

    def get_extra_state(self) -> int:
        return self.k

    def set_extra_state(self, state: int) -> None:
        self.k = state


def test_what_no_checkpoint_has_is_told_once(train, capsys):
    anew = "while training, and a resumed run would begin it anew"
    train(whole=parts_of(Counting))
    said = f"Counting.n changes {anew}: define Counting.state_dict() and load_state_dict(state)"
    assert capsys.readouterr().err.splitlines() == [said]
    train(whole=parts_of(Lazy))
    assert capsys.readouterr().err.splitlines() == [
        f"Lazy.teacher is made {anew}: make it in __init__ or in the model, or define Lazy.state_dict() and "
        "load_state_dict(state)",
        f"Annealed.k changes {anew}: define Annealed.get_extra_state() and set_extra_state(state), or make it a buffer",
    ]


class Several(Task):
    """Keeps what changes in collections and generators."""

    def __init__(self) -> None:
        self.teachers = [nn.Linear(4, 3).requires_grad_(False) for _ in range(2)]
        self.by_name = {"one": nn.Linear(4, 3).requires_grad_(False)}
        self.recent = deque([torch.zeros(3)] * 2, maxlen=2)
        self.noise, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.frozen, self.names, self.idle = [nn.Linear(4, 3)], ("a", "b"), torch.Generator()

    def step(self, model: Any, batch: Any) -> Any:
        out = model(batch[0])
        if model.training:
            with torch.no_grad():
                for one in (*self.teachers, *self.by_name.values()):
                    one.weight.lerp_(model.weight, 0.1)
            self.recent.append(out.detach().mean(0))
            torch.rand(1, generator=self.noise), self.numpy.random(), self.python.random()
        return F.cross_entropy(out, batch[1])


def test_what_changes_in_collections_and_generators_is_told(train, capsys):
    train(whole=parts_of(Several))
    said = capsys.readouterr().err.splitlines()
    own = "define Several.state_dict() and load_state_dict(state)"
    assert {line.partition(" ")[0].removeprefix("Several."): line.partition(": ")[2] for line in said} == {
        "teachers": f"make it an nn.ModuleList, or {own}",
        "by_name": f"make it an nn.ModuleDict, or {own}",
        **dict.fromkeys(("recent", "noise", "numpy", "python"), own),
    }


class Holding(Task):
    """Holds the trained model, a part of it and a parameter."""

    def __init__(self) -> None:
        self.held: Any = []

    def step(self, model: Any, batch: Any) -> Any:
        self.held = [model, {"parameter": model.weight}]
        self.model, self.by_name = model, {"part": next(model.children(), model)}
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("parallel", ["ddp.DDP", "fsdp2.FSDP2"])
def test_the_trained_model_in_a_task_is_not_told(train, capsys, parallel):
    parts = {"parallel": {"_target_": f"ddp_hydra.training.parallel.{parallel}"}}
    train(whole=parts_of(Holding), parts=parts, ema_decay=0.9)
    assert "Holding" not in capsys.readouterr().err


def test_of_a_long_collection_both_ends_count():
    given = list(range(1000))
    assert fingerprint(given) == fingerprint(list(given)) != fingerprint([*given[1:], 0])
    assert fingerprint(given) != fingerprint(given[:-1])
    given.append(given)  # type: ignore[arg-type]
    assert fingerprint(given) == fingerprint(given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_layer_without_numbers_and_a_nested_tensor_have_a_fingerprint(layout):
    given: list[Any] = [nn.LazyLinear(3), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)]
    before = fingerprint(given)
    assert fingerprint(given) == before
    given[0](torch.ones(1, 4))
    assert fingerprint(given) != before


class Unready(Task):
    """Holds models that are not used yet, and one whose state can't be told."""

    class Untold(nn.Linear):
        def get_extra_state(self) -> Any:
            raise RuntimeError("not yet")

        def set_extra_state(self, state: Any) -> None: ...

    def __init__(self) -> None:
        self.heads, self.untold = [nn.LazyLinear(3)], [self.Untold(4, 3)]

    def step(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


def test_a_warning_ends_no_run(train, capsys):
    train(whole=parts_of(Unready))
    assert capsys.readouterr().err == ""


class Growing(Steps):
    """A loss that is no module."""

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.n += torch.is_grad_enabled()
        return F.cross_entropy(x, y) * (1 + self.n / 10)


@pytest.mark.parametrize("loss", [Resumable, Growing])
def test_a_loss_may_keep_plain_values(train, capsys, loss):
    check_resume(train, ("update", 3), whole={"loss": {"_target_": f"{__name__}.{loss.__name__}"}})
    assert loss.__name__ not in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_a_checksum_changes_with_any_bit_and_with_the_order(dtype):
    given = torch.arange(12).reshape(3, 4).to(dtype)[:, 1:]
    before = checksum([given, torch.ones(0)])
    assert checksum([given.clone(), torch.ones(0)]) == before
    given.data[0, 0], given.data[0, 1] = given[0, 1].clone(), not given[0, 0]
    assert checksum([given, torch.ones(0)]) != before


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_a_checksum_changes_where_numbers_only_change_places(dtype):
    rows = torch.eye(8, 4).to(dtype)
    moved = [rows, rows.roll(1, 0), rows.roll(2, 0), rows.flip(1), rows[[2, 1, 0, 3, 4, 5, 6, 7]], rows.T, rows[:4]]
    assert len({str(checksum([one])) for one in moved}) == len(moved)
    large = torch.zeros(2**18 + 3, dtype=dtype)
    large[5] = 1
    assert checksum([large]) != checksum([large.roll(2**18)]) != checksum([large.roll(2)])


class Shuffling(Task):
    """Puts its codes into another order in each step."""

    def __init__(self) -> None:
        self.codes = nn.Module()
        self.codes.register_buffer("rows", torch.randn(8, 3))

    def step(self, model: Any, batch: Any) -> Step:
        x, y = batch
        out, rows = model(x), self.codes.rows
        loss = F.cross_entropy(out, y) + F.mse_loss(out, rows[0].clone().expand_as(out))
        if model.training:
            rows.copy_(rows[torch.randperm(8)])
        return Step(loss, len(y))


def test_a_resumed_run_has_the_codes_in_their_order(train):
    check_resume(train, ("update", 3), whole=parts_of(Shuffling))


@in_world
def trained(world: World) -> list[dict[str, Any]]:
    # At once, and in two runs.
    def run(epochs: int, saved: Any = None) -> dict[str, Any]:
        cfg = OmegaConf.merge(config(epochs=epochs, checkpoint_every_epochs=0), {"scheduler": CONSTANT})
        cfg.objective = BY_LOSS["objective"]
        cfg.task = {"_target_": f"{__name__}.Teaching"}
        found = TrainingRun(cfg, Numbers(9), None, None, FaultInjector(), StopSignal(), world=world, saved=saved)
        fit(found)
        content: dict[str, Any] = world.send(found.state.begin_capture())
        return content

    return [run(2), run(2, run(1))]


@pytest.mark.integration
def test_ranks_go_on_with_the_teacher_of_rank_0(on_two_ranks):
    for whole, resumed in on_two_ranks(trained):
        assert whole["task"]["parts"]["step_of"] == {"n": 4}
        for part in ("model", "task"):
            assert flat(resumed[part]) == flat(whole[part])
