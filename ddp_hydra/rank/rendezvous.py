"""Binds the socket on which the ranks meet, before rank 0 exists, so that no rank has to retry."""

from __future__ import annotations

import errno
import socket

from ddp_hydra.errors import ClusterError


def bind(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Listen on this host's own address only.

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
    try:
        return _bind(family, str(address), first, last)
    except OSError as error:
        reason = error
    if reason.errno == errno.EADDRNOTAVAIL:
        try:
            return _bind(family, "", first, last)
        except OSError as error:
            reason = error
    raise ClusterError(
        f"rank 0 can't listen on {host}, port {f'{first} to {last}' if first else 'chosen by the system'}: {reason}; "
        "free a port, or widen dispatch.port_range"
    )


def _bind(family: int, address: str, first: int, last: int) -> socket.socket:
    for port in range(first, last + 1):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(4096)
        except OSError as error:
            listener.close()
            if port == last or error.errno == errno.EADDRNOTAVAIL:
                raise
        else:
            return listener
    raise AssertionError("the last port raises")
