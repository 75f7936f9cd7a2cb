"""Metrics of the config: names, and two ranks of which one has no samples."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World, in_world
from ddp_hydra.tasks import Classification, LanguageModel, Step, Task
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training import evaluation, memory
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.evaluation import EvalMetrics
from tests.ddp_hydra.training.loop_runs import BY_LOSS, FALLING, Numbers, flat

torchmetrics = pytest.importorskip("torchmetrics")

ZOO: dict[str, dict[str, Any]] = {
    "lists": {"target": "MulticlassAUROC", "num_classes": 3},
    "lists per class": {"target": "MulticlassAveragePrecision", "num_classes": 3, "average": None},
    "thresholds": {"target": "MulticlassAUROC", "num_classes": 3, "thresholds": 5},
    "per class": {"target": "MulticlassRecall", "num_classes": 3, "average": None},
    "counts": {"target": "MulticlassF1Score", "num_classes": 3},
    "matrix": {"target": "MulticlassConfusionMatrix", "num_classes": 3},
    "lists as they are": {"target": "Kept"},
    "calibration": {"target": "MulticlassCalibrationError", "num_classes": 3},
}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(12, 3, generator=draw).softmax(1), torch.arange(12) % 3


def results_of(first: int, last: int, world: World = ALONE) -> dict[str, Any]:
    """What each metric of the zoo computes from some samples, in batches of 2."""
    import torchmetrics.classification as zoo

    found: dict[str, Any] = {}
    prediction, target = samples()
    for name, given in ZOO.items():
        kind = Kept if given["target"] == "Kept" else getattr(zoo, given["target"])
        metric = kind(**{key: value for key, value in given.items() if key != "target"})
        metrics = EvalMetrics({name: metric}, world=world)
        for begin in range(first, last, 2):
            metric.update(prediction[begin : min(begin + 2, last)], target[begin : min(begin + 2, last)])
        found |= metrics.result()
        found |= {key: value.tolist() for key, value in metrics.matrices.items()}
    return found


class Kept(torchmetrics.Metric):
    """Keeps a list that nothing concatenates, one whose function adds it up, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("added", [], dist_reduce_fx=lambda parts: sum(part.sum() for part in parts))
        self.add_state("n", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        self.kept.append(prediction.sum())
        self.added.append(target.float())
        self.n += len(target)

    def compute(self) -> dict[str, torch.Tensor]:
        added = self.added if isinstance(self.added, torch.Tensor) else sum(part.sum() for part in self.added)
        return {"kept": torch.stack(self.kept).sum() / self.n, "added": torch.as_tensor(added) / self.n}


class Counted:
    """A metric of a user's, without torchmetrics: each rank has the numbers of its own samples."""

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None: ...

    def compute(self) -> float:
        return 0.5

    def reset(self) -> None: ...


def test_a_metric_without_states_is_refused_where_several_ranks_count():
    assert EvalMetrics({"mine": Counted()}).result() == {"val/mine": 0.5}
    with pytest.raises(ConfigError, match=r"metrics\.mine \(Counted\) has no states by torchmetrics' add_state"):
        EvalMetrics({"mine": Counted()}, world=World(0, 2)).result()


@in_world
def results_of_shares(world: World) -> list[dict[str, Any]]:
    import warnings

    warnings.simplefilter("ignore")  # torchmetrics warns of a rank without samples
    without_samples, uneven = [(0, 12), (12, 12)], [(0, 3), (3, 12)]
    return [results_of(*shares[world.rank], world) for shares in (without_samples, uneven)]


@pytest.mark.integration
def test_two_ranks_give_the_numbers_of_one_also_where_one_has_no_samples(on_two_ranks):
    alone = results_of(0, 12)
    assert len(alone) == 13
    for of_rank in on_two_ranks(results_of_shares):
        for found in of_rank:
            assert found.keys() == alone.keys()
            for name, value in alone.items():
                assert torch.allclose(torch.tensor(found[name]), torch.tensor(value), atol=1e-6), name


def chosen(name: str, target: str, **more: Any) -> dict[str, Any]:
    return {"metrics": {name: {"_target_": f"torchmetrics.classification.{target}", "num_classes": 3, **more}}}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            chosen("accuracy", "MulticlassAccuracy"),
            r"metrics.accuracy: the task logs val/accuracy .*my_accuracy",
        ),
        (chosen("loss", "MulticlassAccuracy"), r"metrics.loss: the task logs val/loss itself"),
        (
            {**chosen("accuracy", "MulticlassAccuracy"), "task": {"metric": None}},
            r"metrics.accuracy: the task logs val/accuracy itself",
        ),
    ],
    ids=["accuracy", "loss", "as it turns out"],
)
def test_a_name_of_the_task_is_refused_before_the_first_step(train, parts, said):
    found: list[Any] = []
    with pytest.raises(ConfigError, match=said):
        train(parts=parts, into=found)
    assert not [record for record in found[0].records if record.kind in ("metrics", "file")]


PERPLEXITY = {"metrics": {"perplexity": {"_target_": "torchmetrics.text.Perplexity"}}}
REGRESSION = {
    "task": {"_target_": "ddp_hydra.tasks.Regression", "metric": "loss"},
    "loss": {"_target_": "torch.nn.MSELoss"},
}


class Values(Numbers):
    def __getitem__(self, index):
        return self.x[index], self.x[index, :3] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"whole": REGRESSION, "data": Values, "parts": {**PERPLEXITY, **BY_LOSS}},
            r"metrics.perplexity \(Perplexity\) does not take what Regression predicts, \(2, 3\) float32.*"
            r"'~metrics.perplexity'",
        ),
        (
            {
                "parts": {
                    "metrics": {"f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 2}}
                }
            },
            r"metrics.f1 \(MulticlassF1Score\) does not take.*\(ValueError: ",
        ),
    ],
    ids=["a regression", "two classes of three"],
)
def test_a_metric_that_can_not_be_computed_is_refused_before_the_first_step(train, options, said):
    found: list[Any] = []
    with pytest.raises(ConfigError, match=said):
        train(**options, into=found)
    assert not [record for record in found[0].records if record.kind in ("metrics", "file")]


@pytest.mark.parametrize("metrics", [{}, chosen("recall", "MulticlassRecall")], ids=["none", "recall"])
def test_an_objective_that_no_validation_gives_is_refused_before_the_first_step(train, metrics):
    parts = {**metrics, "objective": {"metric": "val/acc", "direction": "maximize"}}
    found: list[Any] = []
    with pytest.raises(ConfigError, match=r"objective.metric=val/acc: .* Give objective.metric=val/accuracy$"):
        train(parts=parts, into=found)
    assert not [record for record in found[0].records if record.kind in ("metrics", "file")]


def test_an_objective_may_be_a_chosen_metric_beside_those_of_the_task(train):
    parts = {**chosen("recall", "MulticlassRecall"), "objective": {"metric": "val/recall", "direction": "maximize"}}
    run = train(parts=parts, epochs=1)
    assert run.metrics("val/recall")
    assert run.metrics("val/accuracy")


class Counting(torch.nn.Linear):
    """Counts its batches in a buffer and in its extra state, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("batches", torch.zeros(()))
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, x):
        self.batches += 1
        self.seen += 1
        return super().forward(x) / (1 + self.seen / 100)


class Learning(torch.nn.Module):
    """Weighs the classes by what a validation has found."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.calls = torch.ones(3), 0

    def get_extra_state(self):
        return {"error": self.error, "calls": self.calls}

    def set_extra_state(self, state):
        self.error, self.calls = state["error"], state["calls"]

    def forward(self, scores, target):
        if not torch.is_grad_enabled():
            self.calls += 1
            self.error = (0.9 * self.error).index_add(0, target, 0.1 * (scores.argmax(1) != target).float())
        return torch.nn.functional.cross_entropy(scores, target, self.error)


class LearningApart:
    """The same, and no module."""

    def __init__(self) -> None:
        self.inner = Learning()

    def state_dict(self):
        return self.inner.get_extra_state()

    def load_state_dict(self, state):
        self.inner.set_extra_state(state)

    def __call__(self, scores, target):
        return self.inner(scores, target)


class Watching(Classification):
    """Has a teacher that follows the model in a validation, too, and keeps a list."""

    def __init__(self, criterion):
        super().__init__(criterion)
        self.teacher, self.calls = torch.nn.Linear(4, 3).requires_grad_(False), []

    def validation_step(self, model, batch):
        self.calls.append(len(self.calls))
        self.teacher.weight.mul_(0.9).add_(model.weight, alpha=0.1)
        return self.step(model, batch)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

    def step(self, model, batch):
        found = super().step(model, batch)
        return found._replace(loss=found.loss * (1 + len(self.calls)) + self.teacher.weight.sum() * model.bias.sum())


@pytest.mark.parametrize(
    "whole",
    [
        {"model": {"_target_": f"{__name__}.Counting"}},
        {"loss": {"_target_": f"{__name__}.Learning"}},
        {"loss": {"_target_": f"{__name__}.LearningApart"}},
        {"task": {"_target_": f"{__name__}.Watching"}},
    ],
    ids=["model", "loss", "loss that is no module", "task"],
)
def test_trying_the_metrics_changes_nothing_of_the_training_also_of_a_resumed_run(train, whole):
    given = {"whole": {**whole, **FALLING}, "parts": chosen("recall", "MulticlassRecall")}
    stopped = train(stop_at=("forward", 6), **given)
    runs = [train(whole=given["whole"]), train(**given), train(resume=stopped.last, **given)]
    alone, *tried = [{**flat(read(run.last)), "metrics": {}} for run in runs]
    assert tried == [alone, alone]


class Locked(Classification):
    """Can't be copied."""

    def __init__(self, criterion):
        super().__init__(criterion)
        self.lock, self.teacher = threading.Lock(), torch.nn.Linear(4, 3)


class Large(Classification):
    """Has a teacher."""

    def __init__(self, criterion):
        super().__init__(criterion)
        self.teacher = torch.nn.Linear(4, 3).requires_grad_(False)


class Banked(Classification):
    """Has a tensor and an array of 15 numbers in all."""

    def __init__(self, criterion):
        super().__init__(criterion)
        self.bank, self.row = torch.zeros(4, 3), np.zeros(3, np.float32)


@pytest.mark.parametrize("kind", ["Locked", "Large", "Banked"])
def test_metrics_are_not_tried_with_a_task_that_can_not_be_copied(train, kind, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**40 if kind == "Locked" else 2 * 15 * 4 - 1)
    found: list[Any] = []
    parts = {**chosen("accuracy", "MulticlassAccuracy"), "task": {"_target_": f"{__name__}.{kind}"}}
    with pytest.raises(ConfigError, match=r"the task logs val/accuracy itself"):
        train(parts={**parts, **FALLING}, into=found, log_every_steps=1)
    assert len([record for record in found[0].records if record.kind == "metrics"]) >= 3, "at the first validation"


def test_a_metric_that_needs_more_samples_than_it_is_tried_with_is_not_refused(train):
    metric = {"metrics": {"my_r2": {"_target_": "torchmetrics.regression.R2Score"}}}
    parts = {**metric, **BY_LOSS, "data": {"batch_size": 1}}
    assert train(whole=REGRESSION, data=Values, parts=parts, epochs=1).metrics("val/my_r2")


class NeedsAll(torchmetrics.Metric):
    """Can't be computed from a part of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("n", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        self.n += len(target)

    def compute(self) -> torch.Tensor:
        if self.n < 5:
            raise ValueError(f"only {self.n} samples")
        return self.n


def test_a_validation_that_is_stopped_computes_no_metric_that_needs_all_samples(train):
    run = train(parts={"metrics": {"all": {"_target_": f"{__name__}.NeedsAll"}}}, stop_at=("validate", 4))
    assert (run.value["interrupted"], run.steps_saved, run.metrics("val/all")) == ("interrupt", [4], [])


def test_top_5_of_three_classes_is_left_out(train, capsys):
    class Named(Numbers):
        num_classes = 3

    top5 = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": None, "top_k": 5}
    run = train(parts={"metrics": {"top5": top5}}, data=Named, epochs=1)
    assert run.metrics("val/top5") == []
    assert "metrics.top5 is left out: top_k=5 of 3 classes" in capsys.readouterr().err


def test_a_confusion_matrix_is_returned_as_lists(train):
    run = train(parts=chosen("confusion", "MulticlassConfusionMatrix"), epochs=1)
    rows = run.value["matrices"]["val/confusion"]
    assert [len(row) for row in rows] == [3, 3, 3]
    assert sum(map(sum, rows)) == 5


def test_without_matplotlib_a_run_has_its_matrix_and_a_warning_but_no_picture(train, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    run = train(parts=chosen("confusion", "MulticlassConfusionMatrix"), epochs=2)
    assert sum(map(sum, run.value["matrices"]["val/confusion"])) == 5
    said = "there is no picture of val/confusion without matplotlib: pip install 'ddp-hydra[plot]'"
    assert capsys.readouterr().err.count(said) == 1


def test_matrices_of_several_labels_are_lists_alone():
    metrics = EvalMetrics({"several": object()})
    assert metrics._logged("val/several", torch.ones(3, 2, 2)) == {}
    metrics.show(step=1)
    assert metrics.lists() == {"val/several": torch.ones(3, 2, 2).tolist()}


def test_a_curve_is_refused_before_the_first_step(train):
    with pytest.raises(ConfigError, match=r"metrics.curve \(MulticlassROC\) computes a tuple.*AUROC.*'~metrics.curve'"):
        train(parts=chosen("curve", "MulticlassROC"))


def test_a_metric_for_each_sample_is_logged_as_the_mean_over_the_samples():
    import torchmetrics.classification as zoo

    draw = torch.Generator().manual_seed(0)
    scores, target = torch.randn(6, 5, 3, generator=draw), torch.randint(3, (6, 5), generator=draw)
    given = {"num_classes": 3, "average": "micro", "multidim_average": "samplewise"}
    task = Classification(torch.nn.CrossEntropyLoss())
    for sizes in ([6], [1, 5], [2, 2, 2]):
        metrics = EvalMetrics({"each": zoo.MulticlassAccuracy(**given)})
        for x, y in zip(scores.split(sizes), target.split(sizes), strict=True):
            metrics.add(task, Step(torch.zeros(()), None, {}, x.movedim(-1, 1), y))
        expected = (scores.argmax(-1) == target).double().mean()
        assert metrics.result() == {"val/each": pytest.approx(float(expected))}


class OnlyALoss(Task):
    """Gives no prediction."""

    def step(self, model, batch):
        return Step(model(batch[0]).square().mean(), len(batch[0]))


def test_a_task_without_a_prediction_refuses_a_metric_of_the_config(train):
    parts = {
        "task": {"_target_": f"{__name__}.OnlyALoss", "metric": "loss"},
        "objective": {"metric": "val/loss", "direction": "minimize"},
        "metrics": {"f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3}},
    }
    whole = {"task": parts.pop("task")}
    with pytest.raises(ConfigError, match=r"MulticlassF1Score: .*prediction=, target=\), which OnlyALoss leaves"):
        train(parts=parts, whole=whole)


@pytest.mark.medium
def test_perplexity_is_that_of_all_places_whatever_the_batches():
    text = pytest.importorskip("torchmetrics.text")
    torch.manual_seed(0)
    logits, target = torch.randn(7, 5, 4), torch.randint(4, (7, 5))
    scores = EvalMetrics({"perplexity": text.Perplexity()})
    for part, goal in zip(logits.split(3), target.split(3), strict=True):
        scores.add(LanguageModel(), Step(torch.zeros(()), prediction=part, target=goal))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert scores.result() == {"val/perplexity": pytest.approx(loss.exp().item())}
    scores.add(LanguageModel(), Step(torch.zeros(()), prediction=torch.zeros(1, 2, 4), target=target[:1, :2]))  # anew
    assert scores.result() == {"val/perplexity": pytest.approx(4)}


@pytest.mark.parametrize("task", [LanguageModel(), Classification(CrossEntropy())], ids=["tokens", "classes"])
def test_perplexity_leaves_out_the_targets_that_the_loss_leaves_out(task):
    text = pytest.importorskip("torchmetrics.text")
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 120), torch.randint(120, (3, 5))  # of so many that -100 would be one of them
    target[0, :2], target[1] = -100, -100
    scores = EvalMetrics({"perplexity": text.Perplexity()})
    for row, goal in zip(logits.split(1), target.split(1), strict=True):
        scores.add(task, task.validation_step(lambda _, row=row: row, (row, goal)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert scores.result() == {"val/perplexity": pytest.approx(loss.exp().item())}


class Computes:
    """Stands for a metric of torchmetrics."""

    def __init__(self, value):
        self.value = value

    def compute(self):
        return self.value

    def reset(self):
        pass


def test_a_metric_may_be_several():
    metric = Computes({"map": torch.tensor(0.5), "of": torch.tensor([1, 2]), "n": 3, "all": torch.eye(2)})
    scores = EvalMetrics({"m": metric}, classes=["cat", "dog"])
    assert scores.result() == {"val/m/map": 0.5, "val/m/of/cat": 1, "val/m/of/dog": 2, "val/m/n": 3}
    assert list(scores.matrices) == ["val/m/all"]


@pytest.mark.parametrize(
    "value",
    [
        np.float32(2),
        np.float64(2),
        np.float16(2),
        np.int64(2),
        np.uint8(2),
        np.array(2.0),
        torch.tensor(2),
        2,
        np.True_,
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_numpy_are_numbers(value):
    assert EvalMetrics({"m": Computes(value)}).result() == {"val/m": float(value)}


def test_arrays_are_as_tensors_and_texts_are_refused():
    scores = EvalMetrics({"m": Computes({"of": np.array([1, 2]), "all": np.eye(2)})}, classes=["cat", "dog"])
    assert scores.result() == {"val/m/of/cat": 1, "val/m/of/dog": 2}
    assert scores.lists() == {"val/m/all": [[1, 0], [0, 1]]}
    for wrong in (np.array(["a"]), np.str_("a"), "a", np.complex64(1), None):
        with pytest.raises(ConfigError, match=r"metrics\.m \(Computes\) computes a .*an array of numbers"):
            EvalMetrics({"m": Computes(wrong)}).result()


class Remembers(Computes):
    """Has a maximum that outlives `reset`, as torchmetrics' MinMaxMetric has."""

    def __init__(self) -> None:
        super().__init__(None)
        self.most = 0

    def compute(self) -> int:
        self.most += 1
        return self.most


def test_a_trial_leaves_the_metrics_as_they_were():
    class Held(Remembers):
        def __deepcopy__(self, memo):
            raise TypeError("a lock can't be copied")

    scores = EvalMetrics({"m": Remembers(), "held": Held()})
    assert scores.copied().result() == {"val/m": 1, "val/held": 1}
    assert scores.result() == {"val/m": 1, "val/held": 2}
