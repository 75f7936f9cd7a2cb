"""Finds ports for servers that are started a moment later."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Below those that the system gives to each connection: one of these might be taken again before the server starts."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no process listens on."""
    anew = random.SystemRandom()  # each process of the tests has the same seed
    while True:
        port = anew.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
