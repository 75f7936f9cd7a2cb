"""What is written for other programs; tests/integration/test_export.py reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import ddp_hydra
from ddp_hydra import results
from ddp_hydra.cli import export as command
from ddp_hydra.errors import CheckpointError, ConfigError, RecordError
from ddp_hydra.training import export, load_run
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.export import Example, example_of
from ddp_hydra.training.load_run import TrainedModel
from ddp_hydra.training.parallel import Parallel
from tests.ddp_hydra.training.loop_runs import Numbers, config
from tests.support.disk import files_up_to

EXAMPLE = Example((torch.randn(2, 4),), {})


def trained(**data: Any) -> TrainedModel:
    cfg = OmegaConf.merge(config(), {"data": data})
    kept = OmegaConf.to_container(cfg)
    OmegaConf.resolve(cfg)
    return TrainedModel(cfg, Parallel().adopt(nn.Linear(4, 3).eval()), DataDescription(), torch.device("cpu"), 8, kept)


def test_the_config_in_a_file_keeps_interpolations_whose_values_may_be_secret(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors")
    monkeypatch.setenv("STORE_LOGIN", "top-secret")
    run = trained(login="${oc.env:STORE_LOGIN}", key="top-secret")
    export.export(run, EXAMPLE, "safetensors", tmp_path / "m", 0)
    with safetensors.safe_open(tmp_path / "m", "pt") as file:
        meta = file.metadata()
    assert "top-secret" not in str(meta)
    assert json.loads(meta["config"])["data"] == {"batch_size": 2, "login": "${oc.env:STORE_LOGIN}", "key": "***"}


@pytest.mark.medium
@pytest.mark.parametrize("form", ["torch", "safetensors", "torch_export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_disk_that_refuses_the_file_is_one_sentence(form, tmp_path):
    for package in {"safetensors": ["safetensors"], "onnx": ["onnxruntime", "onnxscript"]}.get(form, []):
        pytest.importorskip(package)
    said = rf"^cannot write {tmp_path}/m: File too large; the file is larger than this system"
    with files_up_to(100), pytest.raises(RecordError, match=said):
        export.export(trained(), EXAMPLE, form, tmp_path / "m", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_not_be_written_is_told_before_the_run_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    for out in ("file/m", "file/x/m"):
        said = rf"^cannot write {tmp_path}/{out[:-2]}: .*; a file is in the place of a folder; choose another place$"
        with pytest.raises(RecordError, match=said):
            command.export(["run=nowhere", "format=torch", f"out={tmp_path}/{out}"])
    with pytest.raises(CheckpointError, match="nowhere"):
        command.export(["run=nowhere", "format=torch", f"out={tmp_path}/new/folder/m"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_weights_beside_an_onnx_file_have_its_name_and_stay_where_another_export_fails(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(export, "_ONE_FILE_BYTES", 10)
    run, out = trained(), tmp_path / "out" / "m.onnx"
    out.parent.mkdir()
    export.export(run, EXAMPLE, "onnx", out, 1e-4)
    with pytest.raises(ConfigError, match="nothing was written"):
        export.export(trained(), EXAMPLE, "onnx", out, -1)
    assert sorted(path.name for path in out.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": EXAMPLE.args[0].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), run.model(*EXAMPLE.args).detach())


class Shifted(Numbers):
    """Numbers of named classes, moved by a transform."""

    def __init__(self, n: int, transform: float = 0.0, classes: tuple[str, ...] = ("a", "b", "c")) -> None:
        super().__init__(n)
        self.x, self.classes = self.x + transform, list(classes)


SHIFTED = {"_target_": f"{__name__}.Shifted"}
DATA = {"data": {"train": {**SHIFTED, "n": 9, "transform": 100.0}, "val": {**SHIFTED, "n": 5, "transform": 1.0}}}


@pytest.mark.medium
def test_the_example_is_read_as_validation_data_are_and_compared_with_the_training_data(train, tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = train(data=Shifted, parts=DATA)
    for split, n in (("val", 5), ("train", 9)):
        example = example_of(load_run.load(run.last, split=split, trust=True), split, None)
        assert torch.equal(example.args[0], Numbers(n).x[:2] + 1)
    other = load_run.load(run.last, overrides=["+data.val.classes=[b,a,c]"], split="val", trust=True)
    with pytest.raises(ConfigError, match=r"data\.val are b, a, c, and the model was trained on a, b, c"):
        example_of(other, "val", None)
    alone = train(data=Shifted, parts={"data": {**DATA["data"], "val": None}, "objective": {"metric": "train/loss"}})
    assert torch.equal(
        example_of(load_run.load(alone.last, split="val", trust=True), "val", None).args[0], Numbers(9).x[:2] + 100
    )


class Words(nn.Module):
    """Scores of a text, which are logged: `fixed` takes texts of seven words only."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(9, 4), nn.Parameter(torch.zeros(16, 4))
        self.scores, self.fixed = nn.Linear(28 if fixed else 4, 3), fixed

    def forward(self, input_ids, attention_mask):
        found = (self.embed(input_ids) + self.positions[: input_ids.shape[1]]) * attention_mask[..., None]
        ddp_hydra.log(size=found.square().mean())
        return {"logits": self.scores(found.flatten(1) if self.fixed else found.mean(1)), "states": (found, found)}


@pytest.fixture
def logged_apart() -> Iterator[None]:
    """Forget what a test logs outside of training; the next run of this process would write it."""
    yield
    results.take_means()


@pytest.mark.medium
@pytest.mark.usefixtures("logged_apart")
@pytest.mark.parametrize(("fixed", "free"), [(False, ("batch", "length")), (True, ("batch",))])
def test_texts_have_any_length_where_the_model_takes_it(fixed, free):
    model, mask = Words(fixed).eval(), torch.ones(2, 7, dtype=torch.long)
    example = Example((), {"input_ids": mask, "attention_mask": mask})
    program, found = export.exported(model, example)
    assert found == free
    shorter = example.of_size(3, 7 if fixed else 5)
    with torch.no_grad():
        assert export.compared(model, program.module(), shorter, 1e-4) < 1e-4
    assert export.output_names(model(**example.kwargs)) == ["logits", "states_0", "states_1"]
    assert [export.output_names(part) for part in (mask, (mask, mask))] == [["output"], ["output_0", "output_1"]]


class OfImages(nn.Module):
    """Takes a list of images, each of its own size, as torchvision's detection models do."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return torch.stack([self.convolution(image[None]).mean((0, 2, 3)) for image in images])


class OfPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4)

    def forward(self, packed):
        return self.rnn(packed)[1][0]


def trained_as(model: nn.Module, monkeypatch) -> TrainedModel:
    monkeypatch.setattr(export.builders, "model", lambda cfg, data: type(model)())
    return replace(trained(), parallel=Parallel().adopt(model.eval()))


@pytest.mark.medium
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("channels_first", [(3, 9, 9), (3, 8, 7)])
@pytest.mark.parametrize("form", ["torch", "safetensors", "torch_export"])
def test_a_list_of_samples_is_exported_in_its_size(form, kind, channels_first, tmp_path, monkeypatch):
    if form == "safetensors":
        pytest.importorskip("safetensors")
    images = kind([torch.randn(channels_first), torch.randn(3, 9, 9)])
    model, example = OfImages(), Example((images,), {})
    found = export.export(trained_as(model, monkeypatch), example, form, tmp_path / "m", 1e-4)
    assert found["sizes"] == (2,)
    assert ("batch" in found["dynamic"]) == (form != "torch_export"), "a file of weights takes any size"
    assert example.described() == {"input 0": f"[{channels_first} float32, (3, 9, 9) float32]"}
    if form == "torch_export":
        again = torch.export.load(tmp_path / "m").module()
        assert torch.allclose(again(images), model(images), atol=1e-5)


@pytest.mark.medium
def test_a_packed_sequence_is_refused_where_torch_export_takes_none(tmp_path, monkeypatch):
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    run, example = trained_as(OfPacked(), monkeypatch), Example((packed,), {})
    with pytest.raises(ConfigError, match=r"takes no PackedSequence, with which OfPacked is called: give format=torch"):
        export.export(run, example, "torch_export", tmp_path / "m", 1e-4)
    assert export.export(run, example, "torch", tmp_path / "m", 1e-4)["sizes"] == (2,)


class Tied(nn.Module):
    """Has a weight of two names whose numbers are not side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one.weight = self.two.weight = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Counting(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_safetensors_takes_tied_weights_in_any_layout_and_refuses_what_is_no_tensor(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    assert export.export(trained_as(Tied(), monkeypatch), EXAMPLE, "safetensors", tmp_path / "m", 0)["difference"] == 0
    with pytest.raises(ConfigError, match=r"^format=safetensors holds tensors only, and _extra_state is a dict: give"):
        export.export(trained_as(Counting(), monkeypatch), EXAMPLE, "safetensors", tmp_path / "n", 0)
    assert export.export(trained_as(Counting(), monkeypatch), EXAMPLE, "torch", tmp_path / "n", 1e9)["difference"] >= 0


class Leaves(nn.Module):
    """Leaves a frozen part out of its state, and takes a whole state only."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        nn.init.eye_(self.back.weight)
        nn.init.zeros_(self.back.bias)

    def forward(self, x):
        return self.head(self.back(x))

    def state_dict(self, *args, **kwargs):
        return {name: one for name, one in super().state_dict(*args, **kwargs).items() if "back" not in name}

    def load_state_dict(self, state):
        super().load_state_dict(state, strict=False)


def test_safetensors_of_a_model_that_loads_itself(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    assert (
        export.export(trained_as(Leaves(), monkeypatch), EXAMPLE, "safetensors", tmp_path / "m", 0)["difference"] == 0
    )
