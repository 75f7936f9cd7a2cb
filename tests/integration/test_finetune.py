"""Fine-tuning of models of transformers: adapters in checkpoints, layouts, the export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_hydra.cli import export as commands
from ddp_hydra.errors import CheckpointError
from ddp_hydra.finetune import small_base
from ddp_hydra.training import load_run
from tests.integration.support import training
from tests.integration.support.training import Trained
from tests.integration.test_exactness import assert_equal
from tests.integration.test_fsdp2 import learned

pytestmark = pytest.mark.integration

SAVED, STEPS = 2, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    small_base.make(folder, steps=0, width=32, depth=2)
    return folder


@pytest.fixture(scope="module")
def train(project, base, tmp_path_factory) -> Callable[..., Trained]:
    def run(client: Any, *overrides: str, resume: Path | None = None, ranks: int = 2) -> Trained:
        words = (
            "experiment=finetune",
            f"model.path={base}",
            "data.batch_size=4",
            "data.length=16",
            "data.val=null",
            "optimizer.fused=false",
            f"trainer.max_steps={STEPS}",
            f"trainer.checkpoint_every_steps={SAVED}",
            "trainer.log_every_steps=1",
            "results.keep_checkpoints=null",
            "trainer.ema_decay=0.9",
        )
        folder = tmp_path_factory.mktemp("run") / "run"
        return training.train(client, project, folder, *words, *overrides, ranks=ranks, resume=resume)

    return run


@pytest.fixture(scope="module")
def saved(client2, train) -> Trained:
    return train(client2)


def step_file(run: Trained) -> Path:
    return run.folder / "checkpoints" / f"step-{SAVED:06d}.pt"


def test_a_checkpoint_holds_the_adapter_alone(saved, base):
    content = saved.checkpoint("last.pt")
    for state in (content["model"], content["ema"]["model"]):
        assert len(state) == 2 * 2 * 7
        assert all(".lora_" in name for name in state)
    assert content["base"]["path"] == str(base)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_resume_is_exact_and_in_another_layout_nearly(client2, train, saved, layout):
    resumed = train(client2, f"parallel={layout}", resume=step_file(saved))
    if layout == "ddp":
        assert_equal(learned(resumed), learned(saved))
    rest = [line for line in saved.metrics() if line["step"] > SAVED]
    for line, wanted in zip((one for one in resumed.metrics() if one["step"] > SAVED), rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)


@pytest.fixture
def export(saved, monkeypatch, tmp_path, project) -> Callable[..., Path]:
    """Run `ddp-hydra export` in this process, on a run that has a checkpoint alone."""
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))

    def run(form: str, *words: str, checkpoint: Path | None = None) -> Path:
        out = tmp_path / form
        file = checkpoint or saved.folder / "checkpoints" / "last.pt"
        commands.export([f"run={file}", f"format={form}", f"out={out}", *words])
        return out

    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(12).reshape(2, 6)).logits
    return found


@pytest.fixture
def wanted(saved, project, monkeypatch) -> torch.Tensor:
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    return logits(load_run.load(saved.folder / "checkpoints" / "last.pt").model)


def test_the_adapter_is_merged_into_a_folder_of_transformers(export, wanted, base, saved):
    folder = export("huggingface", "max_shard_size=60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), wanted)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base, dtype="float32")), wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.use_cache
    assert AutoTokenizer.from_pretrained(folder)("Python").input_ids
    export("huggingface", "overwrite=true")
    assert not (folder / "model.safetensors.index.json").exists()


def test_the_adapter_alone_is_a_folder_of_peft(export, wanted, base):
    from peft import PeftModel

    folder = export("huggingface", "merge=false")
    assert sorted(path.name for path in folder.glob("*.[js]*")) == ["adapter_config.json", "adapter_model.safetensors"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), folder)
    torch.testing.assert_close(logits(model), wanted)


def test_the_adapter_is_merged_into_one_file(export, wanted, base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model.load_state_dict(torch.load(export("torch"), weights_only=True))
    torch.testing.assert_close(logits(model), wanted)
    again = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    load_model(again, export("safetensors"))
    torch.testing.assert_close(logits(again), wanted)


def test_a_tied_layer_that_has_an_adapter_is_untied(client2, train, export):
    run = train(client2, "adapter.target_modules=[lm_head]", "trainer.ema_decay=null", ranks=1)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        folder = export("huggingface", checkpoint=run.folder / "checkpoints" / "last.pt")
        ours = load_run.load(run.folder / "checkpoints" / "last.pt").model
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), logits(ours))


def test_a_sharded_checkpoint_of_all_weights_is_exported(client2, train, export):
    options = ("adapter=none", "parallel=fsdp2", "trainer.shard_above_gb=0")
    run = train(client2, *options, "~adapter.target_modules")
    folder = run.folder / "checkpoints" / f"step-{STEPS:06d}"
    model = AutoModelForCausalLM.from_pretrained(export("huggingface", checkpoint=folder))
    torch.testing.assert_close(logits(model), logits(load_run.load(folder).model))


def test_text_is_generated_by_the_model_s_own_tokenizer(saved, project, monkeypatch, capsys):
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    run = f"run={saved.folder / 'checkpoints' / 'last.pt'}"

    def said(*words: str) -> str:
        commands.generate([run, "max_new_tokens=8", *words])
        return capsys.readouterr().out

    first = said("prompt=The class", "n=2", "seed=1")
    assert first.count("The class") == 2
    assert said("prompt=The class", "n=2", "seed=1") == first != said("prompt=The class", "n=2", "seed=2")
    assert "Hello" not in said("prompt=Hello", "chat=true")
    assert said() != ""


def test_another_base_is_refused(saved, base, tmp_path, project, monkeypatch):
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    other = tmp_path / "other"
    small_base.make(other, steps=1, width=32, depth=2)
    file = saved.folder / "checkpoints" / "last.pt"
    with pytest.raises(CheckpointError, match=r"the weights of model.path=.*other are others"):
        load_run.load(file, overrides=[f"model.path={other}"])
    with pytest.raises(CheckpointError, match="holds an adapter of .*: give adapter=lora"):
        load_run.load(file, overrides=["~adapter._target_"])
