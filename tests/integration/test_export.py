"""A trained model is written for other programs, and computes the same there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_hydra.cli import export as commands
from ddp_hydra.errors import DdpHydraError
from tests.integration.project.data.tiny import Points
from tests.integration.project.models.tiny import Tiny

pytestmark = pytest.mark.integration

TINY = ("model=tiny", "data=tiny", "scheduler=none", "trainer.epochs=1", "trainer.device=cpu", "cluster=inline")


@pytest.fixture(scope="module")
def run(module_cli) -> Path:
    module_cli.done(*TINY, "trainer.ema_decay=0.9", "model.norm=true", "hydra.run.dir=run")
    return module_cli.folder / "run"


@pytest.fixture(scope="module")
def wanted(run) -> torch.Tensor:
    """What the model says to five points; its average was validated, so it is the average that is exported."""
    model = Tiny(num_classes=4, norm=True).eval()
    model.load_state_dict(torch.load(run / "checkpoints" / "best.pt", weights_only=True)["ema"]["model"])
    with torch.no_grad():
        return model(points())


def points() -> torch.Tensor:
    return Points(5, seed=3).x


def test_safetensors_hold_the_weights(module_cli, run, wanted):
    from safetensors.torch import load_file

    said = module_cli.done("export", f"run={run}", "format=safetensors", "out=model.safetensors").stdout
    assert "differs from the model by at most 0, on batches of 2 and 3" in said
    model = Tiny(num_classes=4, norm=True).eval()
    model.load_state_dict(load_file(module_cli.folder / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(model(points()), wanted)
    again = module_cli.run("export", f"run={run}", "format=safetensors", "out=model.safetensors")
    assert (again.returncode, "overwrite=true" in again.stderr) == (1, True)


def test_a_torch_export_runs_without_the_model_s_code_for_any_batch(module_cli, run, wanted):
    said = module_cli.done("export", f"run={run}", "format=torch_export", "out=model.pt2").stdout
    assert "for any batch size" in said
    assert "takes input 0 (2, 6) float32" in said
    program = torch.export.load(module_cli.folder / "model.pt2").module()
    torch.testing.assert_close(program(points()), wanted)


@pytest.mark.slow
def test_an_onnx_file_runs_in_onnxruntime_for_any_batch(module_cli, run, wanted):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert "for any batch size" in module_cli.done("export", f"run={run}", "format=onnx").stdout
    session = onnxruntime.InferenceSession(module_cli.folder / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["output"], {"input": points().numpy()})
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["format=onxx"], "give torch, safetensors, huggingface, torch_export, onnx"),
        ([], "format=torch|safetensors|huggingface|torch_export|onnx is missing; type ddp-hydra export --help"),
        (["format=huggingface"], "is for models of transformers, and this is a Tiny: give format=safetensors"),
        (["format=safetensors", "tolerance=-1"], "differs by up to 0"),
        (["format=torch_export", "input_shape=[[7],[7]]"], "input_shape=[[7], [7]]: give the sizes of one sample"),
        (["format=torch_export", "input_shape=[7]"], "can't be called with input 0 (2, 7) float32"),
    ],
)
def test_what_it_cannot_do_is_said_and_nothing_is_written(project_here, run, tmp_path, arguments, said):
    with pytest.raises(DdpHydraError, match=re.escape(said)):
        commands.export([f"run={run}", *arguments, f"out={tmp_path / 'never'}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_that_was_trained_on_a_stream_gets_its_example_from_there(module_cli):
    words = ("model=tiny", "data=stream", "scheduler=none", "trainer.epochs=1", "trainer.device=cpu", "cluster=inline")
    module_cli.done(*words, "trainer.max_steps=3", "hydra.run.dir=streamed")
    run = module_cli.folder / "streamed"
    said = module_cli.done("export", f"run={run}", "format=torch_export", "out=streamed.pt2").stdout
    assert "on batches of 2 and 3" in said
    few = module_cli.run("export", f"run={run}", "format=safetensors", "out=few.safetensors", "data.val.n=1")
    assert (few.returncode, "the data set has 1 samples, and an example needs 2" in few.stderr) == (1, True)
