"""Adds to an error of a training step what the user needs to see: the shapes of input, output and target."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from ddp_hydra.console.tracebacks import user_path
from ddp_hydra.data.batch import described

_OUTPUTS = ("prediction", "logits", "output")
"""Variables of the tasks that hold a model's output."""
_SHOWN = 8


@contextmanager
def explained(batch: Any) -> Iterator[None]:
    """Add a note with shapes to an error of the block.

    Args:
        batch: that the block computes.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        for line in lines(error, batch):
            error.add_note(line)
        raise


def lines(error: BaseException, batch: Any) -> Iterator[str]:
    """Yield lines about the batch, the tensors where the user's code failed, and the model's output if it had one."""
    yield f"the batch: {described(batch)}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    numbers = [number for _, number in traceback.walk_tb(error.__traceback__)]
    for frame, number in reversed(list(zip(frames, numbers, strict=True))):
        path = user_path(frame.f_code.co_filename)
        if path is not None and (found := _tensors(frame)):
            yield f"{path}, line {number}, in {frame.f_code.co_name}: {', '.join(found)}"
            return
    for frame in reversed(frames):
        for name in _OUTPUTS:
            if isinstance(output := frame.f_locals.get(name), Tensor):
                yield f"the model's output: {described(output)}"
                return


def _tensors(frame: FrameType) -> list[str]:
    """Describe the tensors among the variables of a function."""
    found = [f"{name} {described(value)}" for name, value in frame.f_locals.items() if isinstance(value, Tensor)]
    return found[:_SHOWN]
