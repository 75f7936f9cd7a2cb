"""Connects to the fork server of this host, and starts it if it does not run.

All workers of one user, one Python environment and one batch job on a host share a server, which they reach through a
socket in a private folder. The first worker starts it. It ends with its last connection, or stays for as long as the
last rank's request said (`keep_warm_s`). The socket is bound before the server imports anything, so the first clients
wait in its backlog instead of polling.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hydra.console.signals import open_standard_files
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import environment
from ddp_hydra.rank.processes import has_ended, user_of
from ddp_hydra.storage.files import try_lock, unlock

log = logging.getLogger(__name__)
TOLD_S = 1.0
"""Seconds of waiting for the lock of the folder after which the user is told."""
ANSWER_S = 2.0
"""Seconds that a server may take to answer a question; one that is just starting takes longer."""


def connect() -> socket.socket:
    """Connect to the fork server of this host, which lives at least as long as this; start it if it does not run."""
    address = socket_path()
    with locked(address.parent) as folder:
        short = short_path(address, folder)
        try:
            return connect_to(short)
        except (FileNotFoundError, ConnectionRefusedError):
            address.unlink(missing_ok=True)
            _start(address, short)
            return connect_to(short)


_held: socket.socket | None = None
_held_address: Path | None = None
_holding = threading.Lock()


def hold() -> None:
    global _held, _held_address
    with _holding:
        address = socket_path()
        if _held is not None and (address != _held_address or has_ended(_held)):
            _held.close()
            _held = None
        if _held is None:
            _held, _held_address = connect(), address


def release() -> None:
    global _held
    with _holding:
        if _held is not None:
            _held.close()
            _held = None


def socket_path() -> Path:
    return runtime_folder() / f"{environment.identity()}.sock"


def ask(address: Path, question: str) -> dict[str, Any] | None:
    """Ask a server for its "status", or to "stop" after its last rank; return {} without an answer, None at its end."""
    if not os.path.lexists(address):  # to lock its folder would make it again
        return None
    with locked(address.parent) as folder:
        try:
            connection = connect_to(short_path(address, folder))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
    with connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.sendall(json.dumps({question: True}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                found: dict[str, Any] = json.loads(lines.readline() or b"{}")
            return found
        except OSError:
            return {}


def runtime_folder() -> Path:
    root = os.environ.get("XDG_RUNTIME_DIR")
    if root and os.access(root, os.W_OK):
        return Path(root) / "ddp_hydra"
    return Path(tempfile.gettempdir()) / f"ddp_hydra-{os.getuid()}"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a folder during the block, and make it again if a server has just removed it; yield its descriptor."""
    for _ in range(MAX_TRIES):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError, FileExistsError):
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                break
            continue
        try:
            status = os.fstat(handle)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise not_own(folder, "it is another user's, or open to others")
            lock(handle, folder)
            if folder.exists() and folder.stat().st_ino == status.st_ino:
                yield handle
                return
        finally:
            unlock(handle)
    raise not_own(folder, f"there is {'a symbolic link' if folder.is_symlink() else 'something else'} in its place")


def not_own(path: Path | str, why: str) -> ConfigError:
    own = f"{path} must be your own and closed to others, since ranks are started through it; {why}"
    return ConfigError(f"{own}: remove it, or set XDG_RUNTIME_DIR to a folder of your own")


def lock(handle: int, folder: Path) -> None:
    """Lock a folder; say so where that takes longer than a second."""
    begin, is_told = time.monotonic(), False
    while not try_lock(handle):
        if not is_told and time.monotonic() - begin > TOLD_S:
            log.warning("another process has locked %s: waiting for it; if it hangs, end it (fuser %s)", folder, folder)
            is_told = True
        time.sleep(0.002)


MAX_TRIES = 1000
"""One or two are enough when a server has just removed the folder."""
MAX_SOCKET_PATH = 103
"""Number of bytes that every system allows in the path of a socket."""


def short_path(address: Path, folder: int) -> str:
    """Return the path of a socket; one through its open folder if the real one is too long."""
    if len(os.fsencode(address)) <= MAX_SOCKET_PATH:
        return str(address)
    return f"/proc/self/fd/{folder}/{address.name}"


def connect_to(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        if (user := user_of(connection)) not in (None, os.getuid()):
            raise not_own(address, f"it belongs to user id {user}")
    except BaseException:
        connection.close()
        raise
    return connection


def _start(address: Path, short: str) -> None:
    open_standard_files()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(short)
        address.chmod(0o600)
        listener.listen(128)
        command = [sys.executable, "-m", "ddp_hydra.rank.fork_server", str(listener.fileno()), str(address)]
        # The intermediate parent ends at once, so that the server outlives the process that started it.
        subprocess.run(
            [sys.executable, "-S", "-c", _DETACH, *command],
            env=environment.of_server(),
            cwd="/",  # it may outlive this process's folder
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            start_new_session=True,  # it never receives a terminal's Ctrl-C
        )
    finally:
        listener.close()


_DETACH = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
