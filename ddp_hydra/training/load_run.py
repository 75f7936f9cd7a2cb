"""Loads a trained model from its run directory, for `evaluate`, `generate` and notebooks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from omegaconf import DictConfig
from torch import nn

from ddp_hydra.config import checkpoint_config, project
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import fetch_checkpoint, results_root
from ddp_hydra.storage.manifest import find_checkpoint
from ddp_hydra.training import builders
from ddp_hydra.training.checkpoint import load_weights, read


@dataclass
class Trained:
    """A trained model with its config and its training data.

    Args:
        cfg: the run's config with the overrides, resolved.
        model: with the checkpoint's weights, in evaluation mode.
        train_set: the data set that it was trained on.
        device: of the model.
        step: optimizer steps done at the checkpoint.
        path: the checkpoint file.
    """

    cfg: DictConfig
    model: nn.Module
    train_set: Any
    device: torch.device
    step: int
    path: Path


def load(run: str | Path, which: str = "best", overrides: Sequence[str] = ()) -> Trained:
    """Load a run's model and its training data.

    Args:
        run: run directory, checkpoint file, or the URL of a run.
        which: the checkpoint of a run directory, "best" or "last".
        overrides: "key=value" changes of the run's config, such as data.source=<path>; keys that interpolate them
            follow.

    Raises:
        CheckpointError: there is no run, or no complete checkpoint.
        ConfigError: an override does not fit the run's config, or there is no such checkpoint.
    """
    if which not in ("best", "last"):
        raise ConfigError(f"which={which}: give best or last")
    name = cast('Literal["last", "best"]', which)
    project.make_importable(project.layers())
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
        place = results_root.find(str(run))
        is_away = results_root.is_url(place)
        path = fetch_checkpoint.fetch_checkpoint(place, Path(folder), name) if is_away else find_checkpoint(place, name)
        content = read(path)
    cfg = checkpoint_config.composed(content["config"], overrides)
    train_set = builders.dataset(cfg.data.train)
    device = builders.device(cfg)
    model = builders.model(cfg, train_set).to(device)
    load_weights(model, content["ema"] if content.get("ema") else content)
    return Trained(cfg, model.eval(), train_set, device, content["position"]["step"], path)
