"""The Dask task of one rank: starts its process, passes its records on, and reports how it ended.

The rank shares only a socket, a pipe and a page of memory with the worker. So whatever happens to it (a crash, the
out-of-memory killer, a hanging collective), the worker stays whole. The task itself never raises because of the rank:
the end record says what happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil
from distributed import Worker, get_worker
from msgspec.structs import replace

from ddp_hydra.errors import ConfigError, DiskFull, Failure, describe_exit
from ddp_hydra.heartbeat import REASONS, SAVE_S, UNREADY, SharedStatus
from ddp_hydra.rank import inbox, outbox
from ddp_hydra.rank.launcher import Launcher, Stopped
from ddp_hydra.rank.record_relay import FLUSH_S, RecordRelay, publish
from ddp_hydra.rank.spec import LaunchSpec
from ddp_hydra.record import Beat, End, Preempted, Stack

TICK_S = 0.1
"""Seconds between two looks at a rank that starts or ends."""
CALM_S = 0.5
"""The same for a rank that trains: each look takes time from ranks on the same cores."""
BEAT_S = 1.0
"""Seconds between two heartbeats for the client."""
STACK_S = 0.5
"""Seconds that a rank may take to print its stacks."""
STACK_BYTES = 16 * 1024
GRACE_S = 0.5
"""Seconds from SIGTERM to SIGKILL."""
DRAIN_S = 1.0
"""Seconds after the rank's end in which its output is still read. A process that it left behind may keep the output
open for ever."""


@dataclass(frozen=True)
class PickledTask:
    """Runs the rank when it is unpickled.

    A scheduler unpickles each task that it passes on. The task that it sees is the unpickling of these bytes, so the
    scheduler needs no ddp_hydra.

    Args:
        launch_spec: all that the worker needs.
    """

    launch_spec: LaunchSpec

    def __reduce__(self) -> tuple[Any, ...]:
        return run_rank, (self.launch_spec,)


def run_rank(launch_spec: LaunchSpec) -> None:
    """Run one rank to its end."""
    worker, spec = get_worker(), launch_spec.spec
    if worker.address != spec.worker:
        lost = Failure("lost", message=f"its worker {spec.worker} went away")
        publish(worker, launch_spec, End(failure=lost))
        return
    try:
        try:
            with ExitStack() as stack:
                end = RankTask(worker, launch_spec, stack).run()
        except Stopped:
            end = End(stopped=True)
        except Exception as error:  # of ours, or of the host: no file descriptors, a full disk, no torch
            end = not_started(error)
        publish(worker, launch_spec, end)
    finally:
        inbox.remove(launch_spec.gang, spec.rank)  # after the last record: a worker that closes waits for this


def not_started(error: Exception, what: str = "could not be started") -> End:
    """Return the end of a rank that has no process, or whose task failed."""
    if isinstance(error, (ConfigError, DiskFull)):  # another attempt would fail in the same way
        return End(failure=Failure("start", message=f"{what}: {error}", time_s=time.time(), mistake=True))
    message = f"{what}: {type(error).__name__}: {error}"
    return End(failure=Failure("start", message=message, traceback=traceback.format_exc(), time_s=time.time()))


class RankTask:
    """Stands between one rank's process and the client.

    Args:
        worker: the Dask worker.
        launch_spec: of the rank.
        stack: closes, when the rank has ended, what is opened here.
    """

    def __init__(self, worker: Worker, launch_spec: LaunchSpec, stack: ExitStack) -> None:
        self.worker, self.launch_spec = worker, launch_spec
        self.dask_key = worker.get_current_task()
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.box = inbox.of_rank(launch_spec.gang, launch_spec.spec.rank)
        self.relay = RecordRelay(worker, launch_spec, self.selector)
        self.launcher = Launcher(worker, launch_spec, stack, self.box, self.relay, self.is_cancelled)
        self.shared_status, self.shared_status_fd = SharedStatus.create()
        stack.callback(self.shared_status.close)
        stack.callback(os.close, self.shared_status_fd)
        self.pid: int | None = None
        self.exit: dict[str, Any] | None = None
        self.stopping_since: float | None = None
        self.save_until: float | None = None
        self.ticks, self.moved_at = -1, time.monotonic()
        self.beat_at, self.ready = 0.0, False
        self.stack_until: float | None = None
        self.drain_until: float | None = None

    def run(self) -> End:
        """Start the rank, pass its records on until it has ended, and return how it ended."""
        self.start()
        relay, is_quiet = self.relay, False
        while self.exit is None or (relay.open and not self.is_cancelled() and not self.is_drained(is_quiet)):
            events = self.selector.select(self.pause_s)
            is_quiet = not any(key.fileobj in relay.open for key, _ in events)
            for key, _ in events:
                key.data()
            relay.flush()
            self.beat()
            self.send_stacks()
            self.check_stop()
        if relay.open and not self.is_cancelled():
            relay.log_sentence("a process that it has left behind keeps its output open: its later output is lost")
        relay.flush(at_once=True)
        if self.is_cancelled():  # nobody will fetch the rank's files
            outbox.clear(self.launch_spec.gang, self.worker)
        return self.end()

    def start(self) -> None:
        """Have the process forked, and wait for its records, the fork server and the inbox from now on."""
        self.launcher.start(self.shared_status_fd)
        self.server = self.launcher.server
        self.relay.start(self.launcher.control, self.launcher.output)
        self.selector.register(self.server, selectors.EVENT_READ, self.on_server)
        self.selector.register(self.box, selectors.EVENT_READ, self.on_inbox)

    # -- events --------------------------------------------------------------------------------------------

    def on_server(self) -> None:
        """Read from the fork server: the rank's pid, then how it ended; or why it was not started."""
        try:
            data = self.server.recv(65536)
        except ConnectionResetError:  # it died before it had read a request
            data = b""
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
                self.relay.log_sentence(f"it has left processes behind, and they were ended: {', '.join(left)}")

    def on_inbox(self) -> None:
        """Act on the messages of the client."""
        for message in self.box.take():
            self.on_message(message)

    def on_message(self, message: inbox.Message) -> None:
        """Act on a message of the client; pass on one that is for the rank's process."""
        if "acknowledged" in message:
            self.relay.acknowledge(message["acknowledged"])
        elif "stop" in message:
            self.stop(finish_checkpoint=bool(message.get("finish_checkpoint")))
        elif "finish" in message:
            self.shared_status.ask_to_finish(message["finish"])
        elif "stacks" in message:
            self.request_stacks()
        elif "preempted" in message:
            self.shared_status.ask_to_finish(REASONS.index("preemption"))
            publish(self.worker, self.launch_spec, Preempted())
        else:
            with contextlib.suppress(OSError):  # a rank that has ended does not read it
                self.launcher.send(message)

    @property
    def pause_s(self) -> float:
        """Return for how many seconds nothing has to be checked, unless an event comes."""
        if self.relay.buffer:
            return FLUSH_S
        is_calm = self.ready and self.stopping_since is self.save_until is None and self.stack_until in (None, math.inf)
        return CALM_S if is_calm else TICK_S

    # -- health --------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Send the client a heartbeat now and then: where the rank is, and that this host is up."""
        now = time.monotonic()
        place = self.shared_status.read()
        if place.ticks != self.ticks or self.relay.is_blocked:  # a blocked rank may be waiting for the client
            self.ticks, self.moved_at = place.ticks, now
        ready = place.phase not in UNREADY
        if now - self.beat_at < BEAT_S and ready == self.ready:
            return
        self.beat_at, self.ready = now, ready
        age_s = now - self.moved_at
        stopped = age_s > BEAT_S and self.is_suspended()
        beat = Beat(place.step, place.phase, place.first, age_s, stopped, self.shared_status.saving)
        publish(self.worker, self.launch_spec, beat)

    def is_suspended(self) -> bool:
        """Return whether the rank's process is suspended, by SIGSTOP or a debugger."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return False

    def request_stacks(self) -> None:
        """Have the rank print its stacks; a suspended process has to be woken for it."""
        if self.stack_until is None:
            self.stack_until = time.monotonic() + STACK_S
            self.relay.captured = b""
            for number in (signal.SIGUSR1, signal.SIGCONT):
                self.signal(number, alone=True)

    def send_stacks(self) -> None:
        """Send the stacks that the rank has printed, when its time for it is over."""
        if self.stack_until is not None and self.stack_until != math.inf and time.monotonic() > self.stack_until:
            self.stack_until = math.inf
            stacks, self.relay.captured = self.relay.captured or b"", None
            text = stacks[-STACK_BYTES:].decode(errors="replace")
            publish(self.worker, self.launch_spec, Stack(text))

    # -- the end -------------------------------------------------------------------------------------------

    def is_cancelled(self) -> bool:
        """Return whether Dask has cancelled this task: the client is gone, or gave up."""
        task = self.worker.state.tasks.get(self.dask_key)
        return task is None or task.state in ("cancelled", "released")

    def is_drained(self, is_quiet: bool) -> bool:
        """Return whether the output of an ended rank was read for long enough, although a process keeps it open.

        Args:
            is_quiet: nothing has come just now.
        """
        now = time.monotonic()
        if self.drain_until is None or self.relay.is_blocked:  # a slow client gets more time
            self.drain_until = now + DRAIN_S
        return now > self.drain_until + (0.0 if is_quiet else 10 * DRAIN_S)

    def check_stop(self) -> None:
        """Stop a rank whose task is cancelled, and kill one that does not stop."""
        is_saved = self.save_until is not None and (not self.shared_status.saving or time.monotonic() > self.save_until)
        if self.stopping_since is None and (is_saved or self.is_cancelled()):
            self.stop()
        if self.stopping_since and time.monotonic() - self.stopping_since > GRACE_S:
            self.signal(signal.SIGKILL)

    def stop(self, finish_checkpoint: bool = False) -> None:
        """Ask the rank to end.

        Args:
            finish_checkpoint: first let it complete the checkpoint that it is writing.
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

    def end(self) -> End:
        """Return how the rank ended: from its own record, else from the exit of its process."""
        assert self.exit is not None
        output = self.relay.tail.decode(errors="replace")
        place = self.shared_status.read()
        end = self.relay.end
        if end is None:
            end = End(stopped=True) if self.stopping_since is not None else End(failure=self.failure(output))
        if end.failure is not None:
            end = replace(end, failure=replace(end.failure, last_output=output))
        return replace(end, step=place.step, phase=place.phase)

    def failure(self, output: str) -> Failure:
        """Return the failure of a process that has not said how it ended."""
        assert self.exit is not None
        if "refused" in self.exit:
            message = (
                f"could not be started: its host lets this user start no other process ({self.exit['refused']}); run "
                "fewer ranks there, or raise the limit (ulimit -u, or a container's pids limit)"
            )
            return Failure("start", message=message, time_s=time.time())
        kind, message = describe_exit(self.exit["exit"], self.exit["peak_rss"])
        fatal = output.rfind("Fatal Python error")
        trace = output[fatal:] if fatal >= 0 else ""
        return Failure(kind, message=message, traceback=trace, time_s=time.time())
