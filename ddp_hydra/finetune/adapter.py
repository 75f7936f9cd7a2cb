"""Adapters of peft: they are trained in place of the model, which stays as it is."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hydra.errors import ConfigError
from ddp_hydra.finetune.models import imported, plain

NAME = "default"
"""Name of the adapter in peft's layers."""
IN_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)\.")
"""What peft puts into names of a model's weights."""
LOW = (torch.bfloat16, torch.float16)


def lora(model: nn.Module, *, autocast_adapter_dtype: bool = True, **options: Any) -> nn.Module:
    """Put an adapter of low rank into a model, and freeze the model.

    The class of the model stays. Parameters that a pretrained model's files lack, as the head of a classifier, are
    trained whole. Where the model was loaded by `ddp_hydra.finetune.models`, checkpoints leave out what is frozen, but
    for weights that peft has changed, as `init_lora_weights="pissa"` does.

    Args:
        model: any model; for one that is not of transformers, give target_modules.
        autocast_adapter_dtype: the adapter of a model in bf16 or fp16 is fp32.
        options: of peft's LoraConfig.

    Raises:
        ConfigError: peft refuses the options, or finds nothing to adapt.
    """
    peft = imported("peft")
    source = getattr(model, "pretrained", None)
    options = {name: plain(value) for name, value in options.items() if value is not None}
    if isinstance(whole := options.get("modules_to_save"), str):
        options["modules_to_save"] = [whole]
    if source is not None:
        options.setdefault("task_type", source.task_type)
        new = {name.rpartition(".")[0] for name in source.new}
        options["modules_to_save"] = sorted({*options.get("modules_to_save", ()), *new}) or None
    linear = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
    before = {storage_of(one) for one in model.parameters()}
    try:
        config = peft.LoraConfig(**options)
        with _Writes() as writes:
            tuner = peft.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, NAME)
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"adapter: {reason:.300} The linear layers of {type(model).__name__} are {', '.join(linear)}: give "
            "adapter.target_modules=[…]"
        ) from None
    if autocast_adapter_dtype:
        for layer in adapted(model):
            for parameter in layer.parameters():
                if parameter.requires_grad and parameter.dtype in LOW:
                    parameter.data = parameter.data.float()
    vars(model).pop("read_rows", None)  # the files lack the adapter
    object.__setattr__(model, "tuner", tuner)  # not a part of the model, which is a part of it
    frozen = {name: one for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    kept = {name for name, one in frozen.items() if storage_of(one) in before - writes.storages}
    changed = frozenset(name for name in frozen.keys() - kept if ".lora_" not in name)
    if changed and getattr(model, "is_quantized", False):
        raise ConfigError(
            "adapter: peft changes the quantised weights as the adapter begins, and checkpoints can't hold these: give "
            "adapter.init_lora_weights=true, or model.load_in_4bit=false"
        )
    object.__setattr__(model, "changed_names", changed)
    if source is not None:
        object.__setattr__(model, "loaded_names", frozenset(kept))
    return model


def storage_of(tensor: Tensor) -> StorageWeakRef | int:
    # It tells memory apart, also of tensors without any, and keeps none.
    if tensor.layout != torch.strided or is_lazy(tensor):
        return id(tensor)
    return StorageWeakRef(tensor.untyped_storage())


class _Writes(TorchDispatchMode):
    # Notes the memory of tensors that are changed in place. Versions of parameters don't count changes of their `data`.
    def __init__(self) -> None:
        super().__init__()
        self.storages: set[StorageWeakRef | int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and any(result is one for one in (*args, *(kwargs or {}).values())):
            self.storages.add(storage_of(result))
        return result


def adapted(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "tuner")


def merged(model: Any) -> nn.Module:
    # A model without an adapter stays as it is.
    if not has_adapter(model):
        return model
    if getattr(model, "is_quantized", False):
        raise ConfigError("an adapter is merged into whole weights: give model.load_in_4bit=false, or merge=false")
    uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    for layer in adapted(model):  # a tied weight would change at its other place, too
        base = layer.get_base_layer()
        if uses[id(getattr(base, "weight", None))] > 1:
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
            if hasattr(model, "config"):
                model.config.tie_word_embeddings = False
    whole: nn.Module = model.tuner.merge_and_unload(safe_merge=True)
    object.__delattr__(whole, "tuner")
    return whole


def save(model: Any, base: nn.Module, folder: Path) -> nn.Module:
    # It returns the model that peft makes of the files and the base.
    from safetensors.torch import save_file

    check_base(model, base)
    folder.mkdir(parents=True, exist_ok=True)
    state = imported("peft").get_peft_model_state_dict(model, adapter_name=NAME)
    named = {f"base_model.model.{name}": value.detach().contiguous() for name, value in state.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    config = copy.copy(model.peft_config[NAME])
    source = getattr(model, "pretrained", None)
    config.base_model_name_or_path, config.inference_mode = source.path if source else None, True
    config.save_pretrained(folder)
    return imported("peft").PeftModel.from_pretrained(base, folder).eval()


def check_base(model: nn.Module, base: nn.Module) -> None:
    own = dict(base.named_parameters(remove_duplicate=False))
    for name, value in model.named_parameters():
        same = own.get(IN_ADAPTED.sub(".", name))
        is_frozen = not value.requires_grad and ".original_module." not in name  # a new head has that, and no use of it
        is_compared = is_frozen and value.is_floating_point()  # quantised ones are bytes
        if same is not None and is_compared and not torch.equal(value, same):
            raise ConfigError(
                "merge=false writes the adapter alone, which goes with weights that the model is not built with, as "
                f"{name}: model.weights or adapter.init_lora_weights has changed them, or each build draws them anew. "
                "Give merge=true"
            )
