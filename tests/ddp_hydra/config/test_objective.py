from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config import objective
from ddp_hydra.errors import ConfigError


def config(metric=None, direction=None, loss="ddp_hydra.tasks.losses.CrossEntropy", val=True, mix=None, task=None):
    return OmegaConf.create(
        {
            "objective": {"metric": metric, "direction": direction},
            "data": {"val": {"_target_": "x"} if val else None},
            "task": task or {"_target_": "ddp_hydra.tasks.Classification", "metric": "accuracy"},
            "loss": {"_target_": loss},
            "mix": {"_target_": mix} if mix else {},
        }
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("val/accuracy", "maximize")),
        ({"loss": "torch.nn.MSELoss"}, ("val/loss", "minimize")),
        ({"loss": "torch.nn.BCEWithLogitsLoss"}, ("val/loss", "minimize")),
        ({"loss": "torch.nn.MSELoss", "mix": "torchvision.transforms.v2.CutMix"}, ("val/accuracy", "maximize")),
        ({"val": False}, ("train/loss", "minimize")),
        ({"metric": "val/loss"}, ("val/loss", "minimize")),
        ({"metric": "val/top5"}, ("val/top5", "maximize")),
        ({"metric": "val/perplexity"}, ("val/perplexity", "minimize")),
        ({"metric": "val/loss", "direction": "maximize"}, ("val/loss", "maximize")),
        ({"metric": "val/colour", "direction": "minimize"}, ("val/colour", "minimize")),
        ({"metric": "train/accuracy", "val": False}, ("train/accuracy", "maximize")),
        ({"task": {"_target_": "models.mine.Task"}}, ("val/loss", "minimize")),
        ({"task": {"metric": "iou"}}, ("val/iou", "maximize")),
        ({"task": {"metric": "iou"}, "val": False}, ("train/loss", "minimize")),
        ({"task": {"metric": "distance", "direction": "minimize"}}, ("val/distance", "minimize")),
        ({"task": {"metric": "generator/loss"}, "val": False}, ("train/generator/loss", "minimize")),
    ],
    ids=str,
)
def test_what_is_not_given_follows_from_the_rest(given, found):
    assert objective.metric_and_direction(config(**given)) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metric": "val/colour"}, r"objective\.metric=val/colour.*give objective\.direction=maximize or minimize"),
        ({"metric": "val/loss", "val": False}, r"objective\.metric=val/loss: there is no validation set.*=train/loss"),
    ],
    ids=str,
)
def test_what_cannot_be_an_objective_is_refused_with_what_to_give(given, said):
    with pytest.raises(ConfigError, match=said):
        objective.metric_and_direction(config(**given))


@pytest.mark.parametrize(
    ("loss", "axis"),
    [
        ("ddp_hydra.tasks.losses.CrossEntropy", -1),
        ("torch.nn.CrossEntropyLoss", 1),
        ("torch.nn.functional.cross_entropy", 1),
        ("torch.nn.NLLLoss", 1),
        ("torch.nn.functional.binary_cross_entropy", None),
        ("torch.nn.GaussianNLLLoss", None),
        ("torch.nn.MSELoss", None),
    ],
)
def test_a_loss_tells_where_the_classes_are(loss, axis):
    assert objective.class_axis(config(loss=loss)) == axis


@pytest.mark.parametrize(
    ("metrics", "there"), [({}, "none. Give objective.metric=train/loss"), ({"f1": 1.0}, "f1. Give")]
)
def test_an_unknown_metric_is_told_where_no_loss_is(metrics, there):
    assert there in str(objective.unknown("val/dice", metrics, saved=False))


def test_an_unknown_metric_is_told_from_one_that_is_not_there_yet():
    whole = {"train/loss": 1.0, "val/loss": 1.0}
    assert objective.is_unknown("val/acc", whole)
    assert objective.is_unknown("train/acc", whole)
    assert not objective.is_unknown("val/loss", whole)
    assert objective.is_unknown("train/acc", {"train/loss": 1.0})  # there after a resume, too
    assert not objective.is_unknown("lr", {"train/loss": 1.0, "val/loss": 1.0})  # resumed before a validation
    assert objective.is_unknown("lrr", {**whole, "lr": 0.1, "samples_per_s": 9.0})


@pytest.mark.parametrize(
    "metric", ["val/top5", "train_epoch/loss", "data/retries", "lr", "generator/grad_norm", "my/loss", "accuracy"]
)
@pytest.mark.parametrize("callbacks", [None, {"mine": None}, {"mine": {"_target_": "models.mine.Mine"}}], ids=str)
def test_a_name_that_nothing_logs_is_refused_before_a_cluster_starts(metric, callbacks):
    cfg = OmegaConf.merge(config(metric, "minimize"), {"callbacks": callbacks})
    if metric in ("my/loss", "accuracy") and not any((callbacks or {}).values()):
        wanted = f"objective\\.metric=val/{metric.removeprefix('my/')}, or \\+callbacks"
        with pytest.raises(ConfigError, match=f"no callback that could log one: give {wanted}"):
            objective.check_name(cfg)
    else:
        objective.check_name(cfg)
