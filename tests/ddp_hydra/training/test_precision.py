from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training import builders
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.state import together
from tests.ddp_hydra.training.loop_runs import weights


def cfg(precision: str) -> DictConfig:
    return OmegaConf.create({"trainer": {"precision": precision}})


@pytest.fixture
def settings_restored() -> Iterator[None]:
    yield
    builders.set_float32(cfg("fp32"))


@pytest.mark.usefixtures("settings_restored")
def test_only_tf32_lets_matrix_products_be_less_and_convolutions_stay_as_torch_has_them():
    found = []
    for name in ("tf32", "bf16", "tf32", "fp32"):
        builders.set_float32(cfg(name))
        found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    assert found == [("high", True), ("highest", True)] * 2


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)])
def test_products_are_of_the_precision_that_was_asked_for(name, dtype):
    with builders.autocast(cfg(name), torch.device("cpu")):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == (dtype or torch.float32)
    assert builders.scaler(cfg(name), torch.device("cpu")).is_enabled() is (name == "fp16")


class Times(CrossEntropy):
    """A loss so many times as steep."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * super().__call__(logits, target)


def times(factor: float, lr: float) -> dict[str, Any]:
    loss = {"_target_": "tests.ddp_hydra.training.test_precision.Times", "factor": factor}
    return {"loss": loss, "optimizer": {"lr": lr}}


@pytest.mark.medium
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_as_many_bits_come_close(name, train):
    gentle = times(0.01, lr=10)  # all of its gradients fit fp16
    whole, half = train(parts=gentle), train(precision=name, parts=gentle)
    assert 0 < (weights(half) - weights(whole)).abs().max() < 0.02
    assert read(half.last)["model"]["weight"].dtype == torch.float32


@pytest.mark.medium
def test_gradients_that_are_too_large_for_fp16_lower_the_scale_and_leave_the_step_out(train):
    run = train(precision="fp16", log_every_steps=1, parts=times(30, lr=1e-3))
    scales = [scale for _, scale in run.metrics("loss_scale")]
    assert scales[0] == 2**15  # half of what it begins with
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] == scales[-2]  # they fit
    assert weights(run).isfinite().all()
    first = train(precision="fp16", max_steps=1, parts=times(30, lr=1e-3))
    start = train(max_steps=1, parts={"optimizer": {"lr": 1e-30}})
    assert torch.equal(weights(first), weights(start))
    assert not torch.equal(weights(run), weights(start))


def test_scalers_of_several_updates_begin_anew_where_those_of_the_checkpoint_were_off():
    scalers = together({name: torch.amp.GradScaler("cpu") for name in ("one", "two")})
    off = together({name: torch.amp.GradScaler("cpu", enabled=False) for name in scalers})
    before = scalers.state_dict()
    scalers.load_state_dict(off.state_dict())
    assert scalers.state_dict() == before
    assert before["one"]["scale"] == 2**16


def test_fp8_needs_a_gpu_that_has_it_and_torchao(monkeypatch):
    gpu, model = torch.device("cuda"), torch.nn.Linear(16, 16)
    with pytest.raises(ConfigError, match=r"^trainer\.precision=fp8 needs a GPU .* computes on the CPU: give .*=bf16$"):
        builders.with_float8(model, cfg("fp8"), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or newer, and NVIDIA A100 has 8\.0: give "):
        builders.with_float8(model, cfg("fp8"), gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torchao, .* type `pip install torchao` there, or give"):
        builders.with_float8(model, cfg("fp8"), gpu)
    assert builders.with_float8(model, cfg("bf16"), gpu) is model


def test_fp8_converts_linear_layers_whose_sides_it_can_cut(monkeypatch):
    def convert(model, module_filter_fn):
        return [name for name, layer in model.named_modules() if module_filter_fn(layer, name)]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(builders, "get_object", lambda name: convert)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 10), torch.nn.Conv1d(16, 16, 1))
    assert builders.with_float8(model, cfg("fp8"), torch.device("cuda")) == ["0"]
