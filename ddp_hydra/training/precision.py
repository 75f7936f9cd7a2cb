"""The arithmetic of a step."""

from __future__ import annotations

import torch

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_float32(precision: str) -> None:
    """Let matrix products of float32 have 24 bits of mantissa, or 11 where the GPU is faster so (tf32).

    Convolutions stay as torch has them by default, TF32 where the GPU has it. Who wants all of their bits sets
    `torch.backends.cudnn.allow_tf32 = False` in the model's file.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context of the forward pass: bf16 and fp16 where torch holds that to be safe, nothing for the others."""
    return torch.autocast(device.type, LOW.get(precision, torch.bfloat16), enabled=precision in LOW)


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """What keeps small gradients of fp16 from becoming zero (Micikevicius et al., 2018); idle for the others."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
