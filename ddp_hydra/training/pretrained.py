"""Loads weights to begin with, from another run or any file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_hydra.errors import CheckpointError


def load(model: nn.Module, path: Path) -> list[str]:
    """Load the weights of a file, except those of another shape, as of a new last layer.

    Args:
        model: not wrapped in DDP.
        path: one of our checkpoints, or any state_dict that `torch.load(weights_only=True)` can read.

    Returns:
        Names of the parameters and buffers that keep their initial values.

    Raises:
        CheckpointError: the file holds no weights, or fits less than half of the model.
    """
    given = read(path)
    own = model.state_dict()
    fitting = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    if len(fitting) < len(own) / 2:
        raise CheckpointError(
            f"{path} has weights for {len(fitting)} of the {len(own)} tensors of this model, so it is of another one. "
            f"Its names begin with {', '.join(list(given)[:3])}, the model's with {', '.join(list(own)[:3])}"
        )
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a file; nothing in it is unpickled.

    Raises:
        CheckpointError: it holds no weights.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises about anything here
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"{path} can't be read as weights ({reason:.140})") from None
    for name in ("ema", "model", "state_dict"):  # the keys of our checkpoints and of most others
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no weights: give a state_dict of names and tensors")
    return {name.removeprefix("module."): value for name, value in content.items()}
