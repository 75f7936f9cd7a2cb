"""Refuses what the config of a checkpoint from another place names, if it may do anything or tell a secret.

A target is looked up only below packages that are known, and counts as what it is, not as what it is called:
`torch.os.system` is no function of torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import redact
from ddp_hydra.config.project import PACKAGES
from ddp_hydra.errors import ConfigError

BUILT = ("model", "adapter", "data", "task", "loss", "mix", "metrics")
"""Groups that a trained model is built from."""
CLASSES = (
    "torch.nn",
    "torch.utils.data",
    "torchvision",
    "torchmetrics",
    "ddp_hydra.data",
    "ddp_hydra.finetune",
    "ddp_hydra.tasks",
    *PACKAGES,
)
"""Modules and packages whose classes are built."""
UNPICKLE = ("torch.utils.data.datapipes", "torchvision.datasets.lsun")
"""Modules among them whose classes unpickle what they read."""
FUNCTIONS = ("torchvision.models", "torch.nn.functional", "torch._C._nn", "ddp_hydra.data.huggingface", *PACKAGES)
"""Modules and packages whose functions are called."""
ALONE = (
    "torch.tensor",
    *(f"ddp_hydra.finetune.models.{name}" for name in ("causal_lm", "masked_lm", "sequence_classification")),
    "ddp_hydra.finetune.adapter.lora",
)
"""Functions that are called, too, of modules whose other functions may do anything."""
RUNS_CODE: Mapping[str, Callable[[Any], bool]] = {
    "trust_remote_code": bool,
    "weights_only": lambda value: not value,
    "use_kernels": bool,
    "attn_implementation": lambda value: "/" in str(value),  # a kernel on the hub
}
"""Arguments of transformers, and whether a value lets files of a model or of the hub run code."""
_REFERENCE = re.compile(r"\$\{(oc\.select:)?[\w., -]+\}")
"""Matches an interpolation that reads the config alone."""


def refuse_targets(
    cfg: DictConfig, stored: Mapping[str, Any], words: Sequence[str] = (), groups: Collection[str] = ()
) -> None:
    """Check the targets that a config has from a checkpoint, and what its interpolations read.

    Args:
        cfg: the config to build from, resolved.
        stored: the checkpoint's config, with its interpolations.
        words: overrides that were typed.
        groups: groups that were typed.

    Raises:
        ConfigError: a target may do anything, or an interpolation reads more than the config.
    """
    typed = [word.lstrip("+").partition("=")[::2] for word in words]

    def is_typed(key: str, value: Any) -> bool:
        return any(key == one or (key.startswith(f"{one}.") and str(value) in text) for one, text in typed)

    for key, value in redact.values_of(stored):
        is_read = isinstance(value, str) and "${" in _REFERENCE.sub("", value)  # by a resolver, such as oc.env
        if is_read and key.partition(".")[0] not in groups and not is_typed(key, value):
            raise ConfigError(
                f"{key}={value} is from a checkpoint that is a lone file or from a URL: its config may not read this "
                f"machine's environment. Type {key}=<value>, or trust=true if you trust it"
            )
    for key, value in redact.values_of(OmegaConf.to_container(cfg)):
        group, name = key.partition(".")[0], key.rpartition(".")[2]
        if group not in BUILT or group in groups or is_typed(key, value):
            continue
        # A text that is an interpolation only now was hidden from OmegaConf by a backslash.
        is_hidden = isinstance(value, str) and "${" in value
        runs_code = name in RUNS_CODE and RUNS_CODE[name](value)
        if is_hidden or runs_code or (name == "_target_" and not _is_known(str(value))):
            raise ConfigError(
                f"{key}={value} is from a checkpoint that is a lone file or from a URL: its config may name classes of "
                "torch.nn, torchvision, torchmetrics, ddp_hydra and this project only. Type trust=true if you trust "
                "it, or give its run directory on this machine"
            )


def _is_known(target: str) -> bool:
    if target in ALONE:
        return True
    if not _is_below(target, (*CLASSES, *FUNCTIONS)):
        return False  # not even imported
    try:
        found = get_object(target)
    except Exception:  # it is told when it is built
        return True
    module = getattr(found, "__module__", None) or ""
    if inspect.isclass(found):
        return _is_below(module, CLASSES) and not _is_below(module, UNPICKLE)
    # A method takes anything as its `self`.
    is_function = "." not in getattr(found, "__qualname__", ".") or _is_below(module, PACKAGES)
    return is_function and _is_below(module, FUNCTIONS)


def _is_below(name: str, packages: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)
