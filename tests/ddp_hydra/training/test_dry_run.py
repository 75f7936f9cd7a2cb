from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.utils.data import IterableDataset

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank.fault_injection import FaultInjector
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training import setup
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import first_step
from ddp_hydra.training.run import TrainingRun
from tests.ddp_hydra.training.loop_runs import BY_LOSS, Numbers, config

pytestmark = pytest.mark.usefixtures("group")


class Detached(torch.nn.Linear):
    """Has no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class NoSuchClass(Numbers):
    """Has a class that the model has not."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], torch.tensor(7)


class Pixels(Numbers):
    """Each place of an image has a class."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(3, 5, 6), torch.ones(5, 6, dtype=torch.long)


def dry(train_set: Any = None, val_set: Any = None, **parts: Any) -> list[str]:
    cfg = config()
    if "_target_" in parts.get("optimizer", {}):
        cfg.optimizer = {"lr": 0.1}
    cfg = OmegaConf.merge(cfg, {"cluster": {"n_workers": 2}, "dispatch": {"ranks": None}}, parts)
    return first_step(cfg, train_set or Numbers(9), val_set or Numbers(5))


def test_it_makes_a_whole_step_and_names_the_metrics():
    lines = dry(trainer={"gradient_accumulation_steps": 2, "clip_norm": 1.0})
    assert lines[0] == "data      9 samples, 5 for validation"
    assert "metrics   train/loss, train/accuracy, val/loss, val/accuracy; best.pt goes by val/accuracy" in lines
    assert lines[-1] == "dry run: all of it works"


@pytest.mark.parametrize(
    "scheduler",
    [
        {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"},
        {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 1},
    ],
)
def test_schedules_take_the_steps_that_they_take_in_a_run(scheduler):
    assert dry(scheduler=scheduler, trainer={"max_steps": 1})[-1] == "dry run: all of it works"


class Table(torch.nn.Linear):
    """Looks numbers up, by a layer or by a function: the optimizer learns of a function in the step alone."""

    def __init__(self, in_features: int, out_features: int, by_function: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.rows = torch.nn.Embedding(2, 4, sparse=not by_function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.embedding((x[:, 0] > 0).long(), self.rows.weight, sparse=True))


SPARSE = "takes no sparse gradients, and nn.Embedding"


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            {"_target_": "torch.optim.SGD", "fused": True, "weight_decay": 0.1},
            f"SGD with fused and weight_decay {SPARSE}.*: give optimizer.fused=false optimizer.weight_decay=0, or",
        ),
        ({"_target_": "torch.optim.Adagrad", "weight_decay": 0.1}, f"{SPARSE}.*: give optimizer.weight_decay=0, or"),
        ({"_target_": "torch.optim.AdamW", "fused": True}, f"AdamW {SPARSE}.*SparseAdam is for.*optimizer=sgd optimiz"),
        ({"_target_": "torch.optim.RMSprop"}, f"RMSprop {SPARSE}.*optimizer=sgd optimizer.fused=false"),
        ({"_target_": "torch.optim.SparseAdam"}, "SparseAdam takes no dense gradients"),
    ],
)
def test_an_optimizer_that_takes_no_sparse_gradients_is_refused_with_what_to_type(optimizer, said, by_function):
    model = {"_target_": f"{__name__}.Table", "by_function": by_function}
    with pytest.raises(ConfigError, match=said):
        dry(model=model, optimizer=optimizer)


def test_an_optimizer_that_takes_sparse_gradients_is_told_before_the_first_step(monkeypatch):
    model = {"_target_": f"{__name__}.Table"}
    assert dry(model=model, optimizer={"nesterov": True})[-1] == "dry run: all of it works"
    monkeypatch.setattr(TrainingRun, "begin_epoch", lambda run: pytest.fail("it has begun"))
    with pytest.raises(ConfigError, match="weight_decay=0"):
        dry(model=model, optimizer={"weight_decay": 0.1})


class Stream(IterableDataset):
    """Gives the same one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Numbers(9)[index] for index in range(9)])


def test_it_takes_iterable_data():
    lines = dry(Stream(), Stream(), trainer={"max_steps": 5, "gradient_accumulation_steps": 2})
    assert lines[0] == "data      iterable, an iterable for validation"
    assert "steps     an unknown number in an epoch with 2 ranks of 2" in lines
    assert lines[-1] == "dry run: all of it works"


def test_a_segmentation_works():
    model = {"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 4, "kernel_size": 1}
    cfg = config()
    cfg.model = model
    cfg.loss = {"_target_": "torch.nn.CrossEntropyLoss"}
    cfg.cluster, cfg.dispatch = {}, {"ranks": 1}
    lines = first_step(cfg, Pixels(4), Pixels(3))
    assert lines[-1] == "dry run: all of it works"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"model": {"_target_": f"{__name__}.Detached"}}, ConfigError, "depends on none of the weights"),
        ({"val_set": NoSuchClass(5)}, ConfigError, "hold class 7, and the model's output has 3 classes"),
        (
            {"objective": {"metric": "val/acc"}}, ConfigError,
            r"objective\.metric=val/acc: .* there are train/accuracy.* Give objective\.metric=val/accuracy$",
        ),
        ({"objective": {"metric": "my/loss"}}, ConfigError, r"objective\.metric=my/loss: .* Give .*=(val|train)/loss$"),
        (
            {"objective": {"metric": "accuracy"}}, ConfigError,
            r"objective\.metric=accuracy: .* Give objective\.metric=(val|train)/accuracy$",
        ),
    ],
    ids=["backward", "validation", "objective", "of a callback", "objective without val/"],
)  # fmt: skip
def test_what_a_first_step_would_die_of_is_found(given, error, said):
    with pytest.raises(error, match=said):
        dry(**given)


def test_it_says_that_a_callback_has_to_log_the_objective():
    callbacks = {"mine": {"_target_": "ddp_hydra.training.callbacks.WallClock", "at": "07:00"}}
    lines = dry(objective={"metric": "my/score"}, callbacks=callbacks)
    assert lines[-2].endswith("; best.pt goes by my/score, which a callback has to log")
    assert dry(objective={"metric": "lr"})[-2].endswith("; best.pt goes by lr")
    with pytest.raises(ConfigError, match=r"objective\.metric=val/score: this run has none"):
        dry(objective={"metric": "val/score"}, callbacks=callbacks)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"_target_": "torch.nn.Identity"}, "callbacks.mine: Identity is not a subclass"),
        ({"_target_": "ddp_hydra.training.callbacks.WallClock", "each": 3}, "each"),
    ],
)
def test_it_builds_the_callbacks(node, said):
    with pytest.raises(Exception, match=said):
        dry(callbacks={"mine": node})


class Given(Numbers):
    """Makes batches of another kind of tensor; of one sample, none."""

    def __init__(self, kind: str) -> None:
        super().__init__(9)
        self.kind = kind

    def collate(self, samples: Any) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        if self.kind == "packed":
            return torch.nn.utils.rnn.pack_sequence(list(x)), y
        if self.kind == "masked":
            return torch.masked.masked_tensor(x, x > 0), y
        if self.kind == "pairs":
            if len(samples) < 2:
                raise ValueError("a pair has two samples")
            return x, y
        return torch.nested.nested_tensor(list(x), layout=getattr(torch, self.kind)), y


class Dense(Task):
    """Takes all of these batches."""

    def step(self, model: torch.nn.Module, batch: Any) -> Step:
        x, y = batch
        if isinstance(x, torch.nn.utils.rnn.PackedSequence):
            x = torch.stack(torch.nn.utils.rnn.unpack_sequence(x))
        elif x.is_nested:
            x = torch.stack(list(x.unbind()))
        x = x.get_data() if hasattr(x, "get_data") else x
        return Step(F.cross_entropy(model(x.detach()), y), len(y))

    def predict(self, model: torch.nn.Module, batch: Any) -> Any:
        return {}


KINDS = ["packed", "jagged", "strided", "masked", "pairs"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of (nested tensors|MaskedTensors)")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_which_nothing_can_be_estimated_trains(kind):
    cfg = config()
    cfg.task, cfg.objective, cfg.loss = {"_target_": f"{__name__}.Dense"}, BY_LOSS["objective"], None
    cfg.cluster, cfg.dispatch = {}, {"ranks": 1}
    lines = first_step(cfg, Given(kind), None)
    assert lines[-1] == "dry run: all of it works"
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert " a rank, and activations: weights" in memory


class ReadsWeights(torch.optim.SGD):
    """Needs values where it is built."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.first = float(self.param_groups[0]["params"][0].sum())


def test_an_optimizer_that_reads_weights_has_no_estimate():
    lines = dry(optimizer={"_target_": f"{__name__}.ReadsWeights"})
    assert lines[-1] == "dry run: all of it works"


class Once(torch.nn.Linear):
    """Can be built only once."""

    built = 0

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        Once.built += 1
        if Once.built > 1:
            raise RuntimeError("there is one already")


def test_an_estimate_of_a_model_that_can_be_built_only_once_ends_no_run(monkeypatch):
    monkeypatch.setattr(Once, "built", 0)
    monkeypatch.setattr(setup, "LARGE", 0)
    cfg = OmegaConf.merge(config(), {"model": {"_target_": f"{__name__}.Once"}})
    run = TrainingRun(cfg, Numbers(9), None, None, FaultInjector(), StopSignal())
    assert (setup.passes_of(run), setup.memory_of(run)) == ([], "")


class Locked(torch.nn.Linear):
    """Can't be copied, and builds another layer each time."""

    sizes = iter(range(1, 1000))

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.lock = threading.Lock()
        self.register_buffer("size", torch.zeros(next(self.sizes)))


class Remembers(torch.optim.SGD):
    """Its state has an object that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "memory": object()}


def test_it_builds_the_average_of_the_weights():
    parts = {"model": {"_target_": f"{__name__}.Locked"}}
    assert dry(**parts)[-1] == "dry run: all of it works"
    with pytest.raises(ConfigError, match=r"^trainer\.ema_decay needs a copy of the model, and Locked can't be copied"):
        dry(**parts, trainer={"ema_decay": 0.9})


def test_it_finds_a_state_that_cannot_be_saved():
    with pytest.raises(
        CheckpointError, match=r"^optimizer: memory is a builtins\.object, which a checkpoint can't hold"
    ):
        dry(optimizer={"_target_": f"{__name__}.Remembers"})


def test_it_refuses_a_loss_that_the_task_does_not_take():
    with pytest.raises(
        ConfigError, match=r"^loss\.label_smoothing=0\.1 would have no effect, as LanguageModel takes no"
    ):
        dry(task={"_target_": "ddp_hydra.tasks.LanguageModel"}, loss={"label_smoothing": 0.1})
