"""What a model costs is told without computing it, and is what it costs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torchvision
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

import ddp_hydra
from ddp_hydra import results
from ddp_hydra.data.batch import n_tokens
from ddp_hydra.tasks import Classification
from ddp_hydra.training import cost, setup
from ddp_hydra.training.loop import first_step
from ddp_hydra.training.monitor import Throughput
from ddp_hydra.training.parallel import parameter_groups, weights
from tests.ddp_hydra.training.loop_runs import Numbers, config
from tests.ddp_hydra.training.loop_runs import weights as weights_of

TASK = Classification(F.cross_entropy)


def settings(*again: str, precision: str = "fp32") -> Any:
    return OmegaConf.create({"trainer": {"precision": precision, "activation_checkpointing": list(again)}})


def batch(samples: int = 4, width: int = 64, device: str = "meta") -> Any:
    return torch.empty(samples, 3, width, width, device=device), torch.zeros(samples, dtype=torch.long, device=device)


def really_kept(model: nn.Module, given: Any) -> int:
    """Return the bytes that autograd keeps of a step."""
    known = {one.untyped_storage().data_ptr() for one in [*weights.tensors_of(model), *given]}
    kept = {}

    def add(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(add, lambda tensor: tensor):
        loss = TASK.step(model, given).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.medium
def test_activations_are_what_autograd_keeps():
    make = lambda: torchvision.models.resnet18(num_classes=10)  # noqa: E731
    outline = weights.built_on_meta(make)
    found = cost.forward_pass(outline, TASK, "", batch(), settings())
    assert weights.on_meta(outline)
    assert found.activations == pytest.approx(really_kept(make(), batch(device="cpu")), rel=0.01)
    assert found.flops == pytest.approx(4 * 2 * 148e6, rel=0.01)  # 148 million multiplications for a sample
    again = cost.forward_pass(outline, TASK, "", batch(), settings("BasicBlock"))
    assert again.activations < 0.8 * found.activations


class Looks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.mean())


def test_a_model_that_needs_values_has_unknown_activations():
    assert cost.forward_pass(Looks(8, 3), TASK, "", (torch.zeros(4, 8), torch.zeros(4).long()), settings()) is None


class Keeps(Classification):
    """Keeps what its steps have counted and computed."""

    def __init__(self, criterion: Any) -> None:
        super().__init__(criterion)
        self.n, self.mean, self.seen, self.teacher = 0, torch.ones(()), [], nn.Linear(4, 3).requires_grad_(False)

    def step(self, model: Any, batch: Any) -> Any:
        found = super().step(model, batch)
        self.n += torch.is_grad_enabled()
        self.mean = 0.9 * self.mean + 0.1 * found.loss.detach()
        self.seen.append(found.loss.detach())
        for old, new in zip(self.teacher.parameters(), model.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data
        ddp_hydra.log(mean=self.mean)
        return found._replace(loss=found.loss / self.mean)


class Draws(Keeps):
    """Draws by generators of its own."""

    def __init__(self, criterion: Any) -> None:
        super().__init__(criterion)
        self.random = torch.Generator()
        self.teacher.random = torch.Generator()

    def step(self, model: Any, batch: Any) -> Any:
        drawn = [torch.rand((), generator=one) for one in (self.random, self.teacher.random)]
        found = super().step(model, batch)
        return found._replace(loss=found.loss * sum(drawn))


class Locked(Keeps):
    def __init__(self, criterion: Any) -> None:
        super().__init__(criterion)
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [Keeps, Draws, Locked])
def test_an_estimate_leaves_the_task_the_logged_means_and_the_generators_as_they_are(kind):
    task, state = kind(F.cross_entropy), torch.get_rng_state()
    weight = task.teacher.weight.clone()
    given = torch.zeros(4, 4, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
    found = cost.forward_pass(nn.Linear(4, 3, device="meta"), task, "", given, settings())
    assert (found is None) == (kind is Locked), "a task that can't be copied has no estimate"
    assert (task.n, task.mean, task.seen) == (0, torch.ones(()), [])
    assert type(task.teacher.weight.data) is torch.Tensor
    assert task.teacher.weight.equal(weight)
    assert results.take_means() == {}
    assert torch.get_rng_state().equal(state)


@pytest.mark.medium
def test_a_profile_and_a_large_model_train_as_without_an_estimate(train, monkeypatch):
    task = {"task": {"_target_": f"{__name__}.Keeps"}}
    alone = train(whole=task)
    monkeypatch.setattr(setup, "LARGE", 0)
    for told in (train(whole=task), train(whole=task, profile_steps=2)):
        assert [line for line in told.header if line.startswith("memory")]
        assert weights_of(told).equal(weights_of(alone))


@pytest.mark.usefixtures("group")
def test_a_dry_run_tells_what_a_rank_needs():
    parts = {"cluster": {"n_workers": 2}, "dispatch": {"ranks": None}, "optimizer": {"momentum": 0.9}}
    lines = first_step(OmegaConf.merge(config(), parts), Numbers(9), Numbers(5))
    (line,) = [line for line in lines if line.startswith("memory")]
    assert line == (
        "memory    208 B a rank: weights 60 B, gradients 60 B, optimizer 60 B, activations 28 B, on 2 ranks"
    )
    assert lines[-1] == "dry run: all of it works"


def huge(in_features: int, out_features: int) -> nn.Module:
    """Return a model of 1.2 trillion parameters."""
    width = 2**17
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(70)]
    return nn.Sequential(nn.Linear(in_features, width), nn.Sequential(*layers), nn.Linear(width, out_features))


@pytest.mark.medium
def test_a_dry_run_of_a_model_without_memory_for_it(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 3e12})())
    parts: dict[str, Any] = {"cluster": {"n_workers": 2}, "dispatch": {"ranks": None}}
    parts["model"] = {"_target_": f"{__name__}.huge"}
    said = "\n".join(first_step(OmegaConf.merge(config(), parts), Numbers(9), None))
    assert "weights 4.8 TB, gradients 4.8 TB" in said
    assert "3.0 TB are there: it fits with parallel=fsdp2 on 8" in said
    assert "dry run: no step was made, since one process needs 14.4 TB for it, and 3.0 TB are free here" in said
    parts["parallel"] = {"_target_": "ddp_hydra.training.parallel.fsdp2.FSDP2"}
    said = "\n".join(first_step(OmegaConf.merge(config(), parts), Numbers(9), None))
    assert "weights 2.4 TB, gradients 2.4 TB, optimizer 2.4 TB, gathered" in said
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 3e9})())
    said = "\n".join(first_step(OmegaConf.merge(config(), parts), Numbers(9), None))
    assert "3.0 GB are there: too little with any number of ranks" in said


def test_frozen_parts_have_no_gradients():
    cfg = OmegaConf.merge(config(), {"trainer": {"freeze": ["weight"]}})
    outline = cost.build_outline(cfg, None)
    memory = cost.memory_of(cfg, outline, cost.outlined_optimizers(cfg, outline, TASK, [""]))
    assert (memory.weights, memory.gradients) == (60, 12)
    assert parameter_groups.frozen_norms(outline, ["weight"]) == []


class Transformer(nn.Module):
    """Has 1,000 parameters in a head, 300 in a table, and the sizes of a transformer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.config = OmegaConf.create({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 12})
        self.head, self.table = nn.Linear(10, 100, bias=False), nn.Embedding(30, 10)
        if tied:
            self.table.weight = self.head.weight


def test_operations_of_a_transformer_are_torchtitans():
    found = cost.operations_of(Transformer())
    assert (found.parameters, found.attention) == (1000, 12 * 2 * 3 * 4)
    assert found.per_s(10, 500) == 500 * (6 * 1000 + 288 * 50)
    assert cost.operations_of(Transformer(tied=True)).parameters == 1000
    frozen = Transformer()
    frozen.head.requires_grad_(False)
    assert 6 * cost.operations_of(frozen).parameters == pytest.approx(4000)
    assert cost.operations_of(nn.Linear(2, 2)) is None
    assert cost.Operations(sample=7.0).per_s(10, 0) == 70


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2)}, 10),
        ((torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5)), 10),
        ((torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)), 0),
        ((torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2)), 0),
        ([], 0),
    ],
)
def test_tokens_of_a_batch(given, tokens):
    assert n_tokens(given) == tokens


def test_a_run_tells_tokens_and_utilisation(train, monkeypatch):
    monkeypatch.setattr("ddp_hydra.training.setup.utilisation", lambda *_: 1.0)
    monkeypatch.setattr("ddp_hydra.training.monitor.utilisation", lambda flops_per_s, *_: flops_per_s / 1e12)
    monkeypatch.setattr("ddp_hydra.training.monitor.n_tokens", lambda batch: 10 * len(batch[0]))
    run = train()
    for step, speed in run.metrics("samples_per_s"):
        assert dict(run.metrics("tokens_per_s"))[step] == pytest.approx(10 * speed)
        assert dict(run.metrics("mfu"))[step] == pytest.approx(3 * 2 * 12 * speed / 1e12)
    assert run.value["tokens_per_s"] == pytest.approx(10 * run.value["samples_per_s"], rel=0.2)
    assert run.value["mfu"] > 0
    speed = Throughput(8).totals(8)
    assert speed == {"train_s": speed["train_s"], "samples_per_s": None}, "nothing was left to train"
