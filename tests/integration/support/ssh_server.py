"""An SSH server that runs what it is told, as sshd does: `python ssh_server.py <folder>`.

It listens on a free port of loopback, which it prints. The folder holds its own key (`host`) and the one key that may
log in (`user.pub`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_shell
from pathlib import Path

import asyncssh


async def run(process: asyncssh.SSHServerProcess) -> None:
    child = await create_subprocess_shell(
        str(process.command), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stderr is not None
    listening = asyncio.create_task(listen(process, child.pid))
    with contextlib.suppress(OSError, asyncssh.Error):
        await asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
    code = await child.wait()
    listening.cancel()
    with contextlib.suppress(OSError, asyncssh.Error):
        process.exit(code if code >= 0 else 128 - code)


async def pump(source: asyncio.StreamReader, target: asyncssh.SSHWriter) -> None:
    while data := await source.read(65536):
        with contextlib.suppress(OSError, asyncssh.Error):  # nobody listens any more; the command goes on
            target.write(data)


async def listen(process: asyncssh.SSHServerProcess, pid: int) -> None:
    while True:
        try:
            if not await process.stdin.read(1):
                return
        except asyncssh.SignalReceived as received:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, getattr(signal, f"SIG{received.signal}"))
        except (OSError, asyncssh.Error):
            return


async def main(folder: Path) -> None:
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[str(folder / "host")],
        authorized_client_keys=str(folder / "user.pub"),
        process_factory=run,
        encoding=None,
    )
    (folder / "port.tmp").write_text(str(server.get_port()))
    (folder / "port.tmp").rename(folder / "port")
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(Path(sys.argv[1])))
