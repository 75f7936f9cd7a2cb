from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from ddp_hydra.config import checkpoint_config
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.training import load_run
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.load_run import refuse_reads, refuse_targets
from tests.ddp_hydra.training.loop_runs import weights

DATA = {
    "data": {"n": 9, "train": {"_target_": "tests.ddp_hydra.training.loop_runs.Numbers", "n": "${data.n}"}},
    "cluster": {"password": "hunter2"},
}


@pytest.mark.medium
@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_trained_model_is_the_one_that_was_evaluated(ema_decay, train, tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = train(ema_decay=ema_decay, parts=DATA)
    content = read(run.last)
    assert "hunter2" not in str(content["config"])
    changed = load_run.load(run.last, overrides=["data.n=7"], trust=True)
    assert (len(changed.train_set), changed.config["data"]["train"]["n"]) == (7, "${data.n}")
    found = load_run.load(run.last, trust=True)
    for name, value in (content["ema"] if ema_decay else content)["model"].items():
        assert torch.equal(found.model.state_dict()[name], value)
    assert (found.step, found.model.training, len(found.train_set)) == (8, False, 9)


def test_there_are_two_checkpoints_to_choose_from(tmp_path):
    with pytest.raises(ConfigError, match="which=lst: give best or last"):
        load_run.load(tmp_path, "lst")


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "torch.os.system", "torch.hub.load", "torch.nn.Module.load_state_dict", "timm.create_model",
        "ddp_hydra.data.draws.torch.hub.load", "torchvision.datasets.utils.download_url", "data.digits.torch.hub.load",
        "torchvision.models.WeightsEnum.get_state_dict", "torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict",
        "torch.utils.data.datapipes.iter.RoutedDecoder", "torchvision.datasets.LSUN",
        "ddp_hydra.finetune.models.save", "ddp_hydra.finetune.adapter.save", "data.pet_names.download",
    ],
)  # fmt: skip
def test_a_lone_checkpoint_builds_what_is_known_only(target):
    cfg = OmegaConf.create({"model": {"_target_": "torch.nn.Linear", "head": [{"_target_": target}]}})
    with pytest.raises(ConfigError, match=rf"^model\.head\.0\._target_={target} is from .* Type trust=true"):
        refuse_targets(cfg, ["model.width=3"])
    refuse_targets(cfg, groups=["model"])
    refuse_targets(cfg, [f"model.head.0._target_={target}"])
    refuse_targets(cfg, [f"+model.head=[{{_target_:{target}}}]"])


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True}, {"trust_remote_code": [False]}, {"trust_remote_code": {"a": 0}},
        {"weights_only": False}, {"weights_only": {}}, {"weights_only": []}, {"use_kernels": [0]},
        {"attn_implementation": "user/kernel"}, {"attn_implementation": {"": "user/kernel"}},
        {"more": {"trust_remote_code": [[True]]}},
    ],
    ids=str,
)  # fmt: skip
def test_a_lone_checkpoint_lets_no_file_run_code(options):
    cfg = OmegaConf.create({"model": {"_target_": "torch.nn.Linear", **options}})
    with pytest.raises(ConfigError, match=r"^model\..* is from .* Type trust=true"):
        refuse_targets(cfg)


def test_options_that_run_nothing_are_taken():
    options = {"trust_remote_code": False, "weights_only": True, "attn_implementation": "sdpa", "use_kernels": []}
    refuse_targets(OmegaConf.create({"model": {"_target_": "torch.nn.Linear", **options}}))


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.MSELoss", "torchvision.models.resnet18", "torchvision.transforms.v2.MixUp", "models.resnet.resnet18",
        "ddp_hydra.tasks.Classification", "ddp_hydra.data.wids.WidsImages", "ddp_hydra.data.huggingface.load",
        "torchmetrics.classification.MulticlassAccuracy", "data.digits.Digits", "models.no.such",
        "ddp_hydra.finetune.models.causal_lm", "ddp_hydra.finetune.adapter.lora",
        "torch.tensor", "torch.utils.data.Subset", "torch.nn.functional.huber_loss", "torch.nn.functional.gelu",
    ],
)  # fmt: skip
def test_a_lone_checkpoint_builds_what_ships_and_what_is_of_the_project(target):
    refuse_targets(OmegaConf.create({"model": {"_target_": target}, "optimizer": {"_target_": "lion.Lion"}}))


def test_a_lone_checkpoint_hides_no_interpolation():
    hidden = {"model": {"_target_": "torch.nn.Linear", "head": r"\${optimizer}"}}
    cfg = checkpoint_config.composed({"data": {}, "optimizer": {"_target_": "lion.Lion"}, **hidden})
    with pytest.raises(ConfigError, match=r"^model\.head=\\\$\{optimizer\} is from a checkpoint"):
        refuse_targets(cfg)


@pytest.mark.parametrize(
    "read", ["${oc.env:TOKEN}", "s3://b/${oc.env:TOKEN,a}", "${oc.${part}:TOKEN}", "${oc.decode:x}"]
)
def test_a_lone_checkpoint_reads_no_environment(read):
    stored = {"data": {"train": {"bucket": read}}}
    with pytest.raises(
        ConfigError, match=r"^data\.train\.bucket=.*TOKEN|oc.decode.*Type data\.train\.bucket=<value>, or"
    ):
        refuse_reads(stored)
    refuse_reads(stored, groups=["data"])
    refuse_reads(stored, [f"data.train.bucket={read}"])
    kept = {
        "task": {"ignore": "${oc.select:task.ignore,null}"},
        "data": {"a": "${data.b}/x", "c": r"\d{2}", "d": "${of_set:b}"},
    }
    refuse_reads(kept)


def test_code_of_a_data_set_is_not_fetched_for_a_lone_checkpoint():
    runs_code = {"trust_remote_code": True, "weights_only": False, "use_kernels": True, "attn_implementation": "a/b"}
    for name, value in runs_code.items():
        with pytest.raises(ConfigError, match=f"{name}={value} is from"):
            refuse_targets(OmegaConf.create({"model": {name: value}}))
    for attention in ("sdpa", {"text_config": "sdpa", "vision_config": "eager"}):
        refuse_targets(OmegaConf.create({"model": {"weights_only": True, "attn_implementation": attention}}))


def test_a_run_directory_is_own_and_a_lone_file_or_a_url_is_not(train, tmp_path):
    lone, run = tmp_path / "a.pt", tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    for file in (lone, run / "checkpoints" / "best.pt"):
        file.touch()
    own = {place: RunRef.own(place).is_own for place in (lone, run, run / "checkpoints" / "best.pt", "s3://photos/run")}
    assert list(own.values()) == [False, True, True, False]
    with pytest.raises(ConfigError, match=r"data\.train\._target_=tests\..* Type trust=true"):
        load_run.load(train(epochs=1, parts=DATA).last)


@pytest.mark.medium
def test_a_run_may_begin_with_the_weights_of_another_but_its_last_layer(train, tmp_path):
    start = train(epochs=3)
    same = train(epochs=1, start=start.last, parts={"optimizer": {"lr": 1e-30}})
    assert torch.allclose(weights(same), weights(start))
    assert "weights   all from a file" in same.header
    wider = train(
        epochs=1, start=start.last, parts={"model": {"_target_": "tests.ddp_hydra.training.test_load_run.Deeper"}}
    )
    assert "weights   all from a file but head.weight, head.bias" in wider.header


class Deeper(torch.nn.Linear):
    """With one layer more."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state}], ids=["bare", "wrapped"])
def test_anybodys_weights_will_do(wrap, train, tmp_path):
    file = tmp_path / "weights.pth"
    values = {"module.weight": torch.ones(3, 4), "module.bias": torch.zeros(3)}
    torch.save(wrap(values), file)
    run = train(epochs=1, start=file, parts={"optimizer": {"lr": 1e-30}})
    assert torch.equal(read(run.last)["model"]["weight"], torch.ones(3, 4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(2)},
            r"weights for 0 of the 2 tensors.*begin with a, b, the model's with",
        ),
        ([1, 2], r"holds no weights"),
        (b"nothing", r"can't be read as weights"),
    ],
)
def test_what_are_no_weights_of_this_model_are_refused(content, said, train, tmp_path):
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=said):
        train(start=file)


def test_a_lone_checkpoint_is_refused_before_anything_of_it_is_resolved(monkeypatch, tmp_path):
    content = {"config": {"data": {"train": {"bucket": "${oc.env:TOKEN}"}}}}
    monkeypatch.setattr(load_run, "read", lambda path: content)
    monkeypatch.setattr(load_run, "needed", dict)
    monkeypatch.setattr(checkpoint_config, "composed", lambda *_, **__: pytest.fail("it was resolved"))
    (tmp_path / "a.pt").touch()
    with pytest.raises(ConfigError, match=r"^data\.train\.bucket=.* may not read this machine's environment"):
        load_run.load(tmp_path / "a.pt")
