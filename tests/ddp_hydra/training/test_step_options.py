"""What a step may be made of: parts, precision, averages, frozen parameters, other metrics."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._inductor.config
from omegaconf import OmegaConf
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import DataParallel

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Task
from ddp_hydra.training import builders
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.parallel import Parallel, PartStep
from ddp_hydra.training.parallel.dp import DP
from ddp_hydra.training.train_step import TrainStep
from ddp_hydra.training.update import Update
from tests.ddp_hydra.training.loop_runs import STEPS, Numbers, check_resume, config, flat, weights


@pytest.mark.parametrize("parts", [2, 3])
def test_a_step_of_several_parts_is_one_of_a_larger_batch(parts, train):
    whole = train(epochs=1, parts={"data": {"batch_size": 2 * parts}})
    cut = train(epochs=1, gradient_accumulation_steps=parts)
    assert torch.allclose(weights(cut), weights(whole), atol=1e-6)
    losses = [dict(run.metrics("train/loss")) for run in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert cut.value["samples"] == whole.value["samples"]


@pytest.mark.parametrize("parallel", ["ddp.DDP", "none.Unwrapped"])
def test_gradients_that_are_added_in_place_are_the_same_bits(train, monkeypatch, parallel):
    given = {"epochs": 1, "gradient_accumulation_steps": 2, "clip_norm": 0.5}
    parts = {"parallel": {"_target_": f"ddp_hydra.training.parallel.{parallel}"}}
    usual = train(**given, parts=parts)
    monkeypatch.setattr(builders, "makes_cuda_graphs", lambda cfg, device: True)
    kept, backward = [], Update.backward

    def looked_at(step: Update, loss: torch.Tensor) -> None:
        kept.append([parameter.grad is not None for _, parameter in step.trained])
        backward(step, loss)

    monkeypatch.setattr(Update, "backward", looked_at)
    assert torch.equal(weights(train(**given, parts=parts)), weights(usual))
    assert kept == [[True, True]] * 4


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
    "alone": {"parts": {"parallel": {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"}}},
    "smooth": {"parts": {"loss": {"label_smoothing": 0.1}}},
}


@pytest.mark.medium
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_whatever_a_step_is_made_of_a_resumed_run_ends_as_if_never_stopped(options, train):
    whole, stopped = check_resume(train, **options)
    assert weights(whole).tolist() != weights(stopped).tolist()


def test_gradients_are_clipped_to_a_length_that_is_logged_as_it_was(train):
    free, clipped = (
        train(epochs=1, log_every_steps=1, clip_norm=1e9),
        train(epochs=1, log_every_steps=1, clip_norm=0.01),
    )
    assert all(norm > 0.05 for _, norm in free.metrics("grad_norm"))
    assert clipped.metrics("grad_norm")[0] == pytest.approx(free.metrics("grad_norm")[0])
    states = [read(run.last)["optimizer"]["state"]["weight"] for run in (free, clipped)]
    moved = [(state["momentum_buffer"] ** 2).sum().sqrt().item() for state in states]
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


class Converted(Parallel):
    """Does what sync_batchnorm does, which is for GPUs; in evaluation these layers work here, too."""

    def wrap(self, step: TrainStep) -> PartStep:
        return super().wrap(torch.nn.SyncBatchNorm.convert_sync_batchnorm(step))


class Normed(torch.nn.Sequential):
    """With a BatchNorm in front."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(torch.nn.BatchNorm1d(in_features), torch.nn.Linear(in_features, out_features))


def test_frozen_norms_stay_as_they_were_also_where_sync_batchnorm_puts_others_in_their_places(train):
    parts = {"model": {"_target_": f"{__name__}.Normed"}, "parallel": {"_target_": f"{__name__}.Converted"}}
    content = read(train(freeze=["0.*"], epochs=1, parts=parts).last)["model"]
    assert (content["0.running_mean"].tolist(), content["0.num_batches_tracked"].item()) == ([0.0] * 4, 0)


class SelfFrozen(Normed):
    """Freezes its norm itself: torch goes on with its statistics."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self[0].requires_grad_(False)


@pytest.mark.parametrize(("freeze", "steps"), [([], 4), (["*", "!1.*"], 0)])
def test_norms_that_the_model_freezes_itself_go_on_as_in_torch(train, freeze, steps):
    parts = {"model": {"_target_": f"{__name__}.SelfFrozen"}}
    content = read(train(freeze=freeze, epochs=1, parts=parts).last)["model"]
    assert content["0.num_batches_tracked"].item() == steps
    assert content["0.running_mean"].any().item() == bool(steps)


CONSTANT = {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.constant"}}


@pytest.mark.parametrize(
    ("rule", "rate", "line"),
    [
        ({}, 0.1, "rate      0.1"),
        ({"lr_rule": "linear", "lr_reference_batch": 8}, 0.05, "rate      0.05, linear in the batch: 4 / 8"),
        ({"lr_rule": "sqrt", "lr_reference_batch": 1}, 0.2, "rate      0.2, sqrt in the batch: 4 / 1"),
    ],
)
def test_the_rate_grows_with_the_global_batch(rule, rate, line, train):
    data = {"batch_size": 1, "global_batch": 4}
    run = train(epochs=1, parts={**CONSTANT, "data": data, "optimizer": rule}, gradient_accumulation_steps=2)
    assert {rate for _, rate in run.metrics("lr")} == {rate}
    header = run.header
    assert (line in header, "batch     2 x 2 micro-batches x 1 rank = 4 effective" in header) == (True, True)


def test_the_rate_of_each_step_is_logged(train):
    parts = {"scheduler": {"_target_": "ddp_hydra.training.lr_schedules.linear", "warmup_steps": 3}}
    run = train(max_steps=6, log_every_steps=1, parts=parts)
    rates = [0.025, 0.05, 0.075, 0.1, 0.1 * 2 / 3, 0.1 / 3]
    assert run.metrics("lr") == [(step, pytest.approx(rate)) for step, rate in enumerate(rates, start=1)]


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
    assert [(record.step, record.data.name) for record in images] == [(4, "val/confusion"), (8, "val/confusion")]


def test_metrics_that_are_not_installed_are_named_with_what_to_type(train, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    metrics = {"f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3}}
    with pytest.raises(ConfigError, match=r"the metrics f1 need torchmetrics.*pip install 'ddp-hydra\[metrics\]'"):
        train(parts={"metrics": metrics})


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch compiles by a C++ compiler")
def test_a_compiled_model_trains_the_same(train):
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # no pool of them stays
        compiled = train(epochs=1, compile="default")
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.allclose(weights(compiled), weights(train(epochs=1)), atol=1e-5)
    assert read(compiled.last)["model"].keys() == {"weight", "bias"}
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.medium
def test_each_part_that_is_trained_apart_is_compiled_where_the_task_finds_it(group):
    model = nn.ModuleDict({"one": nn.Linear(4, 3), "other": nn.Linear(3, 4)})
    cfg = OmegaConf.merge(config(compile="default"), ALONE)
    builders.parallel(cfg).adopt(model).build_part(cfg.trainer, Apart(), "one")
    assert [part._compiled_call_impl is not None for part in model.values()] == [True, False]


class Repeated(nn.Sequential):
    """Has two blocks and a last layer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        blocks = [nn.Sequential(nn.Linear(in_features, in_features), nn.Tanh()) for _ in range(2)]
        super().__init__(nn.Sequential(*blocks), nn.Linear(in_features, out_features))


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler
def test_what_a_model_repeats_is_compiled_by_itself_or_the_model_where_it_repeats_nothing(train, monkeypatch):
    parts, compiled, by_torch, whole = {"model": {"_target_": f"{__name__}.Repeated"}}, [], nn.Module.compile, []

    def compile_module(module: nn.Module, mode: str) -> None:
        compiled.append((module, mode))
        by_torch(module, backend="eager")

    expected = train(epochs=1, parts=parts)
    monkeypatch.setattr(nn.Module, "compile", compile_module)
    run = train(epochs=1, compile="block", parts=parts)
    assert flat(read(run.last)["model"]) == flat(read(expected.last)["model"])
    assert [(len(module), mode) for module, mode in compiled] == [(2, "default")] * 2
    monkeypatch.setattr(torch, "compile", lambda call, mode: whole.append(mode) or call)
    train(epochs=1, compile="block")
    assert (len(compiled), whole) == (2, ["default"])


class Apart(Task):
    """Trains the parts of a model apart."""

    def updates(self, step):
        return ("one", "other")

    def step(self, model, batch, update):
        return model[update](batch[0]).sum()


ALONE = {"parallel": {"_target_": "ddp_hydra.training.parallel.none.Unwrapped"}}
SPLIT = {"parallel": {"_target_": "ddp_hydra.training.parallel.dp.DP"}}


def test_data_parallel_splits_the_batches_of_the_training(train, monkeypatch):
    calls, forward = [], DataParallel.forward
    monkeypatch.setattr(DataParallel, "forward", lambda *given: calls.append(1) or forward(*given))
    split = train(epochs=1, parts=SPLIT)
    assert len(calls) == STEPS
    assert torch.equal(weights(split), weights(train(epochs=1, parts=ALONE)))


def test_what_does_not_go_with_data_parallel_is_refused(train, group):
    with pytest.raises(ConfigError, match=r"trainer\.compile=default does not go with parallel=dp.*give parallel=ddp"):
        train(parts=SPLIT, compile="default")
    with pytest.raises(ConfigError, match="the task its part one: give parallel=ddp"):
        DP().adopt(nn.ModuleDict({"one": nn.Identity()})).build_part(config().trainer, Apart(), "one")
