"""Connects to the fork server of this host, and starts it if it does not run.

All workers of one user, one Python environment and one batch job on a host share a server, which they reach through a
socket in a private folder. The first worker starts it; it ends with its last connection. The socket is bound before the
server imports anything, so the first clients wait in its backlog instead of polling.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ddp_hydra
from ddp_hydra.errors import ConfigError


def connect() -> socket.socket:
    """Connect to the fork server of this host; start it if it does not run.

    Returns:
        A connected socket. The server lives at least as long as it is open.
    """
    address = socket_path()
    with locked(address.parent) as folder:
        short = _short(address, folder)
        try:
            return _connect(short)
        except (FileNotFoundError, ConnectionRefusedError):
            address.unlink(missing_ok=True)
            _start(address, short)
            return _connect(short)


_held: socket.socket | None = None


def hold() -> None:
    """Keep the fork server of this host alive as long as this process lives."""
    global _held
    if _held is not None:
        with contextlib.suppress(BlockingIOError):
            if not _held.recv(1, socket.MSG_DONTWAIT):  # it has ended
                _held.close()
                _held = None
    if _held is None:
        _held = connect()


def release() -> None:
    """No longer keep the fork server alive."""
    global _held
    if _held is not None:
        _held.close()
        _held = None


def socket_path() -> Path:
    """Return the socket of the server for this user, Python environment and batch job."""
    environment = [sys.executable, sys.prefix, *ddp_hydra.__path__, *_versions(), *_import_time_variables()]
    identity = "\0".join([*environment, *_batch_job(), *_confinement()])
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return runtime_folder() / f"{name}.sock"


@functools.cache
def _versions() -> list[str]:
    """Return the versions of the code that a server loads. They are read once: later edits do not change the server."""
    newest = max(file.stat().st_mtime_ns for file in Path(ddp_hydra.__file__).parent.rglob("*.py"))
    return [*(importlib.metadata.version(name) for name in ("torch", "distributed")), str(newest)]


def runtime_folder() -> Path:
    """Return this user's private folder for sockets and leases."""
    root = os.environ.get("XDG_RUNTIME_DIR")
    if root and os.access(root, os.W_OK):
        return Path(root) / "ddp_hydra"
    return Path(tempfile.gettempdir()) / f"ddp_hydra-{os.getuid()}"


def _import_time_variables() -> list[str]:
    """Return variables that matter when torch is imported, so that they cannot be set per rank later."""
    names = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
    return [f"{name}={os.environ.get(name, '')}" for name in names]


BATCH_JOB = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "JOB_ID", "SGE_TASK_ID", "OAR_JOB_ID", "FLUX_JOB_ID",
)  # fmt: skip
"""Variables in which SLURM, PBS, LSF, Grid Engine, OAR and Flux name the batch job of a process."""


def _batch_job() -> list[str]:
    """Return the batch job of this process: its ranks belong to that job, and end with it."""
    return [f"{name}={os.environ[name]}" for name in BATCH_JOB if name in os.environ]


def _confinement() -> list[str]:
    """Return the cgroup and the namespaces of this process: a fork always has those of its server."""
    found = []
    for read in (
        lambda: Path("/proc/self/cgroup").read_text(),
        lambda: str(Path("/proc/self/ns/cgroup").readlink()),  # two containers may have cgroups of the same name
        lambda: str(Path("/proc/self/ns/net").readlink()),
        lambda: str(Path("/proc/self/ns/pid").readlink()),
    ):
        with contextlib.suppress(OSError):  # not on this system
            found.append(read())
    return found


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a folder during the block, and make it again if a server has just removed it; yield its descriptor.

    Raises:
        ConfigError: the path is no folder, or other users may write there.
    """
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
                raise ConfigError(
                    f"{folder} must belong to you and be closed to others, since ranks are started through it; "
                    "it is not: remove it, or set XDG_RUNTIME_DIR to a folder of your own"
                )
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists() and folder.stat().st_ino == status.st_ino:
                yield handle
                return
        finally:
            os.close(handle)
    what = "a symbolic link" if folder.is_symlink() else "something else"
    raise ConfigError(
        f"{folder} must be a folder of your own, since ranks are started through it; there is {what} in its place, or "
        "on the way to it: remove that, or set XDG_RUNTIME_DIR to a folder of your own"
    )


MAX_TRIES = 1000
"""One or two are enough when a server has just removed the folder."""
MAX_SOCKET_PATH = 103
"""Number of bytes that every system allows in the path of a socket."""


def _short(address: Path, folder: int) -> str:
    """Return the path of a socket; one through its open folder if the real one is too long."""
    if len(os.fsencode(address)) <= MAX_SOCKET_PATH:
        return str(address)
    return f"/proc/self/fd/{folder}/{address.name}"


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _start(address: Path, short: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(short)
        address.chmod(0o600)
        listener.listen(128)
        command = [sys.executable, "-m", "ddp_hydra.rank.fork_server", str(listener.fileno()), str(address)]
        environment = ALLOCATOR | without_dasks_limits(os.environ)
        path = [str(Path(ddp_hydra.__file__).parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        # The intermediate parent ends at once, so that the server outlives the process that started it.
        subprocess.run(
            [sys.executable, "-S", "-c", _DETACH, *command],
            env=environment,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            start_new_session=True,  # it never receives a terminal's Ctrl-C
        )
    finally:
        listener.close()


DASKS_LIMITS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""Variables that Dask's nanny sets for its workers. They would slow a rank down: each rank has its own number of
threads, and allocates its large buffers again and again."""

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(256 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""Variables with which glibc keeps the buffers that each step frees, instead of asking the kernel for them again. glibc
reads them when a process starts, so they are set for the server. Setting only one of the two would switch off its own
adaptation."""


def without_dasks_limits(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that have Dask's defaults for its workers."""
    return {name: value for name, value in variables.items() if DASKS_LIMITS.get(name) != value}


_DETACH = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
