"""What memory a rank takes, and what to say when there is too little."""

from __future__ import annotations

import resource
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from ddp_hydra import heartbeat
from ddp_hydra.errors import OutOfMemory

GIB = 2**30


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank has taken: of its GPU, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin(device: torch.device) -> None:
    """Count the most memory from here on: a process may have run another job before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_of_all_ranks(device: torch.device) -> int:
    """The most that any rank has taken, in bytes. A collective."""
    mine = torch.tensor([peak_bytes(device)], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return int(mine)


_watched: list[weakref.ref[nn.Module]] = []


def watch(model: nn.Module) -> None:
    """Remember whose memory it is."""
    _watched[:] = [weakref.ref(model)]


@contextmanager
def explained(cfg: DictConfig) -> Iterator[None]:
    """Turn the error of a full memory into one that says what took it and what to lower.

    Raises:
        OutOfMemory: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_about_memory(error):
            raise
        raise OutOfMemory(_say(cfg, str(error))) from error
    finally:
        _watched.clear()


def _is_about_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "not enough memory" in text


def _say(cfg: DictConfig, said: str) -> str:
    place = heartbeat.here().read()
    found = [model for reference in _watched if (model := reference()) is not None]
    weights = [part for model in found for part in model.parameters()]
    device = weights[0].device if weights else torch.device("cpu")
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    batch, halves = cfg.data.batch_size, 2 * cfg.trainer.gradient_accumulation_steps
    advice = (
        [f"data.batch_size={batch // 2} trainer.gradient_accumulation_steps={halves} (the same steps)"]
        if batch > 1
        else []
    )
    if cfg.trainer.precision in ("fp32", "tf32"):
        advice.append("trainer.precision=bf16")
    advice += [f"trainer.activation_checkpointing=[{name}]" for name in map(_repeated, found) if name]
    taken, size = peak_bytes(device) / GIB, sum(part.nbytes for part in weights) / GIB
    return (
        f"no memory left on {device} in step {place.step}, phase {place.phase}: at most {taken:.2f} of "
        f"{total / GIB:.1f} GiB were taken. The weights are {size:.2f} GiB, their "
        "gradients as much, the optimizer up to twice that; the rest is activations, which grow with data.batch_size="
        f"{batch}. Type {', or '.join(advice) or 'a smaller model'}. torch said: {said.splitlines()[0]:.200}"
    )


def _repeated(model: nn.Module) -> str | None:
    """The class of the parts that a model has most of, among those that have parts themselves."""
    kinds = Counter(
        type(part).__name__ for part in model.modules() if part is not model and len(list(part.children())) > 1
    )
    kinds.pop("Sequential", None)
    return kinds.most_common(1)[0][0] if kinds else None
