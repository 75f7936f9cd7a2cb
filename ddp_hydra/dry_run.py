"""`dry_run=true`: everything a job needs is built once and fed one batch, before any worker is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from ddp_hydra import build, results
from ddp_hydra.loader import Loader


def dry_run(config: Mapping[str, Any]) -> None:
    """Build data, model, optimizer and schedule, read one batch and run the model over it.

    Args:
        config: the resolved config, plain.
    """
    cfg = OmegaConf.create(dict(config))
    with build.datasets(cfg) as (train_set, val_set):
        results.emit("start", {"lines": first_batch(cfg, train_set, val_set)})


def first_batch(cfg: DictConfig, train_set: Any, val_set: Any) -> list[str]:
    """Build the rest, run the model over one batch, and describe it all."""
    device = build.device(cfg)
    world_size = cfg.dispatch.ranks or cfg.cluster.get("n_workers") or 1
    sampler = build.sampler(cfg, train_set, 0, world_size)
    model = build.model(cfg, train_set).to(device)
    optimizer = build.optimizer(cfg, model, sampler.global_batch)
    build.schedule(cfg, optimizer, total_steps=max(1, len(sampler)))
    x, y = next(iter(Loader(train_set, device, look_ahead=0).load(sampler.batches(0))))
    with torch.no_grad():
        loss = build.loss(cfg)(model(x), y)
    return [
        f"data      {len(train_set):,} samples" + (f", {len(val_set):,} for validation" if val_set else ""),
        f"batch     x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}",
        f"model     {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        f"steps     {len(sampler):,} in an epoch with {world_size} ranks of {cfg.data.batch_size}",
        f"loss      {loss.item():.4f} before training",
        "dry run: all of it works",
    ]
