"""Where the ranks meet: a socket bound before rank 0 exists, so nobody has to retry."""

from __future__ import annotations

import socket

from ddp_hydra.errors import ClusterError


def bind(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Listen on this host's own address.

    Args:
        host: the address under which the other ranks reach this host.
        ports: first and last port allowed; None lets the system choose.

    Raises:
        ClusterError: none of the ports is free, or `host` is not an address of this machine.
    """
    first, last = ports or (0, 0)
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for port in range(first, last + 1):
        try:
            listener.bind((address[0], port))
            listener.listen(4096)
        except OSError as error:
            reason = error
        else:
            return listener
    listener.close()
    raise ClusterError(
        f"rank 0 can't listen on {host}, port {f'{first} to {last}' if first else 'chosen by the system'}: {reason}; "
        "free a port, or widen dispatch.port_range"
    )
