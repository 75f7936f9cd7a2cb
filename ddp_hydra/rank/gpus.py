"""Lists the GPUs of this host, by names that mean the same to all its programs."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def _driver() -> Iterator[tuple[Any, int]]:
    """Yield NVIDIA's management library and the number of GPUs; (None, 0) without a driver. No torch is imported."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None, 0
        return
    try:
        count = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        yield nvml, count.value
    finally:
        nvml.nvmlShutdown()


def count() -> int:
    with _driver() as (_, number_of_gpus):
        return number_of_gpus


@functools.cache
def uuids() -> list[str]:
    found = []
    with _driver() as (nvml, number_of_gpus):
        for number in range(number_of_gpus):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) != 0:
                return []
            if nvml.nvmlDeviceGetUUID(handle, text, UUID_BYTES) != 0:
                return []
            found.append(text.value.decode())
    return found
