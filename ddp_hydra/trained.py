"""A trained model, brought back from its run directory; for `evaluate`, `generate` and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from ddp_hydra import build, project
from ddp_hydra.checkpoint import load_weights, read
from ddp_hydra.errors import ConfigError
from ddp_hydra.manifest import find_checkpoint

T = TypeVar("T")


@dataclass
class Trained:
    """What a run has left.

    Args:
        cfg: the run's config, resolved.
        model: with the checkpoint's weights, in evaluation mode.
        train_set: the data set it was trained on.
        device: where the model is.
        step: optimizer steps of the checkpoint.
        path: the checkpoint.
    """

    cfg: DictConfig
    model: nn.Module
    train_set: Any
    device: torch.device
    step: int
    path: Path


def load(run: str | Path, which: Literal["last", "best"] = "best", overrides: Sequence[str] = ()) -> Trained:
    """Bring back a run's model and training data.

    Args:
        run: run directory or checkpoint file.
        which: the checkpoint to take of a run directory.
        overrides: "key=value" changes of the run's config, such as data.source=<path>.

    Raises:
        CheckpointError: there is no run, or no whole checkpoint.
        ConfigError: an override does not fit the run's config.
    """
    sys.path.insert(0, str(project.find()))
    path = find_checkpoint(run, which)
    content = read(path)
    cfg = OmegaConf.create(content["config"])
    OmegaConf.set_struct(cfg, True)
    try:
        cfg.merge_with_dotlist(list(overrides))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    train_set = build.dataset(cfg.data.train)
    device = build.device(cfg)
    model = build.model(cfg, train_set).to(device)
    load_weights(model, content["ema"] if content.get("ema") else content)
    return Trained(cfg, model.eval(), train_set, device, content["position"]["step"], path)


def parse(options: type[T], arguments: Sequence[str], usage: str) -> tuple[T, list[str]]:
    """Read "key=value" words: those of `options`, and the rest, which are overrides of the run's config.

    Args:
        options: a dataclass with a field `run`.
        arguments: of the command line.
        usage: printed for --help.

    Raises:
        ConfigError: a word is not key=value, a value has the wrong type, or `run` is missing.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)  # noqa: T201
        sys.exit(0)
    for word in arguments:
        if "=" not in word:
            raise ConfigError(f"{word!r} is not key=value; usage:\n{usage}")
    schema = OmegaConf.structured(options)
    keys = [str(key) for key in schema]
    mine = [word for word in arguments if word.partition("=")[0] in keys]
    try:
        parsed = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_dotlist(mine)))
    except OmegaConfBaseException as error:
        what = "run=<run directory> is missing" if "mandatory" in str(error) else str(error).splitlines()[0]
        raise ConfigError(f"{what}; usage:\n{usage}") from error
    unknown = [word for word in arguments if word not in mine and "." not in word.partition("=")[0]]
    if unknown:
        raise ConfigError(f"{unknown[0]!r}: the keys are {', '.join(keys)}; usage:\n{usage}")
    return cast("T", parsed), [word for word in arguments if word not in mine]
