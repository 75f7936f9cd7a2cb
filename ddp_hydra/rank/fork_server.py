"""The fork server: imports torch once, then forks a process for each rank.

`fork_client` starts it, as `python -m ddp_hydra.rank.fork_server <listening fd> <socket path>`. It is a new process, so
it has no CUDA context and no threads of Dask. It never runs a tensor operation, so it has no threads of its own that a
fork would lose.

One connection is one rank. The caller sends a line of JSON together with the rank's descriptors. The server answers
{"pid": …} and, when the rank has ended, {"exit": …, "was_ended": by a signal from here, "peak_rss": …}; or {"refused":
reason} if the host lets it start no process. A line {"signal": n} sends a signal to the rank's process group,
{"signal": n, "alone": true} to the rank only. When the caller's connection ends, its rank is killed; when the server
ends, the kernel kills all ranks. So no rank outlives its worker, whatever state it is in. {"status": true} asks how the
server is, {"stop": true} has it end after its last rank. A caller that sends anything else, or belongs to another user,
is disconnected.

If all callers go while it imports torch, it ends at once. After its last connection it stays for `keep_warm_s` of the
last request, 0 without that: the next command finds torch imported. It then belongs to no command: its folder is /, its
output goes nowhere, and it has neither code of a project nor a GPU. It ends earlier after SIGTERM, and when its socket
is removed. A command that comes after a file was changed that it has imported has it start anew.

Forks wait for the next ranks, as many as have run at once: a rank takes one of them instead of waiting for its own.

Processes that a rank leaves behind are ended with it: its process group at once. The kernel makes the server the parent
of processes that have left the group (a daemon with a session of its own). The server ends them, and names them to the
caller: {"exit": …, "left": […]}.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from ddp_hydra import forked
from ddp_hydra.console.signals import open_standard_files
from ddp_hydra.rank import environment, lazy_dynamo
from ddp_hydra.rank.processes import (
    LEFT_S,
    LeftBehind,
    adopt_orphans,
    children,
    die_with_parent,
    has_ended,
    kill_group,
    user_of,
)
from ddp_hydra.rank.spare_forks import Caller, SpareForks, become_rank

MODULE = "ddp_hydra.rank.fork_server"
PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torchvision",
    "numpy.random", "omegaconf", "hydra.utils", "PIL.Image", "ddp_hydra.rank.process", "ddp_hydra.training.loop",
    "ddp_hydra.tasks.losses", "torch.utils.serialization",
)  # fmt: skip
"""Modules that nearly every rank imports; those that are not installed are skipped."""
BACKENDS = ("gloo", "nccl")
LOOK_S = 0.05
"""Seconds between two looks at the callers during the imports."""
SPARES_S = 1.0
"""Seconds from the fork of a rank until others are forked for the next one, so that it has the cores to itself."""
QUIET_S = 0.002
"""Seconds without a request after which spares are forked."""
IDLE_S = 1.0
"""Seconds between two looks whether to leave while nobody is connected."""


class ForkServer:
    """Forks ranks on request, until the last connection has ended and nobody wants to find it warm.

    Args:
        start_anew: starts this program again, with the same socket.

    Attributes:
        spares_after: spares are forked no sooner, by the monotonic clock.
        is_retired: it leaves as soon as nobody uses it.
    """

    def __init__(self, listener: socket.socket, address: Path, start_anew: Callable[[], object] = lambda: None) -> None:
        self.listener = listener
        self.address = address
        self.start_anew = start_anew
        self.inode = address.stat().st_ino
        # Its first caller has the folder's lock until it is connected; without one, that process was killed.
        self.keep_warm_s = 0.0
        self.is_retired = self.has_served = False
        self.begin_waiting()
        self.begun = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.callers: dict[int, Caller] = {}
        self.ranks: set[int] = set()
        self.left_behind = LeftBehind()
        self.spares = SpareForks(self.leave_server, become_rank)
        self.spares_after = 0.0
        self.wake_r, self.wake_w = socket.socketpair()
        for end in (self.listener, self.wake_r, self.wake_w):
            end.setblocking(False)

    def leave_if_deserted(self) -> None:
        self.accept()
        for caller in [caller for caller in self.callers.values() if has_ended(caller.connection)]:
            self.drop(caller)
        if self.has_served and not self.callers and self.leave():
            os._exit(0)

    def serve(self) -> None:
        self.begin_waiting()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.retire)  # when the host is shut down, the ranks finish first
        signal.set_wakeup_fd(self.wake_w.fileno())
        adopt_orphans()
        self.ranks = set(children())  # children of preloaded modules, if any
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wake_r, selectors.EVENT_READ)
        while True:
            events = self.selector.select(self.pause_s)
            if not events and self.lacks_spares and time.monotonic() >= self.spares_after:
                self.spares.add()
            for key, _ in events:
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj is self.wake_r:
                    self.wake_r.recv(4096)
                elif key.fd in self.callers:
                    self.receive(self.callers[key.fd])
            self.reap()
            self.left_behind.kill()
            if self.is_idle and self.is_time_over and self.leave():
                self.spares.end()
                return

    @property
    def is_idle(self) -> bool:
        return not self.callers and not self.left_behind.until

    @property
    def pause_s(self) -> float | None:
        """Return for how many seconds nothing has to be done, unless an event comes."""
        if self.left_behind.until:
            return LEFT_S
        if self.lacks_spares:
            return max(QUIET_S, self.spares_after - time.monotonic())
        return None if self.callers else IDLE_S

    @property
    def lacks_spares(self) -> bool:
        """Return whether to fork more spares: not before those whose rank has ended hang up, as this may be the end."""
        is_quiet = all(caller.pid is not None or not caller.has_requested for caller in self.callers.values())
        return self.spares.are_missing and is_quiet and not any(caller.fds for caller in self.callers.values())

    def retire(self, *_: object) -> None:
        """Leave when the last connection has ended; also the handler of SIGTERM."""
        self.is_retired = True

    def accept(self) -> None:
        """Accept the next connection, if there is one; start anew before it if the imported code is out of date."""
        poll = select.poll()  # select.select takes no descriptor from 1024 on
        poll.register(self.listener, select.POLLIN)
        is_wanted = bool(poll.poll(0))
        if is_wanted and self.is_idle and self.has_served and not are_current(self.loaded):
            self.spares.end()
            self.start_anew()
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the caller stays in the backlog
            time.sleep(0.05)
            return
        if user_of(connection) not in (None, os.getuid()):
            connection.close()
            return
        connection.setblocking(False)
        self.callers[connection.fileno()] = Caller(connection)
        self.selector.register(connection, selectors.EVENT_READ)

    def receive(self, caller: Caller) -> None:
        """Read a caller's requests and act on them; the end of its connection is the end of its rank."""
        try:
            for request in caller.requests():
                self.handle(caller, request)
        except (ValueError, TypeError, KeyError, RecursionError):
            self.drop(caller)

    def handle(self, caller: Caller, request: Any) -> None:
        if not isinstance(request, dict):
            raise TypeError("a request is an object")
        if "signal" in request:
            self.reap()  # a rank that has ended by itself was not ended by this signal
            caller.kill(request["signal"], bool(request.get("alone")))
        elif "status" in request or "stop" in request:
            caller.only_asks = True
            self.is_retired |= "stop" in request
            caller.reply(self.status())
        elif caller.has_requested:
            raise ValueError("one connection is one rank")
        else:
            self.spawn(caller, request)

    def spawn(self, caller: Caller, request: dict[str, Any]) -> None:
        caller.has_requested = True
        self.keep_warm_s = 0.0 if environment.batch_job() else float(request.get("keep_warm_s", 0.0))
        if lazy_dynamo.import_if_wanted():
            self.spares.end()
        try:
            pid = self.spares.take(request, caller.fds) or os.fork()
        except OSError as error:  # the host allows no other process; those that run go on
            caller.reply({"refused": str(error)})
        else:
            if pid == 0:
                self.leave_server()
                become_rank(request, caller.fds)
            caller.pid = pid
            self.ranks.add(pid)
            caller.reply({"pid": pid})
            self.spares.wanted = max(self.spares.wanted, sum(one.pid is not None for one in self.callers.values()))
            self.spares_after = time.monotonic() + SPARES_S
        caller.close_fds()

    def leave_server(self) -> None:
        try:
            server_pid = os.getppid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()  # from now on it gets the signals that are for the rank
            die_with_parent(server_pid)
            self.selector.close()
            self.spares.close()
            for end in (self.listener, self.wake_r, self.wake_w, *(one.connection for one in self.callers.values())):
                end.close()
        except BaseException:
            os._exit(1)

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.spares.forget(pid):
                continue
            self.left_behind.until.pop(pid, None)
            if pid not in self.ranks:
                continue
            self.ranks.discard(pid)
            kill_group(pid)  # processes that the rank started, such as data loaders
            self.spares_after = 0.0
            left = self.left_behind.end(pid, self.ranks, self.spares.connections.keys())
            for caller in self.callers.values():
                if caller.pid == pid:
                    caller.pid = None
                    exit_code = os.waitstatus_to_exitcode(status)
                    end = {"exit": exit_code, "was_ended": caller.was_ended}
                    caller.reply({**end, "peak_rss": usage.ru_maxrss * 1024, "left": left})

    def drop(self, caller: Caller) -> None:
        self.callers.pop(caller.connection.fileno())
        self.selector.unregister(caller.connection)
        caller.close()
        if not caller.only_asks:  # it may have been the last one
            self.idle_since, self.has_served = time.monotonic(), True

    def status(self) -> dict[str, Any]:
        is_used = any(not caller.only_asks for caller in self.callers.values())
        return {
            "pid": os.getpid(),
            "python": sys.executable,
            "ranks": sum(caller.pid is not None for caller in self.callers.values()),
            "spares": len(self.spares.connections),
            "lacks_spares": self.spares.are_missing,
            "age_s": time.monotonic() - self.begun,
            "ends_in_s": None if is_used else self.remaining_s,
            "memory": memory_bytes(),
        }

    def leave(self) -> bool:
        """Remove the socket and return True, unless a caller has just connected."""
        try:
            folder = os.open(self.address.parent, os.O_RDONLY)
        except OSError:  # logind removes it with the user's last session: nobody can connect any more
            self.accept()
            return not self.callers
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.accept()
            if self.callers:
                return False
            self.listener.close()
            if self.is_found():
                self.address.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other servers may have their sockets in it
                self.address.parent.rmdir()
            return True
        finally:
            os.close(folder)

    # -- how long it stays -----------------------------------------------------------------------------------

    def begin_waiting(self) -> None:
        self.loaded = loaded_files()
        self.idle_since = time.monotonic()

    @property
    def remaining_s(self) -> float:
        return 0.0 if self.is_retired else max(0.0, self.idle_since + self.keep_warm_s - time.monotonic())

    @property
    def is_time_over(self) -> bool:
        return not self.remaining_s or not self.is_found()

    def is_found(self) -> bool:
        """Return whether its socket still has its place; logind removes it with the user's last session."""
        try:
            return self.address.stat().st_ino == self.inode
        except OSError:
            return False


def preload(look: Callable[[], object]) -> None:
    """Import modules that ranks need, so that a fork has them at once; call `look` meanwhile."""
    watcher = _Watcher(look)
    gc.disable()
    sys.meta_path.insert(0, watcher)
    try:
        for name in PRELOAD:
            with contextlib.suppress(Exception):  # a rank that needs the module reports the error
                importlib.import_module(name)
                if name == "torch":
                    lazy_dynamo.put_off()
        register_backends()
    finally:
        sys.meta_path.remove(watcher)
    forked.resume_garbage()


def register_backends() -> None:
    """Register the backends of process groups with torch, as each rank would have to do otherwise.

    Since 2.14, torch finds even its own ones in the metadata of all installed packages.
    """
    for found in entry_points(group="torch.distributed.backends"):
        if found.name in BACKENDS:
            with contextlib.suppress(Exception):  # a rank that needs the backend reports the error
                found.load()()


class _Watcher(MetaPathFinder):
    """Finds no module, but is asked for each one before it is imported: about 2,000 times."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.look, self.looked_at = look, time.monotonic()

    def find_spec(self, *_: Any) -> None:
        if time.monotonic() - self.looked_at > LOOK_S:
            self.look()
            self.looked_at = time.monotonic()


def loaded_files() -> dict[str, tuple[int, int, int]]:
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: found for path in paths if isinstance(path, str) and (found := _state(path))}


def are_current(files: Mapping[str, tuple[int, int, int]]) -> bool:
    return all(_state(path) == found for path, found in files.items())


def _state(path: str) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None if it is gone."""
    try:
        status = os.stat(path)  # noqa: PTH116 (some thousand calls)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def memory_bytes() -> int:
    """Return how much memory this process takes, with its share of what it shares with others; 0 if not known."""
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        text = Path("/proc/self/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return 0


def main(listener_fd: int, address: str) -> None:
    from setproctitle import setproctitle

    variables = dict(os.environ)  # before the imports add to it
    open_standard_files()

    def start_anew() -> NoReturn:
        os.set_inheritable(listener_fd, True)
        os.execve(sys.executable, [sys.executable, "-m", MODULE, str(listener_fd), address], variables)  # noqa: S606

    setproctitle("ddp_hydra fork server")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    server = ForkServer(socket.socket(fileno=listener_fd), Path(address), start_anew)
    preload(server.leave_if_deserted)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # it may stay longer than the terminal, or the pipe, of the command that started it
    os.close(nowhere)
    server.serve()
    os._exit(0)  # without the destructors of the preloaded libraries, which have nothing to do


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
