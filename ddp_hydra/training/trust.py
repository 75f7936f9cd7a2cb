"""Refuses what the config of a checkpoint from another place names by `_target_`, if it may do anything.

A target is looked up only below packages that are known, and counts as what it is, not as what it is called:
`torch.os.system` is no function of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

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


def refuse_targets(cfg: DictConfig, words: Sequence[str] = (), groups: Collection[str] = ()) -> None:
    """Check the targets that a config has from a checkpoint.

    Args:
        cfg: the config to build from, resolved.
        words: overrides that were typed.
        groups: groups that were typed.

    Raises:
        ConfigError: a target may do anything.
    """
    typed = [word.lstrip("+").partition("=")[::2] for word in words]
    for key, value in redact.values_of(OmegaConf.to_container(cfg)):
        group, name = key.partition(".")[0], key.rpartition(".")[2]
        is_typed = any(key == one or (key.startswith(f"{one}.") and str(value) in text) for one, text in typed)
        if group not in BUILT or group in groups or is_typed:
            continue
        # A text that is an interpolation only now was hidden from OmegaConf by a backslash.
        is_hidden = isinstance(value, str) and "${" in value
        if is_hidden or (name == "_target_" and not _is_known(str(value))) or (name == "trust_remote_code" and value):
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
