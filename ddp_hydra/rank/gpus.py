"""Lists the GPUs of this host, by names that mean the same to all its programs."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

UUID_BYTES = 96


def visible(variables: Mapping[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in variables:
        names = [gpu.strip() for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))  # as CUDA does
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def identities(variables: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the visible GPUs; their names if the driver tells no UUIDs."""
    names = visible(variables)
    known = uuids() if names else []
    return [_uuid(name, known) for name in names]


def _uuid(name: str, known: list[str]) -> str:
    if name.isdigit():
        return known[int(name)] if int(name) < len(known) else name
    return next((uuid for uuid in known if uuid.startswith(name)), name)  # CUDA, too, takes the beginning of a UUID


def count() -> int:
    return len(uuids())


@functools.cache
def uuids() -> list[str]:
    """Return the UUID of each GPU; its number where the driver does not tell it. No torch is imported."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # NVIDIA's management library
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        gpus = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus))
        return [_uuid_of(nvml, number) for number in range(gpus.value)]
    finally:
        nvml.nvmlShutdown()


def _uuid_of(nvml: ctypes.CDLL, number: int) -> str:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
    is_known = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0
    return text.value.decode() if is_known and nvml.nvmlDeviceGetUUID(handle, text, UUID_BYTES) == 0 else str(number)
