"""An SFTP server: `python sftp_server.py <folder> <password>`.

It listens on a free port of loopback, which it writes into `<folder>/port`, and serves `<folder>/files`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncssh


class Server(asyncssh.SSHServer):
    """Lets in whoever has the password."""

    password = ""

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == self.password


async def main(folder: Path, password: str) -> None:
    """Serve until told to end."""
    Server.password = password
    (folder / "files").mkdir()
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        server_factory=Server,
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(folder / "files").encode()),
    )
    part = folder / "port.part"
    part.write_text(str(server.get_port()))
    part.rename(folder / "port")
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
