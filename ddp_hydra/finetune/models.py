"""Loads models of Hugging Face's transformers from a folder or its hub, writes them, and generates text.

No code of a model is run, unless the config has `trust_remote_code`. Weights come from safetensors, or from files that
torch reads with `weights_only`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from ddp_hydra.config import targets
from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError

FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model on the hub that are downloaded with its weights: config, tokenizer."""
LENGTH = 8
"""Tokens of each text that a written model is compared by."""
OTHER_FILES = {"variant", "subfolder", "use_safetensors", "gguf_file", "transformers_weights", "key_mapping"}
"""Options of `from_pretrained` that choose other files than `weights_files`, or other names of what is in them."""
SAMPLE, SAMPLES = 4096, 256
"""Bytes of a sample of a file, and the least number of samples, for a fingerprint."""


@dataclass(frozen=True)
class Pretrained:
    """Describes where a model was loaded from.

    Args:
        path: as it was given.
        task_type: peft's name of what the model does; None: it has none.
        new: names of parameters that the files lack.
        unused: names in the files that the model lacks.
        use_cache: as the folder's config has it. It is off in training, where nothing uses the cache.
    """

    path: str
    folder: Path
    fingerprint: str
    task_type: str | None
    new: tuple[str, ...]
    unused: tuple[str, ...]
    use_cache: bool | None


def causal_lm(path: str, **options: Any) -> nn.Module:
    """Load a model that predicts the next token."""
    return load("AutoModelForCausalLM", path, "CAUSAL_LM", **options)


def masked_lm(path: str, **options: Any) -> nn.Module:
    """Load a model that predicts masked tokens."""
    return load("AutoModelForMaskedLM", path, **options)


def sequence_classification(path: str, num_classes: int | None = None, **options: Any) -> nn.Module:
    """Load a model that classifies texts; without `num_classes`, into those of the folder's config."""
    return load("AutoModelForSequenceClassification", path, "SEQ_CLS", **{"num_labels": num_classes, **options})


def load(
    auto_class: str,
    path: str,
    task_type: str | None = None,
    *,
    dtype: str = "float32",
    load_in_4bit: bool = False,
    revision: str | None = None,
    **options: Any,
) -> nn.Module:
    """Load a model and its weights by a class of transformers that chooses the model's class.

    conf/model/hf_causal_lm.yaml describes the arguments; others are of `from_pretrained`.
    """
    transformers = imported("transformers")
    transformers.utils.logging.disable_progress_bar()
    options = {
        "trust_remote_code": False,
        **{name: plain(value) for name, value in options.items() if value is not None},
    }
    folder = find_folder(path, revision, bool(options.get("trust_remote_code")))
    targets.check_folder(folder)
    if load_in_4bit:
        options["quantization_config"] = four_bit()
    dtype = options.pop("torch_dtype", dtype)
    may_differ = options.pop("ignore_mismatched_sizes", False)
    options.update(dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True)
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_is_no_report)
    try:
        model, info = getattr(transformers, auto_class).from_pretrained(folder, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{auto_class} can't load model.path={path} ({type(error).__name__}: {reason:.400})"
        ) from None
    finally:
        log.removeFilter(_is_no_report)
    new, unused = (tuple(sorted(info[kind])) for kind in ("missing_keys", "unexpected_keys"))
    if others := {name: shapes for name, *shapes in info["mismatched_keys"]}:
        name, (there, wanted) = min(others.items())
        if not may_differ:
            raise ConfigError(
                f"model.path={path} has {name} of {tuple(there)}, and the model has {tuple(wanted)}: give "
                "+model.ignore_mismatched_sizes=true to begin it anew"
            )
        new = tuple(sorted({*new, *others}))
    if unused and all(name in new for name, _ in model.named_parameters()):
        raise ConfigError(
            f"the files of model.path={path} have no weight of {type(model).__name__}, but {unused[0]} and others: "
            "give a model that transformers has written"
        )
    use_cache = getattr(model.config, "use_cache", None)
    if use_cache:
        model.config.use_cache = False
    model.pretrained = Pretrained(path, folder, fingerprint(folder), task_type, new, unused, use_cache)
    is_meta = all(parameter.is_meta for parameter in model.parameters())
    chosen = {name for name, value in options.items() if value is not None}
    if options.get("use_safetensors"):
        chosen.remove("use_safetensors")
    is_usual = OTHER_FILES.isdisjoint(chosen) and getattr(model.config, "transformers_weights", None) is None
    if is_meta and is_usual and not load_in_4bit:
        read_from_files(model, folder)
    return model


def _is_no_report(record: logging.LogRecord) -> bool:
    # The header of a run says which weights are new or not used. Errors of a conversion are in the report alone.
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text


def read_from_files(model: nn.Module, folder: Path) -> None:
    # Ranks of a sharded model read the rows of their shards, if the files have all parameters as they are.
    from safetensors import safe_open

    files: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    for path in weights_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                files[name], shapes[name] = path, file.get_slice(name).get_shape()
    if any(shapes.get(name) != list(parameter.shape) for name, parameter in model.named_parameters()):
        return

    def read_rows(name: str, begin: int, end: int) -> Tensor:
        with safe_open(files[name], "pt") as file:
            rows: Tensor = file.get_slice(name)[begin:end] if shapes[name] else file.get_tensor(name)
        return rows

    object.__setattr__(model, "read_rows", read_rows)  # no part of the model


def weights_files(folder: Path) -> list[Path]:
    # Those that `from_pretrained` reads. A folder may hold variants, and shards of an earlier model, too.
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else []
    return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})


def imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        where = f"it needs {error.name}, which host {os.uname().nodename} lacks"
        raise ConfigError(f"{where}: type pip install 'ddp-hydra[finetune]' there") from None


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def find_folder(path: str, revision: str | None = None, with_code: bool = False, with_weights: bool = True) -> Path:
    folder = expanded(path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download, utils

    utils.disable_progress_bars()
    try:
        patterns = [*FILES, *(["*.safetensors"] if with_weights else []), *(["*.py"] if with_code else [])]
        found = snapshot_download(path, revision=revision, allow_patterns=patterns, ignore_patterns="*/*")
    except Exception as error:  # the network's, the hub's, and its check of the name
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(
            f"{path} is no folder on host {os.uname().nodename}, and the hub gives no model of that name "
            f"({type(error).__name__}: {reason:.100}): give a folder with config.json, or <owner>/<name> of the hub"
        ) from None
    return Path(found)


def four_bit() -> Any:
    if find_spec("bitsandbytes") is None:
        raise ConfigError("model.load_in_4bit=true needs bitsandbytes: type pip install bitsandbytes")
    return imported("transformers").BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def fingerprint(folder: Path) -> str:
    # Of samples of the weights' files, which takes little time for large ones.
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(SAMPLE, size // SAMPLES)):
                file.seek(place)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


# -- what is done with a trained model -------------------------------------------------------------------------


def load_tokenizer(path: str) -> Any:
    tokenizers = imported("transformers").AutoTokenizer
    try:
        return tokenizers.from_pretrained(find_folder(path, with_weights=False), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{path} has no tokenizer of transformers: {reason}") from error


def tokenizer_of(model: nn.Module) -> Any:
    source = getattr(model, "pretrained", None)
    if source is None or not any(path for name in ("*token*", "vocab*") for path in source.folder.glob(name)):
        return None
    return load_tokenizer(str(source.folder))


def is_of_transformers(model: nn.Module) -> bool:
    # The package is not imported.
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


def takes_tokens(model: Any) -> bool:
    is_text = is_of_transformers(model) and model.main_input_name == "input_ids"
    return is_text and not model.config.is_encoder_decoder and hasattr(model.config, "vocab_size")


def example_of(model: Any) -> dict[str, Tensor]:
    ids = torch.arange(1, 2 * LENGTH + 1).reshape(2, LENGTH) % model.config.vocab_size
    return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids, device=model.device)}


def save(model: Any, folder: Path, max_shard_size: str) -> nn.Module:
    # It returns the model that transformers loads from there.
    source = getattr(model, "pretrained", None)
    if source is not None and source.use_cache is not None:
        model.config.use_cache = source.use_cache
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if (tokenizer := tokenizer_of(model)) is not None:
        tokenizer.save_pretrained(folder)
    again: nn.Module = type(model).from_pretrained(folder, dtype="auto").eval()
    return again


def generate(
    model: Any, prompt: str, n: int, temperature: float, seed: int, max_new_tokens: int, chat: bool
) -> list[str]:
    # With `chat`, the prompt is a user's message in the tokenizer's chat template, and answers alone are returned.
    if (tokenizer := tokenizer_of(model)) is None:
        raise ConfigError("the folder of the model holds no tokenizer, so there is no text to generate")
    if chat and tokenizer.chat_template is None:
        raise ConfigError("chat=true: the tokenizer has no chat template: leave it out")
    if chat:
        message = [{"role": "user", "content": prompt}]
        given = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    else:
        given = tokenizer(prompt, return_tensors="pt")["input_ids"].long()
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    if not given.numel():
        first = eos if bos is None else bos
        if first is None:
            raise ConfigError("the tokenizer has no token that begins a text: give prompt=<text>")
        given = torch.tensor([[first]])
    given = given.to(model.device)
    torch.manual_seed(seed)
    said = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=True,
        temperature=temperature,
        num_return_sequences=n,
        max_new_tokens=max_new_tokens,
        pad_token_id=eos if pad is None else pad,
    )
    return list(tokenizer.batch_decode(said[:, given.shape[1] if chat else 0 :], skip_special_tokens=True))
