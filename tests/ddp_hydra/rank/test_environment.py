"""What the environment of a rank is made of: paths, the network, and the names of GPUs.

NVIDIA's management library is replaced by one of two GPUs, as its C interface is called.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.errors import ClusterError, ConfigError
from ddp_hydra.rank import environment


def test_relative_entries_of_the_search_path_become_absolute_and_those_of_hooks_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "libs").mkdir()
    hook = "__editable__.myco-1.0.finder.__path_hook__"
    entries = ["", "libs", str(tmp_path / "libs"), hook, "/gone.zip"]
    places = [environment.search_place(entry) for entry in entries]
    assert places == [str(tmp_path), str(tmp_path / "libs"), str(tmp_path / "libs"), hook, "/gone.zip"]


# -- the network -------------------------------------------------------------------------------------------


def test_the_loopback_carries_its_address():
    assert environment.interface_of("127.0.0.1") == "lo"
    assert environment.address_of("lo") == "127.0.0.1"
    assert environment.interface_of("192.0.2.77") is None
    assert environment.interface_of("nobody.invalid") is None


def test_an_unknown_interface_is_said_with_those_there_are():
    with pytest.raises(ClusterError, match=r"dispatch\.interface=eth99: host \S+ has .*lo \(127\.0\.0\.1"):
        environment.address_of("eth99")


def test_the_way_to_a_server_begins_at_an_interface():
    assert environment.interface_towards("tcp://127.0.0.1:8786") == "lo"
    assert environment.interface_towards("tls://[::1]:8786") == "lo"
    assert environment.interface_towards("inproc://1/2") is None


def test_the_rendezvous_listens_on_the_hosts_own_address_only_or_everywhere_where_it_is_mapped(monkeypatch):
    monkeypatch.setattr(environment, "PORT_S", 0.0)
    with environment.bind("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with environment.bind("192.0.2.77") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.77, port .*in use.*port_range"):
            environment.bind("192.0.2.77", (port, port))


def test_a_port_that_is_taken_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with environment.bind("127.0.0.1", (port, port + 20)) as listener:
            assert port < listener.getsockname()[1] <= port + 20


def test_the_only_port_is_waited_for_while_the_attempt_before_ends(monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    monkeypatch.setattr(environment, "PORT_S", 60.0)
    threading.Timer(0.3, taken.close).start()
    with environment.bind("127.0.0.1", (port, port)) as listener:
        assert listener.getsockname()[1] == port


# -- GPUs --------------------------------------------------------------------------------------------------

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
