"""One rank: a process with its own interpreter, in one world of its gang after the other.

A call in a world is all that most processes do. One that has left its world, or has lost it with another rank and is to
live on, waits for the next call. A process never goes on after its function has raised anything else.

Every function ends with an end record, which holds its return value or the error that it raised. Nothing has to be
unpickled to read the record.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import logging.config
import os
import pkgutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import msgspec
import torch
import torch.distributed as dist
from hydra.errors import InstantiationException

from ddp_hydra import forked, heartbeat, results
from ddp_hydra.console.signals import own_handler
from ddp_hydra.console.text import TRACE_CHARS, is_deterministic, message_of, shorten, shortened, user_location
from ddp_hydra.errors import DdpHydraError, Failure, WorldLeft
from ddp_hydra.rank import environment, fault_injection, spec
from ddp_hydra.rank.spec import RankLaunch
from ddp_hydra.rank.world import World, joined, leave_process_group, meet
from ddp_hydra.record import End

MAX_FDS = 4


def main(title: str, control_fd: int, shared_status_fd: int) -> int:
    """Run one rank; called in the process that the fork server forked for it.

    Args:
        control_fd: socket to the worker's task: records go out; launches, each with a rendezvous, come in.
        shared_status_fd: the page of memory in which this rank writes where it is.
    """
    from setproctitle import setproctitle

    setproctitle(title)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # by which the worker's task requests the stacks
    shared_status = heartbeat.SharedStatus.of(shared_status_fd)
    heartbeat.connect(shared_status)
    heartbeat.at("join", 0)
    signal.signal(signal.SIGTERM, own_handler(lambda *_: on_sigterm(shared_status)))
    # Only the client reacts to Ctrl-C. A signal that is ignored would be ignored in all programs that the rank starts.
    signal.signal(signal.SIGINT, own_handler(lambda *_: None))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worlds = Worlds(socket.socket(fileno=control_fd), shared_status)
    if not worlds.enter():
        return 1  # the worker's task has ended
    job = worlds.launch.job
    if job.is_script:  # it ends at once also in a collective, unless it has a handler of its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if job.settings.log_config:
        logging.config.dictConfig(job.settings.log_config)
    take_helper(job.settings.data_workers)
    return report_end(worlds.live)


class Worlds:
    """The worlds of a process, one after the other."""

    launch: RankLaunch

    def __init__(self, control: socket.socket, shared_status: heartbeat.SharedStatus) -> None:
        self.control, self.shared_status = control, shared_status
        self.kept: dict[str, Any] = {}
        self.lines, self.fds = b"", list[int]()

    def enter(self) -> bool:
        """Wait for the next launch; return False if there is none."""
        if "launch" not in self.hear():
            return False
        with os.fdopen(self.fds.pop(0), "rb") as file:
            file.seek(0)  # its position is at the end
            self.launch = launch = msgspec.msgpack.decode(file.read(), type=RankLaunch)
        rank, attempt = launch.spec.rank, launch.job.attempt
        os.environ.update(environment.of_place(launch.spec))
        results.connect(
            results.SocketSender(self.control, Path(launch.outbox)), rank, attempt, launch.job.settings.retry_s
        )
        pids = {"worker": launch.worker_pid, "nanny": launch.nanny_pid}
        fault_injection.install(rank, attempt + launch.job.generation, pids)
        return True

    def live(self) -> Any:
        """Make this process's calls, each in its world; return what the last one returns."""
        while True:
            try:
                return self.perform()
            except Exception as error:
                if not self.goes_on_after(error):
                    raise
                print(f"rank {self.launch.spec.rank} waits for another world: {message_of(error)}")  # noqa: T201
                leave_process_group()
                heartbeat.connect(self.shared_status)  # without the hooks of the last call
                heartbeat.at("join", self.shared_status.steps_done)
                if not self.enter():
                    raise
            self.shared_status.stay()

    def goes_on_after(self, error: Exception) -> bool:
        is_lost = self.launch.job.lives_on and isinstance(error, RuntimeError) and describe(error).is_symptom
        return isinstance(error, WorldLeft) or (is_lost and "CUDA error" not in str(error))

    def perform(self) -> Any:
        job, spec, settings = self.launch.job, self.launch.spec, self.launch.job.settings
        set_threads(settings.threads)
        host, port = self.hear()["rendezvous"]
        store = meet(spec.rank, host, port, settings.timeout_s, self.fds.pop(0) if spec.rank == 0 else None)
        place = store, spec.rank, spec.world_size, spec.local_world_size, settings.backend, settings.timeout_s
        with joined(*place, job.makes_group, job.generation, self.kept) as world:
            project = job.project.sha256 if job.project else ""
            print(f"rank {spec.rank} of {spec.world_size}: {describe_place(project)}")  # noqa: T201
            heartbeat.at("run", 0)
            value = perform(job.call, world)
            heartbeat.at("end", self.shared_status.step)
        return value

    def hear(self) -> dict[str, Any]:
        """Return the next message of the worker's task; {} if it has ended. Descriptors that come along are kept."""
        while b"\n" not in self.lines:
            data, fds, _, _ = socket.recv_fds(self.control, 2**16, MAX_FDS)
            for fd in fds:
                os.set_inheritable(fd, False)
            self.fds += fds
            if not data:
                return {}
            self.lines += data
        line, _, self.lines = self.lines.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def take_helper(data_workers: int | None) -> None:
    """Fork the process that will fork workers, if this rank may have some; it shares this rank's heartbeat."""
    if data_workers or (data_workers is None and environment.visible_gpus(os.environ)):
        from ddp_hydra.data import workers  # a script needs none of it

        workers.take_helper()


def report_end(work: Callable[[], Any]) -> int:
    try:
        end = End(value=results.file_of("value", spec.encode(work())))
    except BaseException as error:
        failure = describe(error)
        heartbeat.await_saved()
        end = End(failure=failure)
        if failure.traceback and not failure.mistake:
            traceback.print_exception(error)
    results.emit(end)
    return 0 if end.failure is None else 1


def on_sigterm(shared_status: heartbeat.SharedStatus) -> None:
    """Finish at the next step if the training loop runs; otherwise, or if the worker's task demands it, end at once."""
    place = shared_status.read()
    if shared_status.die or place.phase in ("join", "run"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    shared_status.ask_to_finish(heartbeat.REASONS.index("preemption"))


def perform(call: bytes, world: World) -> Any:
    """Call a pickled function; a function may be named as "module:name"."""
    target, args, kwargs = cloudpickle.loads(call)
    if (numpy := sys.modules.get("numpy")) is not None:
        # Ranks are forks of one process and would all draw the same numbers; Python's own generator reseeds itself.
        numpy.random.seed()
    torch.default_generator.seed()
    function: Any = pkgutil.resolve_name(target) if isinstance(target, str) else target
    of_world = (world,) if getattr(function, "in_world", False) else ()
    with forked.children_end(), as_main(function):
        return function(*of_world, *args, **kwargs)


@contextmanager
def as_main(function: Callable[..., Any]) -> Iterator[None]:
    """Let `__main__` hold the names of the script that a pickled function comes from, as far as it uses them.

    What pickles the script's classes and functions, as torch.save, a pool of processes and a DataLoader do, looks for
    them there.
    """
    inner = inspect.unwrap(getattr(function, "func", function))  # of a partial
    inner = getattr(inner, "__func__", inner)
    names = getattr(inner if hasattr(inner, "__globals__") else type(inner).__call__, "__globals__", {})
    if names.get("__name__") != "__main__":
        yield
        return
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    vars(main).update(names)
    # Processes that are spawned run the file, which a module of a package can't be.
    if names.get("__package__") or not Path(names.get("__file__") or "").is_file():
        vars(main).pop("__file__", None)
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def set_threads(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def describe_place(project: str) -> str:
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        device = torch.cuda.get_device_name(0)
    else:
        count = 0 if dist.is_initialized() else torch.cuda.device_count()  # a script chooses its device later
        device = f"{count} GPUs" if count else "cpu"
    return (
        f"host {socket.gethostname()}, pid {os.getpid()}, {device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, rendezvous {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        f"{f', project {project[:16]}' if project else ''}"
    )


def describe(error: BaseException) -> Failure:
    time_s = time.time()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 0:
            message = "the process exited with code 0 before its work was done"
        else:
            text = "" if isinstance(error.code, int) else f": {message_of(error.code)}"
            message = f"the process exited with code {code} (sys.exit){text}"
        return Failure("exited", message=message, time_s=time_s)
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    message = message_of(error)
    mistake = isinstance(error, DdpHydraError) or bool(getattr(error, "mistake", False))
    told = mistake or bool(getattr(error, "told", False))  # its message says all
    return Failure(
        "raised",
        message=message if told else ": ".join(filter(None, [type(error).__name__, message])),
        traceback=shorten(shortened(error), TRACE_CHARS) if mistake or not told else "",
        time_s=time_s,
        place=user_location(error),
        mistake=mistake,
        deterministic=is_deterministic(error),
        consequence=getattr(error, "consequence", False) is True,
    )
