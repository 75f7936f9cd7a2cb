from __future__ import annotations

import socket

import pytest

from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import environment


def test_the_loopback_carries_its_address():
    assert environment.interface_of("127.0.0.1") == "lo"
    assert environment.address_of("lo") == "127.0.0.1"


def test_an_address_of_another_machine_is_on_no_interface():
    assert environment.interface_of("192.0.2.77") is None
    assert environment.interface_of("nobody.invalid") is None


def test_an_unknown_interface_is_said_with_those_there_are():
    with pytest.raises(ClusterError, match=r"dispatch\.interface=eth99: host \S+ has .*lo \(127\.0\.0\.1"):
        environment.address_of("eth99")


def test_the_way_to_a_server_begins_at_an_interface():
    assert environment.interface_towards("tcp://127.0.0.1:8786") == "lo"
    assert environment.interface_towards("tls://[::1]:8786") == "lo"
    assert environment.interface_towards("inproc://1/2") is None


def test_the_rendezvous_listens_on_the_hosts_own_address_only():
    with environment.bind("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_rendezvous_listens_everywhere_where_the_address_is_mapped():
    with environment.bind("192.0.2.77") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        port = listener.getsockname()[1]
        with pytest.raises(ClusterError, match=r"can't listen on 192\.0\.2\.77, port .*in use.*port_range"):
            environment.bind("192.0.2.77", (port, port))


def test_a_port_that_is_taken_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with environment.bind("127.0.0.1", (port, port + 20)) as listener:
            assert port < listener.getsockname()[1] <= port + 20
