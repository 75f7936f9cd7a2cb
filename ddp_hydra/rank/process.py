"""One rank: a process with its own interpreter, inside the gang's process group.

Whatever it was asked to run leaves by the same door: an end record that says what came back, or what was
raised. Nobody has to unpickle anything to read it.
"""

from __future__ import annotations

import base64
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from torch.distributed import distributed_c10d

from ddp_hydra import heartbeat, results
from ddp_hydra.console import tracebacks
from ddp_hydra.console.text import TRACE_CHARS, message_of, shorten
from ddp_hydra.errors import ConfigError, DdpHydraError
from ddp_hydra.rank import fault_injection, return_values
from ddp_hydra.results import Record

MAX_SPOOLED = 4
"""Files that a rank may have on their way; at more it waits for the client to fetch one."""


def main(title: str, order_fd: int, control_fd: int, board_fd: int, listener_fd: int | None) -> int:
    """Run one rank; called in the process that the warm server forked for it.

    Args:
        title: what `ps` shows.
        order_fd: a file with a line of JSON and the pickled call, see `relay.LaunchSpec`.
        control_fd: socket to the relay: records go out, the rendezvous comes in.
        board_fd: the page that says where this rank is.
        listener_fd: the socket on which rank 0 serves the rendezvous.

    Returns:
        The exit code.
    """
    from setproctitle import setproctitle

    setproctitle(title)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the relay wants to see the stacks
    shared_status = heartbeat.SharedStatus.of(board_fd)
    heartbeat.connect(shared_status)
    heartbeat.at("join", 0)
    signal.signal(signal.SIGTERM, lambda *_: on_sigterm(shared_status))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to answer
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with os.fdopen(order_fd, "rb") as order:
        order.seek(0)  # it comes as it was written
        header, _, call = order.read().partition(b"\n")
    job = json.loads(header)
    spec = job["spec"]
    control = socket.socket(fileno=control_fd)
    sender = PipeSender(control, Path(job["spool"]))
    results.connect(sender, spec["rank"], job["attempt"], job["retry_s"])
    fault_injection.arm(spec["rank"], job["attempt"], job["pids"])
    try:
        set_threads(job["threads"], spec["local_world_size"])
        host, port = hear_rendezvous(control)
        store = meet(spec["rank"], host, port, job["timeout_s"], listener_fd)
        with process_group(store, spec["rank"], spec["world_size"], job["backend"], job["timeout_s"], job["group"]):
            print(f"rank {spec['rank']} of {spec['world_size']}: {whereabouts(job['project'])}")  # noqa: T201
            heartbeat.at("run", 0)
            value = perform(call)
            heartbeat.at("end", shared_status.step)
        end = {"status": "ok", **pack_value(value)}
    except BaseException as error:
        failed_at = time.time()
        heartbeat.await_saved()
        end = {**describe(error), "time_s": failed_at}
        if end.get("traceback") and not end["mistake"]:
            traceback.print_exception(error)
    results.emit("end", {"time_s": time.time(), **end})
    return 0 if end["status"] == "ok" else 1


def on_sigterm(shared_status: heartbeat.SharedStatus) -> None:
    """Finish at the next step where a loop runs that looks; otherwise, or when the relay wants it, end at once."""
    place = shared_status.read()
    if shared_status.die or place.phase in ("join", "run"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    shared_status.ask_to_finish(heartbeat.REASONS.index("preemption"))


def perform(call: bytes) -> Any:
    """Call what was sent: a function, or the name of one as "module:name"."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # ranks are forks of one process, and would all draw the same; Python's own sees to itself
    target, args, kwargs = cloudpickle.loads(call)
    function: Callable[..., Any] = target
    if isinstance(target, str):
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
    return function(*args, **kwargs)


class PipeSender:
    """Sends records to the relay, and files through the spool.

    Args:
        control: socket to the relay.
        spool: folder on this host that the client empties.
    """

    def __init__(self, control: socket.socket, spool: Path) -> None:
        self.control = control
        self._spool = spool
        self.lock = threading.Lock()

    def send(self, record: Record) -> None:
        """Send one record; blocks while the pipe is full."""
        with self.lock:
            self.control.sendall(record.encode() + b"\n")

    @property
    def spool(self) -> Path:
        """The spool, once there is room in it. A client that is busy with a file for long knows what is waited for."""
        before: set[Path] = set()
        while len(files := set(self._spool.iterdir())) >= MAX_SPOOLED:
            if files != before:
                heartbeat.progress()
            before = files
            time.sleep(0.01)
        return self._spool


def hear_rendezvous(control: socket.socket) -> tuple[str, int]:
    """Wait until the relay says where rank 0 listens."""
    with control.makefile("rb") as lines:
        host, port = json.loads(lines.readline())["rendezvous"]
    return host, port


def set_threads(threads: int, local_world_size: int) -> None:
    """Give this rank its share of the host's cores, or what was asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or max(1, cores // local_world_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def meet(rank: int, host: str, port: int, timeout_s: float = 1800.0, listener_fd: int | None = None) -> dist.Store:
    """Connect to the store that rank 0 serves; scripts that make their own process group find it by the environment.

    Args:
        rank: this rank.
        host: where rank 0 serves the store.
        port: its port.
        timeout_s: of the rendezvous.
        listener_fd: rank 0's socket, bound and listening already.
    """
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is there: nobody else shall serve one at this port
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener_fd)


@contextmanager
def process_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    backend: str = "auto",
    timeout_s: float = 1800.0,
    init: bool = True,
) -> Iterator[None]:
    """Be a member of the gang, and of its process group.

    Args:
        store: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        backend: gloo, nccl, or auto: gloo, and nccl for tensors on a GPU where there is one.
        timeout_s: of collectives, also in other groups that are made inside the block.
        init: False leaves it to the code inside the block to make a process group.
    """
    timeout = timedelta(seconds=timeout_s)
    with default_timeout(timeout):
        if init:
            if backend == "auto":
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if "nccl" in backend:
                torch.cuda.set_device(0)  # each rank sees its own GPU first
                claim_gpu(store, rank, world_size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        store.add("ddp_hydra/joined", 1)
        yield
        # Not in a `finally`: a rank that failed must not wait for anybody, and must not hide its error.
        while store.add("ddp_hydra/joined", 0) < world_size:
            time.sleep(0.005)  # to those who are still connecting, leaving would look like a crash
        store.add("ddp_hydra/done", 1)
        while rank == 0 and store.add("ddp_hydra/done", 0) < world_size:
            time.sleep(0.005)  # rank 0 serves the store, so it leaves last
        leave_process_group()


def claim_gpu(store: dist.Store, rank: int, world_size: int) -> None:
    """Refuse to have the same GPU as another rank; NCCL would fail on it in its own words, and be tried again.

    Raises:
        ConfigError: with what to give instead.
    """
    uuid = gpu_uuid()
    if world_size == 1 or uuid is None or store.add(f"ddp_hydra/gpu/{uuid}", 1) == 1:
        return
    here, ranks = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", "several")
    raise ConfigError(
        f"rank {rank} on {socket.gethostname()} has the same GPU as another rank ({uuid}), and NCCL takes each once: "
        f"this host has {ranks} ranks that see {here} GPU{'s' * (here != 1)}. Give as many workers as there are GPUs, "
        f"or on a single host dispatch.ranks={here}; or share GPUs with dispatch.backend=gloo, or do without, with "
        "trainer.device=cpu"
    )


def gpu_uuid() -> str | None:
    """Return what names this rank's GPU anywhere; None where torch does not tell."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return None if uuid is None else str(uuid)


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Give each process group that is made inside the block, and says nothing of it, this timeout."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    vars(distributed_c10d).update(dict.fromkeys(names, timeout))
    try:
        yield
    finally:
        vars(distributed_c10d).update(before)


def whereabouts(project: str) -> str:
    """Host, process, device and versions, for the rank's log.

    Args:
        project: hash of the project space, or "".
    """
    return (
        f"host {socket.gethostname()}, pid {os.getpid()}, {device_name()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, rendezvous {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        f"{f', project {project[:16]}' if project else ''}"
    )


def device_name() -> str:
    """Name what this rank computes on, without touching a GPU that it leaves alone."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return torch.cuda.get_device_name(0)
    gpus = 0 if dist.is_initialized() else torch.cuda.device_count()  # a script chooses later
    return f"{gpus} GPUs" if gpus else "cpu"


def leave_process_group() -> None:
    """Leave it without waiting for anybody."""
    if dist.is_initialized():
        dist.destroy_process_group()


def pack_value(value: Any) -> dict[str, Any]:
    """Put what the function returned into the end record, or beside it where it is large."""
    data = return_values.encode(value)
    if len(data) <= results.INLINE_BYTES:
        return {"value": base64.b64encode(data).decode()}
    return {"value_file": results.spool_file(lambda path: path.write_bytes(data))}


def describe(error: BaseException) -> dict[str, Any]:
    """Say what was raised, in plain data."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 0:
            return {"status": "exited", "message": "the process exited with code 0 before its work was done"}
        said = "" if isinstance(error.code, int) else f": {message_of(error.code)}"
        return {"status": "exited", "message": f"the process exited with code {code} (sys.exit){said}"}
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    message = message_of(error)
    mistake = isinstance(error, DdpHydraError) or bool(getattr(error, "mistake", False))
    return {
        "status": "raised",
        "message": message if mistake else ": ".join(filter(None, [type(error).__name__, message])),
        "traceback": shorten(tracebacks.shortened(error), TRACE_CHARS),
        "place": tracebacks.place(error),
        "mistake": mistake,
        "deterministic": tracebacks.is_deterministic(error),
        "consequence": getattr(error, "consequence", False) is True,
    }
