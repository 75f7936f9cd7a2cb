"""The processes that torchrun, or another launcher with its variables, starts for one command.

On each host the process of LOCAL_RANK 0 works, and the others end with it, with its exit status. RANK 0 runs
the command; the first one of each other host is a worker of its cluster, see `cluster/kinds/torchrun.py`. What ends
between hosts goes through torchrun's store, as lines of JSON: where the scheduler is, and how the command has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import fork_client
from ddp_hydra.rank.processes import RANK_PID, die_with_parent

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MEET_S = 60.0
"""Seconds that the processes of a host may take to start."""
END_S = 5.0
"""Seconds that the other processes of the host, and the store, may take to hear of the end."""
POLL_S = 0.02
MEMORY = "ddp_hydra-run_dir"


@dataclass(frozen=True)
class ProcessPlace:
    """This process among the launcher's processes."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def hosts(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def socket(self) -> Path:
        """Where the processes of this host meet."""
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        parts = [*(os.environ.get(name, "") for name in names), str(self.rank - self.local_rank)]
        return fork_client.runtime_folder() / f"torchrun-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


def is_here() -> bool:
    """Return whether a launcher has started this process; not where a rank of ours has."""
    return all(name in os.environ for name in NEEDED) and RANK_PID not in os.environ


def find_place() -> ProcessPlace | None:
    """Return the place of this process; None if no launcher has started it."""
    if not is_here():
        return None
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in NEEDED[:3])
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise ConfigError(f"{', '.join(NEEDED[:3])} in the environment must be whole numbers: {error}") from None
    if local_world_size < 1 or world_size % local_world_size or (rank - local_rank) % local_world_size:
        raise ConfigError(
            f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={local_world_size} do "
            "not fit together: each host needs equally many processes, whose ranks follow one another, and all of "
            "them LOCAL_WORLD_SIZE where there are several hosts"
        )
    return ProcessPlace(rank, local_rank, world_size, local_world_size)


# -- the end ---------------------------------------------------------------------------------------------


def end_with_first(place: ProcessPlace) -> NoReturn:
    """Wait until the first process of this host ends, and end with its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(130))
    code, parent, until = 1, os.getppid(), time.monotonic() + MEET_S
    while True:
        try:
            connection = connect(place.socket)
            break
        except (OSError, ConfigError) as error:
            if time.monotonic() > until or os.getppid() != parent:
                print(  # noqa: T201
                    f"ddp_hydra: RANK {place.rank} found no process of LOCAL_RANK 0 on this host ({error}): start both "
                    "with the same XDG_RUNTIME_DIR and temporary folder",
                    file=sys.stderr,
                )
                os._exit(1)
            time.sleep(POLL_S)
    with contextlib.suppress(OSError, IndexError):
        code = connection.recv(1)[0]
        connection.recv(1)  # until that process has ended
    place.socket.unlink(missing_ok=True)  # if it was killed
    os._exit(code)


def connect(path: Path) -> socket.socket:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        return fork_client.connect_to(fork_client.short_path(path, folder))
    finally:
        os.close(folder)


@contextmanager
def ended_together(place: ProcessPlace) -> Iterator[None]:
    """Have the other processes of this host, and the other hosts, end with this process, as its SystemExit says."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_agent()
    code: object = 1
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening(place)) if place.local_world_size > 1 else None
        try:
            yield
            code = 0
        except SystemExit as error:
            code = error.code
            raise
        finally:
            code = code if isinstance(code, int) else int(code is not None)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first process has ended
            Hosts.end(code)
            if listener is not None:
                tell_others(listener, place.local_world_size - 1, code)


def end_with_agent() -> None:
    """Have this process end, when torchrun is killed, as it does when torchrun is told to end."""

    def on_end(*_: object) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the kernel sends it for each of torchrun's threads
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, on_end)
    die_with_parent(os.getppid(), signal.SIGUSR2)


@contextmanager
def listening(place: ProcessPlace) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        with fork_client.locked(place.socket.parent) as folder:
            place.socket.unlink(missing_ok=True)
            listener.bind(fork_client.short_path(place.socket, folder))
            listener.listen(place.local_world_size)
        try:
            yield listener
        finally:
            place.socket.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others use it
                place.socket.parent.rmdir()


def tell_others(listener: socket.socket, count: int, code: int) -> None:
    until = time.monotonic() + END_S
    with contextlib.suppress(OSError):
        for _ in range(count):
            listener.settimeout(max(0.01, until - time.monotonic()))
            connection = listener.accept()[0]
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code & 0xFF]))
            connection.detach()  # it is closed when this process has ended: torchrun shall see that first


def note_failure(message: str) -> None:
    """Write the file from which torchrun takes what it says of a failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and is_here():
        # It shows the stack instead of the message.
        more = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))


# -- other hosts -----------------------------------------------------------------------------------------


class Hosts:
    """Passes lines from the process of RANK 0 to the first process of each other host, through torchrun's store.

    A process does it that imports torch: these processes do not.
    """

    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def connect(cls) -> None:
        """Start the process; in the beginning, because its import takes long."""
        command = [sys.executable, "-m", "ddp_hydra.rank.torchrun_store"]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        cls.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet, start_new_session=True
        )

    @classmethod
    def say(cls, **line: Any) -> None:
        """Pass on a line; also from a process that this one has forked."""
        if cls.process is not None and cls.process.stdin is not None:
            with contextlib.suppress(OSError):  # the store is gone, and with it the job
                os.write(cls.process.stdin.fileno(), json.dumps(line).encode() + b"\n")

    @classmethod
    def lines(cls) -> Iterator[Mapping[str, Any]]:
        assert cls.process is not None
        assert cls.process.stdout is not None
        for line in cls.process.stdout:
            yield json.loads(line)

    @classmethod
    def end(cls, code: int, wait_s: float = 2 * END_S) -> None:
        process, cls.process = cls.process, None
        if process is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert process.stdin is not None
            os.write(process.stdin.fileno(), json.dumps({"exit": code}).encode() + b"\n")
            process.stdin.close()
            process.wait(wait_s)
        process.kill()
        process.wait()


def end_other_hosts() -> None:
    """Have other hosts, for which the numbers may fit together, end with RANK 0, for which they do not."""
    sizes = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    if os.environ["RANK"] == "0" and all(map(str.isdecimal, sizes)) and 0 < int(sizes[0]) < int(sizes[1]):
        Hosts.connect()
        Hosts.end(1, MEET_S)


# -- a start after another one ---------------------------------------------------------------------------


def remember(run_dir: str, hosts: int = 0) -> None:
    """Note the run directory on each host, for the case that torchrun starts all again.

    Args:
        hosts: how many the job began with; 0 for what is noted, or for all that are there.
    """
    place = find_place()
    hosts = hosts or read_memory()[1] or (place.hosts if place else 1)
    Hosts.say(run_dir=run_dir, hosts=hosts)
    if (file := memory()) is not None:
        with contextlib.suppress(OSError):  # then a restart begins anew
            file.write_text(f"{os.getpid()} {hosts} {run_dir}")


def remembered() -> Path | None:
    """Return the run directory of the processes that torchrun had started before; None if these are the first."""
    writer, _, run_dir = read_memory()
    return Path(run_dir) if writer not in (0, os.getpid()) else None


def read_memory() -> tuple[int, int, str]:
    """Return the process that has noted the run directory, the hosts that the job began with, and the directory."""
    with contextlib.suppress(OSError, ValueError):
        if (file := memory()) is not None:
            writer, hosts, run_dir = file.read_text().split(" ", 2)
            return int(writer), int(hosts), run_dir
    return 0, 0, ""


def memory() -> Path | None:
    """Return the file in which the run directory is noted; None without torchrun's agent."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # <folder of this torchrun>/attempt_<n>/<local rank>/error.json
    return Path(error_file).absolute().parents[2] / MEMORY if error_file and is_here() else None
