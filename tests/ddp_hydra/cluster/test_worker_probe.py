"""What a worker is asked before a gang starts on it."""

from __future__ import annotations

import platform
import socket
import sys

import pytest

import ddp_hydra
from ddp_hydra.cluster.worker_probe import probe


@pytest.mark.medium
def test_versions_lacks_and_interfaces_of_this_host(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    found = probe(["ddp_hydra", "pytest", "no-such-package"], ["pytest>=1", "pytest>=999", "no-such-package>2"])
    assert (found["host"], found["executable"]) == (socket.gethostname(), sys.executable)
    assert found["versions"] == {
        "python": platform.python_version(),
        "ddp_hydra": ddp_hydra.__version__,
        "pytest": pytest.__version__,
        "no-such-package": None,
    }
    assert found["missing"] == [
        ["pytest>=999", f"{pytest.__version__} is installed"],
        ["no-such-package>2", "not installed"],
    ]
    assert "127.0.0.1" in found["interfaces"]["lo"]
    assert found["variables"] == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_ddp_hydra_that_cannot_be_imported_has_no_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddp_hydra", None)
    assert probe(["ddp_hydra"], [])["versions"]["ddp_hydra"] is None
