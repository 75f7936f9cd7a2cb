"""Loads a trained model from its checkpoint, for `evaluate`, `predict`, `generate`, `export` and notebooks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_hydra.config import checkpoint_config, project
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, plain_state, resume
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.state import load_weights


@dataclass
class TrainedModel:
    """A trained model with its config.

    Args:
        cfg: the run's config with the overrides, resolved.
        model: with the checkpoint's weights, in evaluation mode.
        data: describes the data that it was trained on.
        device: of the model.
        channels_last: the memory layout of its images.
        step: optimizer steps done at the checkpoint.
        config: the run's config as the checkpoint keeps it, with its interpolations: their values may be secret.
    """

    cfg: DictConfig
    model: nn.Module
    data: DataDescription
    device: torch.device
    channels_last: bool
    step: int
    config: Mapping[str, Any]

    @cached_property
    def train_set(self) -> Any:
        return build_data.dataset(self.cfg.data.train, self.cfg.seed)


def load(run: str | Path, which: str = "best", overrides: Sequence[str] = (), split: str | None = None) -> TrainedModel:
    """Load a run's model.

    Args:
        run: run directory, checkpoint file, or the URL of a run.
        which: the checkpoint of a run directory, "best" or "last".
        overrides: "key=value" changes of the run's config, such as data.source=<path>; keys that interpolate them
            follow.
        split: the only data set that will be read, as by `checkpoint_config.composed`, if the run has it; None: any.

    Raises:
        CheckpointError: there is no run, or no complete checkpoint.
        ConfigError: an override does not fit the run's config, or there is no such checkpoint.
    """
    project.make_importable(project.layers())
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
        content = needed(read(RunRef.named(run).checkpoint(which, Path(folder))))
    content["config"] = OmegaConf.to_container(checkpoint_config.changed(content["config"], overrides))
    split = split if split is not None and (content["config"].get("data") or {}).get(split) else None
    return restore(content, checkpoint_config.composed(content["config"], overrides, split=split))


def needed(content: dict[str, Any]) -> dict[str, Any]:
    weights = content["ema"] if content.get("ema") else content
    kept = {name: content.get(name) for name in ("config", "data", "loss", "position")}
    return {**kept, "model": weights["model"]}


def restore(content: dict[str, Any], cfg: DictConfig) -> TrainedModel:
    device, data = builders.device(cfg), DataDescription.from_dict(content["data"])
    model = builders.model(cfg, data).to(device)
    channels_last = builders.channels_last(cfg, model)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    load_weights(model, content)
    step, config = content["position"]["step"], content["config"]
    return TrainedModel(cfg, model.eval(), data, device, channels_last, step, config)


def restore_loss(task: Task, content: Mapping[str, Any], cfg: DictConfig) -> None:
    if (loss := builders.loss_state(task)) is not None:
        before = OmegaConf.to_container(OmegaConf.create(content["config"]).loss, resolve=True)
        saved = resume.fitting_loss(loss, content["loss"], before, OmegaConf.to_container(cfg.loss))
        loss.load_state_dict(plain_state.decode(saved) if saved else loss.state_dict())
