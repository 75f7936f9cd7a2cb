"""Limit the bandwidth of all connections to the server together, like a network link.

It runs as a process of its own, as it computes: `python -m benchmarks.object_store.link PORT`.
"""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.commands import ROOT
from benchmarks.object_store import server

GBIT_PER_S = 1.0
_PIECE = 64 * 1024
_AHEAD_S = 0.002
"""How far the link may run ahead of time: sleeps shorter than that are not worth their cost."""


@contextmanager
def to(port: int) -> Iterator[str]:
    """Put a link before a port of this machine for the length of a `with` block; gives its URL."""
    command = [sys.executable, "-m", "benchmarks.object_store.link", str(port)]
    process = server.start(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], 20)[0]
        line = process.stdout.readline().strip() if ready else b""
        if not line.isdigit():
            sys.exit("the link did not start")
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        server.end(process)


class Link:
    """Relays connections; what comes from the server shares the bandwidth.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.free_at = 0.0

    async def serve(self) -> None:
        """Say the port, and relay until the process ends."""
        relay = await asyncio.start_server(self.relay, "127.0.0.1", 0)
        print(relay.sockets[0].getsockname()[1], flush=True)
        await relay.serve_forever()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection, in both directions, until one side closes it."""
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port, limit=_PIECE)
        up = asyncio.create_task(self.copy(reader, to_server, limited=False))
        down = asyncio.create_task(self.copy(from_server, writer, limited=True))
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        to_server.close()
        writer.close()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limited: bool) -> None:
        """Relay one direction.

        Args:
            reader: where it comes from.
            writer: where it goes to.
            limited: whether it takes its time.
        """
        while data := await reader.read(_PIECE):
            if limited:
                await self.take(len(data))
            writer.write(data)
            await writer.drain()

    async def take(self, n_bytes: int) -> None:
        """Wait for the turn of a number of bytes."""
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now) + n_bytes / (GBIT_PER_S * 1e9 / 8)
        if self.free_at - now > _AHEAD_S:
            await asyncio.sleep(self.free_at - now)


if __name__ == "__main__":
    asyncio.run(Link(int(sys.argv[1])).serve())
