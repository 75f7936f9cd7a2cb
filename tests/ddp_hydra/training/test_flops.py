from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.tasks import Task
from ddp_hydra.training import profiler
from ddp_hydra.training.train_step import TrainStep


def test_operations_by_hand():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    cost = profiler.count_flops(model, lambda: model(torch.zeros(3, 10)), 3)
    assert cost.forward == 2 * (10 * 20 + 20 * 5)
    assert cost.parts == {"0": ("Linear", 220, 400), "1": ("ReLU", 0, 0), "2": ("Linear", 105, 200)}
    assert model.training


class Named(nn.Module):
    """Is called by its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Sequential(nn.Linear(10, 20), nn.ReLU()), nn.Linear(20, 5)


class ByNames(Task):
    def step(self, model, batch):
        return model.other(model.one(batch) + model.one(2 * batch)).sum()


def test_a_task_may_call_parts_of_the_model_and_one_of_them_twice():
    model = Named()
    step = TrainStep(ByNames(), model)
    cost = profiler.count_flops(model, lambda: step.unwrapped(torch.zeros(3, 10)), 3)
    assert cost.forward == 2 * (2 * 10 * 20 + 20 * 5)
    assert cost.parts == {"one": ("Sequential", 220, 800), "other": ("Linear", 105, 200)}


@pytest.mark.medium
def test_a_compiled_model_is_counted_before_it_is_compiled():
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    compiled = []
    model.compile(backend=lambda graph, inputs: compiled.append(graph) or graph)
    cost = profiler.count_flops(model, lambda: model(torch.zeros(3, 10)), 3)
    assert cost.parts == {"0": ("Linear", 220, 400), "1": ("Linear", 105, 200)}
    assert compiled == []
    model(torch.zeros(3, 10))
    assert len(compiled) == 1


def test_a_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[1].eval()  # it is frozen
    before = {name: part.clone() for name, part in model.state_dict().items()}
    assert profiler.count_flops(model, lambda: model(torch.randn(1, 3, 8, 8))).forward == 2 * 36 * 4 * 27
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    assert [part.training for part in model.modules()] == [True, True, False]


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 495),
        ("NVIDIA A100-SXM4-40GB", "fp16", 312),
        ("NVIDIA A10G", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA H200", "fp32", None),
        ("some card", "bf16", None),
    ],
)
def test_peaks_go_by_the_name(device, precision, peak):
    assert profiler.peak_tflops(device, precision) == peak


def test_the_share_of_the_peak(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert profiler.utilisation(240e12, gpu, "bf16") == pytest.approx(240 / 989)
    assert profiler.utilisation(240e12, gpu, "fp32") is None
    assert profiler.utilisation(240e12, cpu, "bf16") is None
