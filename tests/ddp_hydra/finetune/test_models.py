"""Models of transformers from a folder: what their losses weigh, and adapters in them and in other models."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.finetune import adapter, models
from ddp_hydra.rank.world import ALONE
from ddp_hydra.tasks import ModelLoss
from ddp_hydra.training.checkpoint import load_fitting
from ddp_hydra.training.parallel import weights

pytestmark = pytest.mark.medium

VOCABULARY, CLASSES = 40, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
KINDS = {
    "llama": ("causal_lm", "Llama", {**SIZES, "num_key_value_heads": 1}, "ForCausalLM"),
    "qwen2": ("causal_lm", "Qwen2", {**SIZES, "num_key_value_heads": 1}, "ForCausalLM"),
    "gpt2": ("causal_lm", "GPT2", {**GPT2, "bos_token_id": 1, "eos_token_id": 1}, "LMHeadModel"),
    "bert": ("masked_lm", "Bert", SIZES, "ForMaskedLM"),
    "classes": ("sequence_classification", "Bert", SIZES, "Model"),
}


def saved(kind: str, folder: Path) -> nn.Module:
    """Write a model of a kind, and load it as the config's `model` does."""
    import transformers

    function, name, sizes, suffix = KINDS[kind]
    torch.manual_seed(0)
    getattr(transformers, f"{name}{suffix}")(getattr(transformers, f"{name}Config")(**sizes)).save_pretrained(folder)
    torch.manual_seed(0)
    classes = {"num_classes": CLASSES} if kind == "classes" else {}
    return getattr(models, function)(str(folder), **classes).eval()


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (4, 8))
    labels = torch.randint(0, CLASSES, (4,)) if kind == "classes" else tokens.clone()
    if kind != "classes":
        labels[0, 2:] = labels[1, 5:] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_of_a_batch_weighs_alike_with_an_adapter(kind, tmp_path):
    model, batch = adapter.lora(saved(kind, tmp_path), r=2), batch_of(kind)
    task = ModelLoss()
    whole = task.step(model, batch)
    parts = [task.step(model, {name: part[cut] for name, part in batch.items()}) for cut in (slice(1), slice(1, 4))]
    assert sum(int(part.n) for part in parts) == int(whole.n)
    mean = sum(part.loss * part.n for part in parts) / whole.n
    torch.testing.assert_close(mean, whole.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_and_written_alone(kind, tmp_path):
    base, again = (saved(kind, tmp_path / "base") for _ in range(2))
    model = adapter.lora(base, r=2, init_lora_weights=False)
    inputs = {name: part for name, part in batch_of(kind).items() if name != "labels"}
    wanted = model(**inputs).logits
    torch.testing.assert_close(adapter.save(model, again, tmp_path / "adapter")(**inputs).logits, wanted)
    torch.testing.assert_close(models.save(adapter.merged(model), tmp_path / "out", "5GB")(**inputs).logits, wanted)


def test_a_new_head_is_trained_and_saved_whole(tmp_path):
    model = adapter.lora(saved("classes", tmp_path), r=2)
    trained = [name for name, one in model.named_parameters() if one.requires_grad and "lora" not in name]
    assert trained == ["classifier.modules_to_save.default.weight", "classifier.modules_to_save.default.bias"]
    state = weights.state_of(model)
    assert set(trained) < state.keys()
    assert all("lora" in name or name in trained for name in state)
    other = adapter.lora(saved("classes", tmp_path), r=2, init_lora_weights=False)
    weights.load_copied(other, state)
    torch.manual_seed(1)
    base = models.sequence_classification(str(tmp_path), num_classes=CLASSES).eval()
    inputs = {name: part for name, part in batch_of("classes").items() if name != "labels"}
    again = adapter.save(other, base, tmp_path / "adapter")  # its own head replaces one that was drawn otherwise
    torch.testing.assert_close(again(**inputs).logits, other(**inputs).logits)
    assert all(torch.equal(value, state[name]) for name, value in weights.state_of(other).items())


def test_what_the_files_lack_is_known_and_not_logged(tmp_path, caplog, monkeypatch):
    """Weights that differ in size begin anew only if the config says so, and are trained whole with an adapter."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    saved("bert", tmp_path / "bert")
    source: Any = models.sequence_classification(str(tmp_path / "bert"), num_classes=CLASSES).pretrained
    assert weights.modules_of(source.new) == ["bert.pooler.dense", "classifier"]
    assert weights.modules_of(source.unused)[0] == "cls.predictions"
    import transformers

    transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"has classifier\.bias of \(2,\), and the model has \(3,\): give \+model\."):
        models.sequence_classification(str(tmp_path / "two"), num_classes=CLASSES)
    options = {"num_classes": CLASSES, "ignore_mismatched_sizes": True}
    model = adapter.lora(models.sequence_classification(str(tmp_path / "two"), **options), r=2)
    assert model.get_submodule("classifier.modules_to_save.default").weight.requires_grad
    assert "LOAD REPORT" not in caplog.text


def test_files_of_another_model_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    saved("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"module.{name}": one for name, one in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"have no weight of BertForMaskedLM, but module\.bert\..* and others: give"):
        models.masked_lm(str(tmp_path))


def test_one_module_to_save_is_a_name():
    model = adapter.lora(layers(), target_modules=["0"], modules_to_save="1")
    assert model.get_submodule("1.modules_to_save.default").weight.requires_grad


def test_an_adapter_of_a_low_base_is_fp32(tmp_path):
    saved("llama", tmp_path)
    model = adapter.lora(models.causal_lm(str(tmp_path), torch_dtype="bfloat16"), r=2)
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert model.lm_head.weight.dtype == torch.bfloat16


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_any_model_takes_an_adapter_and_the_weights_of_a_run_without_one(tmp_path):
    torch.manual_seed(1)
    before = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    torch.save(before.state_dict(), tmp_path / "weights.pt")
    model = adapter.lora(layers(), target_modules=["0"], modules_to_save=["1"])
    untouched = load_fitting(tmp_path / "weights.pt", model, ALONE)
    assert untouched == []
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), before(x))
    assert weights.state_of(model).keys() == model.state_dict().keys()
    with pytest.raises(ConfigError, match=r"The linear layers of Sequential are 0, 1: give adapter.target_modules"):
        adapter.lora(layers())


def test_weights_that_are_not_the_files_are_saved(tmp_path):
    model = adapter.lora(saved("llama", tmp_path), r=2)
    name = "model.layers.0.self_attn.q_proj.base_layer.weight"
    assert name not in weights.state_of(model)
    weights.load_copied(model, {**weights.state_of(model), name: torch.zeros_like(model.state_dict()[name])})
    assert name in weights.state_of(model)


@pytest.mark.parametrize("init", ["pissa_niter_1", "olora", "mica"])
def test_what_an_adapter_has_changed_as_it_began_is_saved(init, tmp_path):
    """MiCA's frozen matrix comes of the weight. Weights without an adapter are in the files, and in no checkpoint."""
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": init}
    model = adapter.lora(saved("llama", tmp_path), **options)
    state = weights.state_of(model)
    beside = {name for name in state if ".lora_" not in name}
    names = {"model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.0.mlp.down_proj.base_layer.weight"}
    assert beside == (set() if init == "mica" else names)
    assert {name for name, _ in model.named_parameters() if ".lora_" in name} == state.keys() - beside
    outline = weights.built_on_meta(lambda: adapter.lora(models.causal_lm(str(tmp_path)), **options))
    assert weights.on_meta(outline)
    assert weights.unsaved(outline) == weights.unsaved(model)
    with torch.no_grad():  # as another random decomposition, or that of another machine
        for value in state.values():
            value.mul_(1.5)
    again = adapter.lora(models.causal_lm(str(tmp_path)), **options).eval()
    weights.load_copied(again, state)
    inputs = {name: part for name, part in batch_of("llama").items() if name != "labels"}
    wanted = model(**inputs).logits
    torch.testing.assert_close(again(**inputs).logits, wanted)
    torch.testing.assert_close(adapter.merged(again)(**inputs).logits, wanted)


def test_an_adapter_that_changes_weights_takes_no_others(tmp_path):
    torch.save(layers().state_dict(), tmp_path / "weights.pt")
    options = {"r": 2, "target_modules": ["0"], "init_lora_weights": "pissa"}
    model = adapter.lora(layers(), **options)
    with pytest.raises(
        ConfigError, match=r"lacks 0\.base_layer\.weight, which peft has changed .*init_lora_weights=true"
    ):
        load_fitting(tmp_path / "weights.pt", model, ALONE)
    torch.save(weights.state_of(model), tmp_path / "weights.pt")
    assert load_fitting(tmp_path / "weights.pt", adapter.lora(layers(), **options), ALONE) == []
    quantised = layers()
    quantised.is_quantized = True
    with pytest.raises(
        ConfigError, match=r"changes the quantised weights .*: give adapter\.init_lora_weights=true, or"
    ):
        adapter.lora(quantised, **options)


def test_an_adapter_goes_beside_parameters_without_plain_memory(tmp_path):
    model = layers()
    model.register_parameter("graph", torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False))
    model.append(torch.nn.LazyLinear(2))
    adapter.lora(model, r=2, target_modules=["0"], init_lora_weights="pissa")
    assert model.changed_names == {"0.base_layer.weight"}
    others = {name: one for name, one in layers().state_dict().items() if name != "0.weight"}
    torch.save(others, tmp_path / "weights.pt")
    without = adapter.lora(layers(), r=2, target_modules=["0"], init_lora_weights="pissa")
    load_fitting(tmp_path / "weights.pt", without, ALONE)  # it does not hold what was changed


def test_a_refused_adapter_names_the_layers_of_the_model(tmp_path):
    """peft has wrapped some by then."""
    with pytest.raises(ConfigError, match=r"linear layers of Sequential are 0, 1: give adapter"):
        adapter.lora(layers(), target_modules=["0"], target_parameters=["1.weight", "0.weight"])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_ranks_read_the_files_that_the_model_is_loaded_from(is_sharded, tmp_path):
    """A variant and shards of an earlier model lie beside them."""
    from safetensors.torch import load_file, save_file

    saved("llama", tmp_path)
    whole = tmp_path / "model.safetensors"
    others = {name: 2 * one for name, one in load_file(whole).items()}
    for name in ("model.fp16", "model-00001-of-00001"):
        save_file(others, tmp_path / f"{name}.safetensors", {"format": "pt"})
    if is_sharded:
        models.causal_lm(str(tmp_path)).save_pretrained(tmp_path / "shards", max_shard_size="4KB")
        whole.unlink()
        for file in (tmp_path / "shards").iterdir():
            file.replace(tmp_path / file.name)
    wanted = dict(models.causal_lm(str(tmp_path)).named_parameters())
    outline: Any = weights.built_on_meta(lambda: models.causal_lm(str(tmp_path)))
    for name, value in wanted.items():
        assert torch.equal(outline.read_rows(name, 0, len(value)), value), name
    variant = weights.built_on_meta(lambda: models.causal_lm(str(tmp_path), key_mapping={}))
    assert not hasattr(variant, "read_rows")


def test_code_of_a_model_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}'
    )
    for name in ("c", "m"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match=r"can't load model.path=.*contains custom code"):
        models.causal_lm(str(tmp_path))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_weights_stay_in_the_file_that_ranks_of_a_host_share(tmp_path):
    """A change of a weight is this process's alone."""
    saved("llama", tmp_path)
    before = models.fingerprint(tmp_path)
    model = models.causal_lm(str(tmp_path))
    places = [line.split()[0].split("-") for line in mapped(tmp_path / "model.safetensors")]
    inside = [any(int(a, 16) <= one.data_ptr() < int(b, 16) for a, b in places) for one in model.parameters()]
    assert all(inside)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert models.fingerprint(tmp_path) == before


def mapped(file: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
