"""Find the checkpoint that a job resumes from, and the weights that it starts with."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from ddp_hydra.errors import CheckpointError
from ddp_hydra.storage import results_root, stored_checkpoints
from ddp_hydra.storage.manifest import find_checkpoint


def find_resume(cfg: DictConfig, run_dir: Path) -> Path:
    """Return the checkpoint file that `resume` names, downloaded into the run directory if it is in a bucket."""
    run = results_root.find(cfg.resume)
    if results_root.is_url(run):
        folder = run_dir / ".resume"
        folder.mkdir(parents=True, exist_ok=True)
        return stored_checkpoints.fetch_checkpoint(run, folder, retry_s=cfg.results.retry_s).absolute()
    return find_checkpoint(run).absolute()


def find_weights(cfg: DictConfig) -> Path | None:
    """Return the file that `model.weights` names; of a run directory, its best checkpoint.

    Returns:
        None if `model.weights` is the name of pretrained weights, not a path.

    Raises:
        CheckpointError: it is a path, and nothing is there.
    """
    if (given := weights_path(cfg)) is None:
        return None
    path = Path(given).expanduser()
    if path.is_dir():
        return find_checkpoint(path, "best").absolute()
    if not path.is_file():
        raise CheckpointError(f"model.weights={given}: there is no such file, nor a run directory")
    return path.absolute()


def weights_path(cfg: DictConfig) -> str | None:
    """Return `model.weights` if it looks like a path, else None."""
    given = cfg.model.get("weights") if isinstance(cfg.model, DictConfig) else None
    is_path = isinstance(given, str) and ({"/", os.sep} & set(given) or given.endswith((".pt", ".pth")))
    return given if is_path else None
