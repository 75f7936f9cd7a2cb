from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.tasks import Classification, Task
from ddp_hydra.training import cost, profiler
from tests.ddp_hydra.training.loop_runs import config


class Named(nn.Module):
    """Is called by its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Sequential(nn.Linear(10, 20), nn.ReLU()), nn.Linear(20, 5)


class ByNames(Task):
    def step(self, model, batch):
        return model.other(model.one(batch) + model.one(2 * batch)).sum()


def test_operations_by_hand_also_where_a_task_calls_parts_of_the_model_and_one_of_them_twice():
    found = cost.forward_pass(Named(), ByNames(), "", torch.zeros(3, 10), config())
    assert found.flops == 3 * 2 * (2 * 10 * 20 + 20 * 5)
    assert found.parts == {"one": 3 * 800, "other": 3 * 200}


def test_a_task_of_ours_may_need_values_after_the_models_pass_and_a_mix_before_it():
    class Some(Task):
        def step(self, model, batch):
            found = model(batch)
            return found[found > 0].sum()

    class Ours(Some):
        __module__ = "ddp_hydra.tasks.some"

    def mix(x, y):
        return float(x.sum()) * x, y

    model = nn.Linear(10, 5)
    assert cost.forward_pass(model, Ours(), "", torch.zeros(3, 10), config()) == cost.Pass(None, 300, {})
    assert cost.forward_pass(model, Some(), "", torch.zeros(3, 10), config()) is None, "it might go on to another pass"
    classes = Classification(nn.CrossEntropyLoss(), mix=mix)
    found = cost.forward_pass(model, classes, "", (torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64)), config())
    assert (found.flops, classes.mix) == (300, mix)
    assert found.activations > 0
    assert not model._forward_hooks


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
