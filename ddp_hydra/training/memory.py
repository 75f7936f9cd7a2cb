"""Measures the memory of a rank, and explains what to do when there is too little."""

from __future__ import annotations

import re
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from omegaconf import DictConfig
from torch import nn

from ddp_hydra import heartbeat
from ddp_hydra.errors import OutOfMemory
from ddp_hydra.training.parallel import weights

GIB = 2**30


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # NCCL has opened the GPU by now, gloo has not
        torch.cuda.reset_peak_memory_stats(device)


_watched: list[weakref.ref[nn.Module]] = []


def watch(model: nn.Module) -> nn.Module:
    _watched[:] = [weakref.ref(model)]
    return model


@contextmanager
def explained(cfg: DictConfig) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        is_told = re.search("can't allocate memory|not enough memory", said)
        if not (is_told or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise OutOfMemory(_message(cfg, said)) from error
    finally:
        _watched.clear()


def _message(cfg: DictConfig, reason: str) -> str:
    place = heartbeat.here().read()
    models = [model for reference in _watched if (model := reference()) is not None]
    device = next((one for model in models for one in weights.devices(model)), torch.device("cpu"))
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    batch, halves = cfg.data.batch_size, 2 * cfg.trainer.gradient_accumulation_steps
    same_steps = f"data.batch_size={batch // 2} trainer.gradient_accumulation_steps={halves} (the same steps)"
    if cfg.data.get("global_batch"):
        same_steps = same_steps.partition(" ")[2]
    advice = [same_steps] if batch > 1 else []
    if cfg.trainer.precision in ("fp32", "tf32"):
        advice.append("trainer.precision=bf16")
    advice += [f"trainer.activation_checkpointing=[{name}]" for name in map(_repeated, models) if name]
    taken, size = peak_bytes(device) / GIB, sum(map(weights.n_bytes, models)) / GIB
    return (
        f"no memory left on {device} in step {place.step}, phase {place.phase}: at most {taken:.2f} of "
        f"{total / GIB:.1f} GiB were taken, {size:.2f} GiB for the weights, as much for their gradients. "
        f"Type {', or '.join(advice) or 'a smaller model'}. torch said: {reason.splitlines()[0]:.200}"
    )


def _repeated(model: nn.Module) -> str | None:
    kinds = Counter(
        type(part).__name__ for part in model.modules() if part is not model and len(list(part.children())) > 1
    )
    kinds.pop("Sequential", None)
    return kinds.most_common(1)[0][0] if kinds else None
