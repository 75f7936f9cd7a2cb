"""The Dask task of one rank: starts its process, passes its records on, and says how it ended.

The rank shares nothing with the worker but a pipe pair, so whatever happens to it (a crash, the OOM killer, a
collective that hangs) leaves the worker whole. This task never raises for what a rank does: the end record says it.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
from distributed import Worker, get_worker

from ddp_hydra.errors import ConfigError, DiskFull
from ddp_hydra.heartbeat import REASONS, SAVE_S, UNREADY, SharedStatus
from ddp_hydra.rank import device_leases, environment, fork_client, gpus, inbox, network, outbox, preemption, rendezvous
from ddp_hydra.rank.failure import describe_exit
from ddp_hydra.rank.launch_spec import LaunchSpec
from ddp_hydra.results import Record
from ddp_hydra.storage import wait_for_space

T = TypeVar("T")
FLUSH_S = 0.05
"""Records wait this long at most for company."""
WINDOW_BYTES = 4 * 2**20
"""Unacknowledged bytes at which the relay stops reading, so that the rank blocks."""
TICK_S = 0.1
CALM_S = 0.5
"""How often a relay looks up whose rank trains: each look takes time from ranks on the same cores."""
BEAT_S = 1.0
"""How often the client hears where the rank is."""
STACK_S = 0.5
"""How long a rank may take to print its stacks."""
STACK_BYTES = 16 * 1024
GRACE_S = 0.5
"""From SIGTERM to SIGKILL."""
DRAIN_S = 1.0
"""How long after the rank's end is listened to what it said before. A process that it has left behind may keep its
output open for ever."""


@dataclass(frozen=True)
class PickledTask:
    """Runs the rank when it is unpickled, which is the task that Dask sees: a scheduler reads each task that it passes
    on, and needs no ddp_hydra for this one.

    Args:
        order: all that the worker needs.
    """

    order: LaunchSpec

    def __reduce__(self) -> tuple[Any, ...]:
        return run_rank, (self.order,)


def run_rank(order: LaunchSpec) -> None:
    """Run one rank to its end."""
    worker = get_worker()
    if worker.address != order.spec.worker:
        publish(worker, order, "end", {"status": "lost", "message": f"its worker {order.spec.worker} went away"})
        return
    try:
        try:
            with ExitStack() as stack:
                end = RankTask(worker, order, stack).run()
        except Stopped:
            end = {"status": "stopped"}
        except (ConfigError, DiskFull) as error:  # it will be no better the next time
            end = {"status": "start", "message": f"could not be started: {error}", "mistake": True}
        except Exception as error:  # ours, or the host's: no file descriptors, a full disk, no torch
            message = f"could not be started: {type(error).__name__}: {error}"
            end = {"status": "start", "message": message, "traceback": traceback.format_exc()}
        publish(worker, order, "end", {"time_s": time.time(), **end})
    finally:
        inbox.remove(order.gang, order.spec.rank)  # after its last word: a worker that closes waits for this


def publish(worker: Worker, order: LaunchSpec, kind: str, data: dict[str, Any]) -> None:
    """Send one record of the relay's own."""
    record = Record(kind, data, order.spec.rank, None, time.time(), order.attempt)
    worker.log_event(order.gang, record.encode())


class Stopped(Exception):
    """The rank is not wanted any more, before it was started."""


class RankTask:
    """Between one rank's process and the client."""

    def __init__(self, worker: Worker, order: LaunchSpec, stack: ExitStack) -> None:
        self.worker, self.order, self.stack = worker, order, stack
        self.task = worker.get_current_task()
        self.rank = order.spec.rank
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.box = inbox.box(order.gang, self.rank)
        self.partial = b""
        self.buffer: list[bytes] = []
        self.flushed = 0.0
        self.unacknowledged = 0
        self.open: set[socket.socket | int] = set()
        self.end: dict[str, Any] | None = None
        self.exit: dict[str, Any] | None = None
        self.stopping_since: float | None = None
        self.save_until: float | None = None
        self.said = b""
        self.shared_status, self.board_fd = SharedStatus.create()
        stack.callback(self.shared_status.close)
        stack.callback(os.close, self.board_fd)
        self.pid: int | None = None
        self.ticks, self.moved = -1, time.monotonic()
        self.beat_at, self.ready = 0.0, False
        self.stack_until: float | None = None
        self.stacks = b""
        self.drain_until: float | None = None
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end within a character

    def run(self) -> dict[str, Any]:
        """Start the rank, relay until it has ended, and return the data of its end record."""
        self.start()
        is_quiet = False
        while self.exit is None or (self.open and not self.abandoned() and not self.is_drained(is_quiet)):
            events = self.selector.select(self.pause_s)
            is_quiet = not any(key.fileobj in self.open for key, _ in events)
            for key, _ in events:
                key.data()
            self.flush()
            self.beat()
            self.send_stacks()
            self.check_stop()
        if self.open and not self.abandoned():
            self.say("a process that it has left behind keeps its output open: what that writes from now on is lost")
        self.flush(at_once=True)
        if self.abandoned():  # nobody will come for what the rank had spooled
            outbox.clear(self.order.gang, self.worker)
        return self.judge()

    def start(self) -> None:
        """Have the warm server fork the rank, and point it to its order."""
        spec = self.order.spec
        self.control, theirs = (self.stack.enter_context(end) for end in socket.socketpair())
        self.output, output = os.pipe()
        self.stack.callback(os.close, self.output)
        their_output = self.stack.enter_context(os.fdopen(output, "wb", buffering=0))
        share = self.lease()
        order = self.stack.enter_context(self.write_order(share))
        fds = [theirs.fileno(), their_output.fileno(), self.board_fd, order.fileno()]
        up: dict[str, Any] = {}
        if spec.rank == 0:
            host = network.address_of(self.order.interface) if self.order.interface else spec.host
            listener = self.stack.enter_context(rendezvous.bind(host, self.order.ports))
            fds.append(listener.fileno())
            up["rendezvous"] = [host, listener.getsockname()[1]]
            self.send(up)
        publish(self.worker, self.order, "up", up)
        fork_client.hold()
        preemption.prepare(self.worker)
        self.server = self.stack.enter_context(fork_client.connect())
        local = Path(self.worker.local_directory)
        packed = self.order.project
        project = [str(self.with_room(lambda: packed.unpack(local)))] if packed else []
        request = {
            "title": f"ddp_hydra rank {spec.rank}/{spec.world_size} {self.order.gang}",
            "environment": environment.of_rank(
                spec, self.interface(), self.order.gang, self.order.attempt, self.order.group, share.position
            ),
            "cwd": self.order.cwd if Path(self.order.cwd).is_dir() else str(local),
            "path": [*project, *(str(Path(entry).absolute()) for entry in sys.path)],
            "affinity": environment.cores(),
        }
        socket.send_fds(self.server, [json.dumps(request).encode() + b"\n"], fds)
        for end in (theirs, their_output, order):
            end.close()
        self.open = {self.control, self.output}
        self.selector.register(self.control, selectors.EVENT_READ, self.on_control)
        self.selector.register(self.output, selectors.EVENT_READ, self.on_output)
        self.selector.register(self.server, selectors.EVENT_READ, self.on_server)
        self.selector.register(self.box, selectors.EVENT_READ, self.on_mail)

    def interface(self) -> str | None:
        """Where the ranks reach each other."""
        if self.order.interface:
            network.address_of(self.order.interface)  # says what there is where it is unknown
            return self.order.interface
        # An address that is none of this machine's leads here through a port mapping.
        return network.interface_of(self.order.spec.host) or network.interface_towards(self.worker.scheduler.addr)

    def lease(self) -> device_leases.Share:
        """Take a GPU and a share of the cores for the rank, until it has ended."""
        spec, seen = self.order.spec, gpus.identities(os.environ)
        wanted = environment.preferred_gpu(spec)
        if environment.is_placed():
            seen = seen[:1]
        share = self.stack.enter_context(
            device_leases.take(self.order.owner or self.order.gang, spec.local_world_size, self.cores(), seen, wanted)
        )
        if share.others_on_gpu and share.position is not None:
            self.say(
                f"GPU {seen[share.position]} is shared with {share.others_on_gpu} ranks of other jobs: none is free"
            )
        return share

    def cores(self) -> list[int]:
        """Return those that the ranks of this host share."""
        return environment.shared_cores(os.getppid() if self.worker.nanny else None)

    def write_order(self, share: device_leases.Share) -> IO[bytes]:
        """Write what the rank has to do, a line of JSON and the pickled call, where nobody else can: it has no name."""
        header = {
            "spec": asdict(self.order.spec),
            "gang": self.order.gang,
            "attempt": self.order.attempt,
            "backend": self.order.backend,
            "timeout_s": self.order.timeout_s,
            "group": self.order.group,
            "threads": self.order.threads
            or environment.threads(
                len(self.cores()) or os.cpu_count() or 1, self.order.spec.local_world_size + share.other_ranks
            ),
            "project": self.order.project.sha256 if self.order.project else "",
            "retry_s": self.order.retry_s,
            "spool": str(self.with_room(lambda: outbox.folder(self.worker, self.order.gang, self.rank))),
            "pids": {"worker": os.getpid(), "nanny": os.getppid() if self.worker.nanny else 0},
        }
        with contextlib.ExitStack() as stack:
            if hasattr(os, "memfd_create"):
                file: IO[bytes] = stack.enter_context(os.fdopen(os.memfd_create("ddp_hydra-order"), "w+b"))
            else:
                file = stack.enter_context(tempfile.TemporaryFile())
            file.write(json.dumps(header).encode() + b"\n" + self.order.call)
            file.flush()
            stack.pop_all()
        return file

    def with_room(self, action: Callable[[], T]) -> T:
        """Write into the worker's folder; where that is full, wait, with signs of life.

        Raises:
            DiskFull: there was no room in time.
            Stopped: the client has stopped this rank meanwhile.
        """
        folder = Path(self.worker.local_directory)
        warn = lambda sentence: publish(self.worker, self.order, "warning", {"text": sentence})  # noqa: E731
        return wait_for_space.retry_while_full(
            action, lambda: wait_for_space.describe_full_folder(folder), self.order.retry_s, warn, self.wait
        )

    def wait(self, seconds: float) -> None:
        """Wait before the rank is started."""
        publish(self.worker, self.order, "beat", {"step": 0, "phase": "join", "first": True, "age_s": 0.0})
        time.sleep(seconds)
        messages = self.box.take()
        if self.abandoned() or any("stop" in message for message in messages):
            raise Stopped
        for message in messages:  # for later
            self.box.put(message)

    # -- what happens --------------------------------------------------------------------------------------

    def on_control(self) -> None:
        """Take records; hold back the end, which waits for the process itself to end."""
        try:
            data = self.control.recv(2**18)
        except ConnectionResetError:
            data = b""
        if not data:
            self.close(self.control)
            return
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"kind":"end"'):
                self.end = dict(Record.decode(line).data)
            else:
                self.forward(line)

    def on_output(self) -> None:
        """Take what the rank wrote to stdout and stderr."""
        chunk = os.read(self.output, 65536)
        if not chunk:
            self.close(self.output)
            return
        self.said = (self.said + chunk)[-8192:]
        if self.stack_until is not None:
            self.stacks += chunk
        self.log(self.decoder.decode(chunk))

    def log(self, text: str) -> None:
        """Put a text into the rank's log."""
        self.forward(Record("log", {"text": text}, self.rank, None, time.time(), self.order.attempt).encode())

    def say(self, sentence: str) -> None:
        """Put a sentence of the relay's own into the rank's log."""
        newline = "" if self.said.endswith(b"\n") or not self.said else "\n"
        self.log(f"{newline}rank {self.rank} of {self.order.spec.world_size}: {sentence}\n")

    def on_server(self) -> None:
        """Hear from the warm server: the rank's pid, then how it ended; or why there is none."""
        data = self.server.recv(65536)
        for line in data.splitlines():
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            if "exit" in message or "refused" in message:
                self.exit = message
        if not data and self.exit is None:
            self.exit = {"exit": -signal.SIGKILL, "peak_rss": 0}  # the server died, and its ranks with it
        if self.exit is not None:
            self.selector.unregister(self.server)
            if left := self.exit.get("left"):
                self.say(f"it has left processes behind, and they were ended: {', '.join(left)}")

    def on_mail(self) -> None:
        """Act on what the client says; what is not for the relay is for the rank."""
        for message in self.box.take():
            if "acknowledged" in message:
                self.unacknowledged -= message["acknowledged"]
                self.listen()
            elif "stop" in message:
                self.stop(finish_checkpoint=bool(message.get("finish_checkpoint")))
            elif "finish" in message:
                self.shared_status.ask_to_finish(message["finish"])
            elif "stacks" in message:
                self.ask_for_stacks()
            elif "preempted" in message:
                self.shared_status.ask_to_finish(REASONS.index("preemption"))
                publish(self.worker, self.order, "preempted", {})
            else:
                self.send(message)

    # -- passing on ----------------------------------------------------------------------------------------

    def forward(self, record: bytes) -> None:
        """Queue a record for the client, and stop listening to the rank where the client is behind."""
        self.buffer.append(record)
        self.unacknowledged += len(record)
        self.listen()

    def listen(self) -> None:
        """Listen to the rank as long as the client keeps up; a rank that nobody hears blocks."""
        wanted = self.open if self.unacknowledged < WINDOW_BYTES else set()
        heard = self.selector.get_map()
        for source, act in ((self.control, self.on_control), (self.output, self.on_output)):
            if source in wanted and source not in heard:
                self.selector.register(source, selectors.EVENT_READ, act)
            elif source not in wanted and source in heard:
                self.selector.unregister(source)

    def close(self, source: socket.socket | int) -> None:
        """The rank has closed its end."""
        self.open.discard(source)
        self.listen()

    def flush(self, at_once: bool = False) -> None:
        """Send the queued records as one event."""
        now = time.monotonic()
        if self.buffer and (at_once or now - self.flushed >= FLUSH_S):
            self.worker.log_event(self.order.gang, b"\n".join(self.buffer))
            self.buffer.clear()
            self.flushed = now

    def send(self, message: inbox.Message) -> None:
        """Tell the rank something; one that has ended does not hear it."""
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps(message).encode() + b"\n")

    @property
    def pause_s(self) -> float:
        """How long nothing has to be looked at, unless somebody says something."""
        if self.buffer:
            return FLUSH_S
        is_calm = self.ready and self.stopping_since is self.save_until is None and self.stack_until in (None, math.inf)
        return CALM_S if is_calm else TICK_S

    # -- how it is doing -----------------------------------------------------------------------------------

    def beat(self) -> None:
        """Tell the client now and then where the rank is; that it is told says that this host is there."""
        now = time.monotonic()
        place = self.shared_status.read()
        behind = self.unacknowledged >= WINDOW_BYTES  # the rank may be waiting for the client
        if place.ticks != self.ticks or behind:
            self.ticks, self.moved = place.ticks, now
        ready = place.phase not in UNREADY
        if now - self.beat_at < BEAT_S and ready == self.ready:
            return
        self.beat_at, self.ready = now, ready
        age_s = now - self.moved
        stopped = age_s > BEAT_S and self.is_suspended()
        data = {"step": place.step, "phase": place.phase, "first": place.first, "age_s": age_s, "stopped": stopped}
        publish(self.worker, self.order, "beat", {**data, "saving": self.shared_status.saving})

    def is_suspended(self) -> bool:
        """Whether the rank's process is stopped, by SIGSTOP or a debugger."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return False

    def ask_for_stacks(self) -> None:
        """Have the rank print its stacks; a suspended one has to be woken for it."""
        if self.stack_until is None:
            self.stack_until = time.monotonic() + STACK_S
            for number in (signal.SIGUSR1, signal.SIGCONT):
                self.signal(number, alone=True)

    def send_stacks(self) -> None:
        """Send the stacks that the rank printed."""
        if self.stack_until is not None and self.stack_until != math.inf and time.monotonic() > self.stack_until:
            self.stack_until = math.inf
            text = self.stacks[-STACK_BYTES:].decode(errors="replace")
            publish(self.worker, self.order, "stack", {"text": text})

    # -- the end -------------------------------------------------------------------------------------------

    def abandoned(self) -> bool:
        """Whether Dask has cancelled this task: the client is gone, or gave up."""
        task = self.worker.state.tasks.get(self.task)
        return task is None or task.state in ("cancelled", "released")

    def is_drained(self, is_quiet: bool) -> bool:
        """Whether all is heard that a rank had said that has ended, although somebody keeps its output open.

        Args:
            is_quiet: nothing has come just now.
        """
        now = time.monotonic()
        if self.drain_until is None or self.unacknowledged >= WINDOW_BYTES:  # it is the client who is slow
            self.drain_until = now + DRAIN_S
        return now > self.drain_until + (0.0 if is_quiet else 10 * DRAIN_S)

    def check_stop(self) -> None:
        """Stop an abandoned rank, and kill one that does not stop."""
        is_saved = self.save_until is not None and (not self.shared_status.saving or time.monotonic() > self.save_until)
        if self.stopping_since is None and (is_saved or self.abandoned()):
            self.stop()
        if self.stopping_since and time.monotonic() - self.stopping_since > GRACE_S:
            self.signal(signal.SIGKILL)

    def stop(self, finish_checkpoint: bool = False) -> None:
        """Ask the rank to end.

        Args:
            finish_checkpoint: once its checkpoint is complete that is under way.
        """
        if finish_checkpoint and self.shared_status.saving:
            self.save_until = self.save_until or time.monotonic() + SAVE_S
        elif self.stopping_since is None:
            self.stopping_since = time.monotonic()
            self.shared_status.ask_to_die()
            self.signal(signal.SIGTERM)

    def signal(self, number: int, alone: bool = False) -> None:
        """Send a signal to the rank's process group, or to the rank alone."""
        if self.exit is None:
            with contextlib.suppress(OSError):
                self.server.sendall(json.dumps({"signal": number, "alone": alone}).encode() + b"\n")

    def judge(self) -> dict[str, Any]:
        """What the rank said of its end, else what its exit says."""
        assert self.exit is not None
        said = self.said.decode(errors="replace")
        place = self.shared_status.read()
        where = {"step": place.step, "phase": place.phase}
        if self.end is not None:
            return {**where, **self.end, "last_output": said}
        if self.stopping_since is not None:
            return {**where, "status": "stopped"}
        if "refused" in self.exit:
            message = (
                f"could not be started: its host lets this user start no other process ({self.exit['refused']}); run "
                "fewer ranks there, or raise the limit (ulimit -u, or a container's pids limit)"
            )
            return {**where, "status": "start", "message": message}
        status, message = describe_exit(self.exit["exit"], self.exit["peak_rss"])
        fatal = said.rfind("Fatal Python error")
        return {
            **where,
            "status": status,
            "message": message,
            "traceback": said[fatal:] if fatal >= 0 else "",
            "last_output": said,
        }
