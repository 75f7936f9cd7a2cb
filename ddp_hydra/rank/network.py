"""Looks up the network interfaces of this machine, and binds the socket on which the ranks meet."""

from __future__ import annotations

import errno
import itertools
import socket

import psutil

from ddp_hydra.errors import ClusterError


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first, as gloo prefers; without link-local ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            entry.address.partition("%")[0]
            for family in families
            for entry in addresses
            if entry.family == family and not entry.address.startswith("fe80:")
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }


def address_of(interface: str) -> str:
    """Return the address of this machine on an interface.

    Raises:
        ClusterError: there is no such interface, or it has no address.
    """
    found = interfaces()
    if not found.get(interface):
        raise ClusterError(f"dispatch.interface={interface}: host {socket.gethostname()} has {describe(found)}")
    return found[interface][0]


def describe(interfaces: dict[str, list[str]]) -> str:
    """Return a text such as "eth0 (10.0.0.1), lo (127.0.0.1)"."""
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in sorted(interfaces.items()) if addresses)


def interface_of(host: str) -> str | None:
    """Return the interface that has an address; None if no interface of this machine has it."""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        return None
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def interface_towards(address: str) -> str | None:
    """Return the interface through which this machine reaches a server; None if it does not."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as datagrams:
            datagrams.connect(target)  # sends nothing
            return interface_of(datagrams.getsockname()[0])
    except (OSError, ValueError):
        return None


def bind(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Listen for the ranks that meet here, on this host's own address only; rank 0 takes the socket over.

    It is bound before rank 0 exists, so that no rank has to retry.

    An address that this machine does not have (a container's mapped ports, a cloud's public address) leads here from
    outside. Only then the socket listens on all interfaces.

    Args:
        host: the address under which the other ranks reach this host.
        ports: first and last port allowed; None lets the system choose.

    Raises:
        ClusterError: none of the ports is free.
    """
    first, last = ports or (0, 0)
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reason: OSError | None = None
    for port, own in itertools.product(range(first, last + 1), (str(address), "")):
        if not own and reason is not None and reason.errno != errno.EADDRNOTAVAIL:
            continue
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((own, port))
            listener.listen(4096)
        except OSError as error:
            listener.close()
            reason = error
        else:
            return listener
    chosen = f"{first} to {last}" if first else "chosen by the system"
    raise ClusterError(f"rank 0 can't listen on {host}, port {chosen}: {reason}; free it, or widen dispatch.port_range")
