"""The names of GPUs. NVIDIA's management library is replaced by one of two GPUs, as its C interface is called."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.rank import environment

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2"]
ERROR = 999


@pytest.fixture
def driver(monkeypatch):
    """Set which calls of the library fail; its shutdowns are counted."""
    state = SimpleNamespace(failing=set(), shutdowns=0)

    def returning(name: str, change: Any) -> Any:
        def call(*args: Any) -> int:
            if name in state.failing:
                return ERROR
            change(*args)
            return 0

        return call

    def shutdown() -> None:
        state.shutdowns += 1

    def set_count(pointer: Any) -> None:
        pointer._obj.value = len(UUIDS)

    def set_handle(number: int, pointer: Any) -> None:
        pointer._obj.value = 1 + number

    def set_uuid(handle: Any, text: Any, size: int) -> None:
        assert size == len(text)
        text.value = UUIDS[handle.value - 1].encode()

    nvml = SimpleNamespace(
        nvmlInit_v2=returning("init", lambda: None),
        nvmlDeviceGetCount_v2=returning("count", set_count),
        nvmlDeviceGetHandleByIndex_v2=returning("handle", set_handle),
        nvmlDeviceGetUUID=returning("uuid", set_uuid),
        nvmlShutdown=shutdown,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    environment.gpu_uuids.cache_clear()
    yield state
    environment.gpu_uuids.cache_clear()


@pytest.mark.parametrize("failing", ["handle", "uuid"])
def test_a_driver_that_tells_no_uuids_leaves_names(failing, driver):
    driver.failing = {failing}
    assert environment.gpu_uuids() == ["0", "1"]
    assert environment.gpu_identities({"CUDA_VISIBLE_DEVICES": "1,0"}) == ["1", "0"]


def test_a_library_that_does_not_start_shows_no_gpu(driver):
    driver.failing = {"init"}
    assert (environment.gpu_uuids(), driver.shutdowns) == ([], 0)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1, 0", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]),  # the beginning of a UUID
        ("GPU-bbbb-2,7", ["GPU-bbbb-2", "7"]),
        ("MIG-cccc", ["MIG-cccc"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["GPU-bbbb-2"]),  # CUDA looks no further
    ],
)
def test_visible_gpus_get_names_that_mean_the_same_everywhere(visible, expected, driver):
    assert environment.gpu_identities({"CUDA_VISIBLE_DEVICES": visible}) == expected
    if expected:
        assert (environment.gpu_uuids(), driver.shutdowns) == (UUIDS, 1)
