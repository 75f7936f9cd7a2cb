"""The GPUs that a worker sees, by names that mean the same to all programs of the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

UUID_BYTES = 96


def visible(variables: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process with these variables sees, counted without touching CUDA."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [gpu.strip() for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def identities(variables: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the visible GPUs; where the driver tells none, their names."""
    names = visible(variables)
    known = uuids() if names else []
    return [_uuid(name, known) for name in names]


def _uuid(name: str, known: list[str]) -> str:
    if name.isdigit():
        return known[int(name)] if int(name) < len(known) else name
    return next((uuid for uuid in known if uuid.startswith(name)), name)  # a beginning of it will do for CUDA, too


@functools.cache
def uuids() -> list[str]:
    """Ask NVIDIA's driver for the UUIDs of the GPUs that this process may use, in order of their numbers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count, found = ctypes.c_uint(0), []
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for number in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) != 0:
                return []
            if nvml.nvmlDeviceGetUUID(handle, text, UUID_BYTES) != 0:
                return []
            found.append(text.value.decode())
        return found
    finally:
        nvml.nvmlShutdown()
