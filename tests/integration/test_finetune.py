"""Fine-tuning of models of transformers, end to end: adapters in checkpoints, evaluation, text, export."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from ddp_hydra.cli import export as commands
from ddp_hydra.cli import inference
from ddp_hydra.config import schema, targets
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.errors import CheckpointError, ConfigError, RankFailed
from ddp_hydra.finetune import small_base
from ddp_hydra.job.run import run_job
from ddp_hydra.training import load_run
from ddp_hydra.training.parallel import weights
from tests.integration.support import training
from tests.integration.test_exactness import assert_equal
from tests.support.tiny_llm import write_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.medium]

SAVED, STEPS = 2, 4
SMALL = (
    "experiment=finetune",
    "data.batch_size=4",
    "data.sequence_length=16",
    "optimizer.fused=false",
    f"trainer.max_steps={STEPS}",
    f"trainer.checkpoint_every_steps={SAVED}",
    "trainer.log_every_steps=1",
    "trainer.ema_decay=0.9",
    "results.keep_checkpoints=null",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    small_base.make(folder, steps=2, width=32, depth=2)
    for name in ("train", "val"):  # fewer
        file = folder / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(True)[:80]))
    return folder


def files_of(base: Path) -> list[str]:
    return [f"model.path={base}", f"data.files={base}/train.jsonl", f"data.val_files={base}/val.jsonl"]


@pytest.fixture(scope="module", autouse=True)
def at_project(project) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_HYDRA_PROJECT", str(project))
        yield


@pytest.fixture(scope="module")
def train(project, base, tmp_path_factory) -> Callable[..., Path]:
    """Run a job in this process, where transformers is imported already."""

    def run(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("job") / "run"
        schema.register()
        with initialize_config_dir(str(project / "conf"), **VERSION_BASE):
            cfg = compose("config", [*SMALL, *files_of(base), "cluster=inline", *overrides])
        run_job(cfg, folder)
        (folder / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
        return folder

    return run


@pytest.fixture(scope="module")
def saved(train) -> Path:
    return train("adapter.lora_dropout=0.1")


def checkpoint(run: Path, name: str = "last.pt") -> Path:
    return run / "checkpoints" / name


def content_of(run: Path, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(checkpoint(run), weights_only=True)
    return {name: found[name] for name in names or ("model", "optimizer", "position", "scheduler", "ema", "base")}


def lines_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [{name: line[name] for name in line if name in ("step", "train/loss", "val/loss")} for line in lines]
    return [line for line in kept if line["step"] > SAVED]


def test_a_checkpoint_holds_the_adapter_alone(saved, base):
    content = content_of(saved)
    for state in (content["model"], content["ema"]["model"]):
        assert len(state) == 2 * 2 * 7
        assert all(".lora_" in name for name in state)
    assert content["base"]["path"] == str(base)


def test_a_resume_amid_an_epoch_is_exact(train, saved):
    resumed = train("adapter.lora_dropout=0.1", f"resume={checkpoint(saved, f'step-{SAVED:06d}.pt')}")
    assert_equal(content_of(resumed), content_of(saved))
    assert lines_of(resumed) == lines_of(saved) != []


@pytest.fixture
def export(saved, tmp_path) -> Callable[..., Path]:
    def write(form: str, *words: str, run: Path = saved) -> Path:
        out = tmp_path / form
        commands.export([f"run={run}", f"format={form}", f"out={out}", *words])
        return out

    return write


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(12).reshape(2, 6)).logits
    return found


@pytest.fixture(scope="module")
def wanted(saved) -> torch.Tensor:
    return logits(load_run.load(saved).model)


def test_the_adapter_is_merged_into_a_folder_of_transformers(export, wanted, base, saved):
    folder = export("huggingface", "max_shard_size=60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), wanted)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base, dtype="float32")), wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.use_cache
    assert AutoTokenizer.from_pretrained(folder)("Python").input_ids
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    export("huggingface", "overwrite=true")
    assert not (folder / "model.safetensors.index.json").exists()
    assert (folder / "notes" / "mine.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a folder, and format=safetensors writes a file: give another out"):
        commands.export([f"run={saved}", "format=safetensors", f"out={folder}", "overwrite=true"])
    with pytest.raises(ConfigError, match="is a file, and format=huggingface writes a folder: give another out"):
        commands.export([f"run={saved}", "format=huggingface", f"out={folder / 'config.json'}", "overwrite=true"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 with transformers 5.24
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


@pytest.mark.filterwarnings("ignore:Model has:UserWarning")
def test_a_tied_layer_that_has_an_adapter_is_untied(train, export):
    run = train("adapter.target_modules=[lm_head]", "trainer.ema_decay=null", "optimizer.lr=0.1")
    model = AutoModelForCausalLM.from_pretrained(export("huggingface", run=run))
    torch.testing.assert_close(logits(model), logits(load_run.load(run).model))


@pytest.fixture(scope="module")
def pissa(train) -> Path:
    """The adapter begins with a random decomposition of weights, which lose it: each build has others."""
    run: Path = train(*PISSA)
    return run


PISSA = ("+adapter.init_lora_weights=pissa_niter_1", "adapter.target_modules=[q_proj]", "scheduler=none")


def test_weights_that_the_adapter_has_changed_go_with_it(train, export, pissa):
    assert len(content_of(pissa, "model")["model"]) == 3 * 2
    resumed = train(*PISSA, f"resume={checkpoint(pissa, f'step-{SAVED:06d}.pt')}")
    assert_equal(content_of(resumed, "model", "ema"), content_of(pissa, "model", "ema"))
    found = inference.evaluate(str(pissa), which="last")["metrics"]
    assert found["val/loss"] == pytest.approx(lines_of(pissa)[-1]["val/loss"], rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(export("huggingface", run=pissa))
    torch.testing.assert_close(logits(model), logits(load_run.load(pissa).model))


def test_an_adapter_of_changed_weights_is_not_written_alone(export, train, pissa, saved):
    with pytest.raises(
        ConfigError, match=r"weights that the model is not built with, as .*q_proj.base_layer.weight.*merge=true"
    ):
        export("huggingface", "merge=false", run=pissa)
    whole = train("adapter=none", "trainer.max_steps=1")
    run = train(f"+model.weights={whole}/checkpoints/last.pt", "optimizer.lr=0.1")
    with pytest.raises(ConfigError, match=r"weights that the model is not built with.*merge=true"):
        export("huggingface", "merge=false", run=run)


@pytest.mark.slow
def test_changed_weights_go_on_in_shares_of_two_ranks(client2, project, train, base, export, pissa):
    options = (*SMALL, *PISSA, *files_of(base), "data.batch_size=2", "parallel=fsdp2", "trainer.shard_above_gb=0")
    file = checkpoint(pissa, f"step-{SAVED:06d}.pt")
    two = training.train(client2, project, pissa.with_name("two"), *options, ranks=2, resume=file)
    for line, wanted in zip(lines_of(two.folder), lines_of(pissa), strict=True):
        assert line["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-5)
    folder = checkpoint(two.folder, f"step-{STEPS:06d}")
    found = inference.evaluate(str(folder))["metrics"]
    assert found["val/loss"] == pytest.approx(lines_of(two.folder)[-1]["val/loss"], rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(export("huggingface", run=folder))
    torch.testing.assert_close(logits(exported), logits(load_run.load(folder).model))


def test_all_weights_are_trained_and_exported(train, export, base):
    run = train("adapter=none")
    model = AutoModelForCausalLM.from_pretrained(export("huggingface", run=run))
    torch.testing.assert_close(logits(model), logits(load_run.load(run).model))
    assert len(content_of(run, "model")["model"]) > 20
    with pytest.raises(ConfigError, match="merge=false is for format=huggingface"):
        export("safetensors", "merge=false", run=run)


@pytest.fixture(scope="module")
def bert(base) -> Path:
    folder = base.with_name("bert")
    words = AutoTokenizer.from_pretrained(base, mask_token="<mask>", cls_token="<s>")
    words.save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0,
    }  # two ranks draw otherwise
    BertForMaskedLM(BertConfig(vocab_size=len(words), pad_token_id=2, **sizes)).save_pretrained(folder)
    for split in ("train", "val"):
        rows = [json.loads(line) for line in (base / f"{split}.jsonl").read_text().splitlines()]
        lines = (json.dumps({**row, "long": int(len(row["text"]) > 200)}) for row in rows)
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def of_bert(bert: Path, kind: str, *options: str) -> tuple[str, ...]:
    plain = ("adapter=none", "data.packing=false", "optimizer.lr=0.01", f"model=hf_{kind}")
    return (*plain, *files_of(bert), *options)


def test_a_masked_language_model_is_trained_evaluated_and_exported(train, export, bert):
    """Each epoch masks other tokens, a resume the same ones, and each evaluation those of the validation."""
    options = of_bert(bert, "masked_lm", "data.mask=0.15")
    run = train(*options)
    resumed = train(*options, f"resume={checkpoint(run, f'step-{SAVED:06d}.pt')}")
    parts = ("model", "optimizer", "position", "scheduler", "ema")
    assert_equal(content_of(resumed, *parts), content_of(run, *parts))
    assert lines_of(resumed) == lines_of(run) != []
    wanted = lines_of(run)[-1]["val/loss"]
    assert inference.evaluate(str(run), which="last")["metrics"]["val/loss"] == pytest.approx(wanted, rel=1e-6)
    out = run / "predictions.csv"
    inference.predict(str(run), out, which="last")
    assert mean_of(out) == pytest.approx(wanted, rel=1e-5)
    model = AutoModelForMaskedLM.from_pretrained(export("huggingface", run=run))
    torch.testing.assert_close(logits(model), logits(load_run.load(run).model))
    with pytest.raises((ConfigError, RankFailed), match=r"predicts masked tokens, and data\.mask=0: give"):
        train(*options, "data.mask=0", "dry_run=true")


@pytest.mark.slow
def test_a_classifier_is_trained_in_shares_of_two_ranks(client2, project, train, export, bert):
    options = of_bert(bert, "sequence_classification", "data.label=long", "scheduler=none", "trainer.clip_norm=null")
    one = train(*options)
    two = one.with_name("two")
    shares = ("parallel=fsdp2", "data.batch_size=2", "trainer.shard_above_gb=0")
    ran = training.train(client2, project, two, *SMALL, *options, *shares)
    told = next("\n".join(record.data.lines) for record in ran.records if record.kind == "start")
    assert "weights   new, as the files lack them: bert.pooler.dense, classifier; not used of the files: cls." in told
    for line, wanted in zip(lines_of(two), lines_of(one), strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    folder = checkpoint(two, f"step-{STEPS:06d}")
    model = AutoModelForSequenceClassification.from_pretrained(export("huggingface", run=folder))
    torch.testing.assert_close(logits(model), logits(load_run.load(folder).model))
    found = inference.evaluate(str(one), which="last")["metrics"]
    assert found["val/loss"] == pytest.approx(lines_of(two)[-1]["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_it_goes_on_in_shares_of_two_ranks_and_back_on_one(client2, project, train, base, export):
    """The checkpoint of the two ranks is a folder, in which each has written its share of the adapter."""
    one = train("scheduler=none")
    options = (
        *SMALL,
        "scheduler=none",
        *files_of(base),
        "data.batch_size=2",
        "parallel=fsdp2",
        "trainer.shard_above_gb=0",
    )
    file = checkpoint(one, f"step-{SAVED:06d}.pt")
    two = training.train(client2, project, one.with_name("two"), *options, "trainer.max_steps=3", ranks=2, resume=file)
    folder = checkpoint(two.folder, "step-000003")
    back = train("scheduler=none", f"resume={folder}", "parallel=fsdp2")
    for line, wanted in zip([*lines_of(two.folder), *lines_of(back)], lines_of(one), strict=True):
        assert line["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(export("huggingface", run=folder))
    torch.testing.assert_close(logits(exported), logits(load_run.load(folder).model))


def test_it_is_evaluated_as_it_was_validated(saved):
    found = inference.evaluate(str(saved), which="last")["metrics"]
    assert found["val/loss"] == pytest.approx(lines_of(saved)[-1]["val/loss"], rel=1e-6)


def test_rows_of_text_are_predicted_by_their_loss(train, saved, tmp_path):
    """Rows that are not packed have several lengths in several batches."""
    out = tmp_path / "predictions.csv"
    found = inference.predict(str(saved), out, which="last", changes=["data.packing=false", "data.batch_size=3"])
    assert found["columns"] == ["index", "loss", "tokens"]
    assert found["samples"] == 80
    wanted = lines_of(saved)[-1]["val/loss"]
    assert mean_of(out) == pytest.approx(wanted, rel=1e-5)  # packed documents don't see each other


def mean_of(out: Path) -> float:
    rows = list(csv.DictReader(out.read_text().splitlines()))
    counted = [(float(row["loss"]), int(row["tokens"])) for row in rows if int(row["tokens"])]
    return sum(loss * n for loss, n in counted) / sum(n for _, n in counted)


def test_a_key_is_left_out_once(saved, export, wanted, capsys):
    folder = export("huggingface", "~adapter.lora_dropout")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), wanted)
    commands.generate([f"run={saved}", "max_new_tokens=2", "~adapter.lora_dropout"])
    assert capsys.readouterr().out


def test_text_is_generated_by_the_model_s_own_tokenizer(saved, capsys):
    def said(*words: str) -> str:
        commands.generate([f"run={saved}", "max_new_tokens=8", *words])
        return capsys.readouterr().out

    first = said("prompt=The class", "n=2", "seed=1")
    assert first.count("The class") == 2
    assert said("prompt=The class", "n=2", "seed=1") == first != said("prompt=The class", "n=2", "seed=2")
    assert "Hello" not in said("prompt=Hello", "chat=true")
    assert said() != ""


def test_another_base_is_refused(saved, tmp_path):
    other = tmp_path / "other"
    small_base.make(other, steps=1, width=32, depth=2)
    with pytest.raises(CheckpointError, match=r"the weights of model.path=.*other are others"):
        load_run.load(saved, overrides=[f"model.path={other}"])
    whole = AutoModelForCausalLM.from_pretrained(other)
    with pytest.raises(CheckpointError, match=r"holds an adapter of x: give adapter=lora"):
        weights.load_weights(whole, {"base": {"path": "x", "fingerprint": ""}, "model": {}})


def test_another_adapter_is_refused(train, saved):
    with pytest.raises(
        (CheckpointError, RankFailed), match=r"give adapter\.r and the other keys of its adapter as in its run"
    ):
        train(f"resume={checkpoint(saved)}", "adapter.r=4")


def test_another_tokenizer_is_refused(train, tmp_path):
    with pytest.raises((ConfigError, RankFailed), match=r"the tokenizer of .* numbers .*: give data\.tokenizer=.*base"):
        train("dry_run=true", f"data.tokenizer={write_tokenizer(tmp_path)}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.path=./nowhere"], "model.path=./nowhere: there is no such folder"),
        (["model.path=nowhere"], "nowhere is no folder on host .*, and the hub gives no model"),
        (["model.path={base}/.."], r"has no config\.json: it is no folder of a model"),
        (["model=hf_masked_lm"], "AutoModelForMaskedLM can't load model.path=.*Unrecognized configuration class"),
        (["model.load_in_4bit=true", "adapter=none"], "quantised weights can't be trained: give adapter=lora"),
        (["model.load_in_4bit=true", "parallel=fsdp2"], "can't share quantised weights: give parallel=ddp"),
        (["model.load_in_4bit=true"], "needs bitsandbytes: type pip install bitsandbytes"),
        (["adapter.target_modules=[conv]"], r"adapter: Target modules .* The linear layers .* are .*q_proj"),
    ],
)
def test_a_mistake_is_said_before_a_cluster_starts(train, base, words, said, monkeypatch):
    monkeypatch.setattr(targets, "is_installed", lambda name: name != "bitsandbytes")
    with pytest.raises((ConfigError, RankFailed), match=said):
        train("dry_run=true", *(word.format(base=base) for word in words))


def test_a_missing_package_is_named_with_its_extra(train, monkeypatch):
    monkeypatch.setattr(targets, "is_installed", lambda name: name not in ("transformers", "peft"))
    with pytest.raises(ConfigError, match=r"needs transformers and peft: type pip install 'ddp-hydra\[finetune\]'"):
        train()
