"""Sets the precision of a step."""

from __future__ import annotations

import torch

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_float32(precision: str) -> None:
    """Set the precision of float32 matrix products: 24 bits of mantissa or, for tf32 on GPUs, 11.

    Convolutions keep torch's default: TF32 if the GPU has it. To use all bits there, set
    `torch.backends.cudnn.allow_tf32 = False` in the model's file.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of the forward pass. For bf16 and fp16, it lowers operations that torch considers safe."""
    return torch.autocast(device.type, LOW.get(precision, torch.bfloat16), enabled=precision in LOW)


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return the scaler that keeps small fp16 gradients above zero (Micikevicius et al., 2018); else disabled."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
