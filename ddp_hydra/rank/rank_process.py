"""Watches one rank from its worker's task: has its process forked, passes its records on, and says how it ended.

The rank shares only a socket, a pipe and a page of memory with the worker. So whatever happens to it (a crash, the
out-of-memory killer, a hanging collective), the worker and its other ranks stay whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
from distributed import Worker
from msgspec.structs import replace

from ddp_hydra import results
from ddp_hydra.config.project import Project
from ddp_hydra.errors import Failure, describe_exit
from ddp_hydra.heartbeat import REASONS, SAVE_S, UNREADY, SharedStatus, file_in_memory
from ddp_hydra.rank import dask_preload, device_leases, environment, fork_client, inbox, outbox, spec
from ddp_hydra.rank.record_relay import RecordRelay, RecordSender
from ddp_hydra.rank.spec import JobSpec, RankLaunch, RankSpec
from ddp_hydra.record import Beat, End, Preempted, Stack, Up

TICK_S = 0.1
"""Seconds between two looks at a rank that starts or ends."""
CALM_S = 0.5
"""The same for a rank that trains: each look takes time from ranks on the same cores."""
BEAT_S = 1.0
"""Seconds between two heartbeats for the client."""
STACK_S = 0.5
"""Seconds that a rank may take to print its stacks."""
STACK_BYTES = 16 * 1024
DRAIN_S = 1.0
"""Seconds after the rank's end in which its output is still read. A process that it left behind may keep the output
open for ever."""


class RankContext:
    """What the ranks of one worker share.

    Args:
        is_cancelled: returns whether the client is gone, or gave up.

    Attributes:
        project: folder of the unpacked project space; None without one.
    """

    selector: selectors.BaseSelector
    project: Path | None = None

    def __init__(self, worker: Worker, job: JobSpec, is_cancelled: Callable[[], bool]) -> None:
        self.worker, self.job, self.is_cancelled = worker, job, is_cancelled
        self.sender = RecordSender(worker, job.topic, job.attempt)


class RankProcess:
    """Stands between one rank's process and the client."""

    def __init__(self, context: RankContext, spec: RankSpec) -> None:
        self.context, self.spec, self.selector = context, spec, context.selector
        self.worker, self.job, self.stack = context.worker, context.job, ExitStack()
        self.relay = RecordRelay(context.sender, spec, context.selector)
        self.outbox = outbox.path(self.worker.local_directory, self.job.topic, spec.rank)
        self.shared_status, self.shared_status_fd = SharedStatus.create()
        self.stack.callback(self.shared_status.close)
        self.stack.callback(os.close, self.shared_status_fd)
        self.pid: int | None = None
        self.exit: dict[str, Any] | None = None
        self.ended_at = 0.0
        self.stopping_since: float | None = None
        self.save_until: float | None = None
        self.ticks, self.moved_at = -1, time.monotonic()
        self.beat_at, self.ready = 0.0, False
        self.stack_until: float | None = None
        self.drain_until: float | None = None

    def start(self) -> None:
        self.control, theirs = (self.stack.enter_context(end) for end in socket.socketpair())
        output, their_end = os.pipe()
        self.stack.callback(os.close, output)
        their_output = self.stack.enter_context(os.fdopen(their_end, "wb", buffering=0))
        self.device = self.share()
        fds = [theirs.fileno(), their_output.fileno(), self.shared_status_fd]
        self.send_launch()
        fork_client.hold()
        inbox.prepare(self.worker)
        self.server = self.stack.enter_context(fork_client.connect())
        socket.send_fds(self.server, [json.dumps(self.request()).encode() + b"\n"], fds)
        for end in (theirs, their_output):
            end.close()
        self.stack.callback(self.relay.close)
        self.relay.start(self.control, output)
        self.selector.register(self.server, selectors.EVENT_READ, self.on_server)
        self.stack.callback(self.leave_server)

    def send_launch(self) -> None:
        """Send the process its place and call. Have it serve the place where the ranks meet, if it is rank 0."""
        with os.fdopen(file_in_memory("ddp_hydra-launch"), "w+b") as file:
            file.write(msgspec.msgpack.encode(self.launch()))
            file.flush()
            self.send({"launch": True}, file.fileno())
        if self.spec.rank == 0:
            interface = self.job.settings.interface
            host = environment.address_of(interface) if interface else self.spec.host
            with environment.bind(host, self.job.settings.port_range) as listener:
                rendezvous = host, listener.getsockname()[1]
                self.send({"rendezvous": rendezvous}, listener.fileno())
            self.context.sender.say(0, Up(rendezvous))
            self.context.sender.flush(at_once=True)  # the others wait for it; what follows may take seconds
        else:
            self.context.sender.say(self.spec.rank, Up())

    def launch_again(self, job: JobSpec, spec: RankSpec) -> None:
        """Have the process, which has left its world or lost it, take another place, in the next world."""
        self.job, self.spec, self.relay.spec = job, spec, spec
        self.outbox = outbox.folder(self.worker, job.topic, spec.rank)
        self.send_launch()

    def leave_server(self) -> None:
        if self.server in self.selector.get_map():
            self.selector.unregister(self.server)

    def look(self, sources: Collection[Any]) -> bool:
        self.beat()
        self.send_stacks()
        self.check_stop()
        if self.exit is None:
            return False
        is_quiet = self.relay.open.isdisjoint(sources)
        return not self.relay.open or self.context.is_cancelled() or self.is_drained(is_quiet)

    # -- the start -----------------------------------------------------------------------------------------

    def send(self, message: inbox.Message, *fds: int) -> None:
        socket.send_fds(self.control, [json.dumps(message).encode() + b"\n"], fds)

    def request(self) -> dict[str, Any]:
        spec, job, settings = self.spec, self.job, self.job.settings
        project = self.context.project
        return {
            "title": f"ddp_hydra rank {spec.rank}/{spec.world_size} {job.topic}",
            "environment": environment.of_rank(
                job, spec, self.interface(), str(self.outbox.with_name("error.json")), self.device.position
            ),
            "cwd": self.working_folder(),
            "path": [*([str(project)] if project else []), *map(environment.search_place, sys.path)],
            "affinity": environment.cores(),
            "keep_warm_s": settings.keep_warm_s or 0.0,
        }

    def working_folder(self) -> str:
        """Return the client's folder, where this host has it; else the worker's, which is removed with the worker."""
        cwd, local = self.job.settings.cwd, self.worker.local_directory
        if os.access(f"{cwd}/", os.X_OK):
            return cwd
        if self.job.is_script and self.spec.local_rank == 0:
            self.context.sender.warn(
                self.spec.rank,
                f"host {socket.gethostname()} has no folder {cwd}, so the script works in {local}, which is "
                "removed with its worker: have it write to a folder of that host, or send files: results.submit",
            )
        return local

    def interface(self) -> str | None:
        # An address that is not of this machine leads here through a port mapping.
        return (
            self.job.settings.interface
            or environment.interface_of(self.spec.host)
            or environment.interface_towards(self.worker.scheduler.addr)
        )

    def share(self) -> device_leases.Share:
        spec, seen = self.spec, environment.gpu_identities(os.environ)
        if environment.is_placed():
            seen = seen[:1]
        share = self.stack.enter_context(
            device_leases.acquire(self.job.gang, spec.local_world_size, self.cores(), seen, spec.local_rank)
        )
        if share.others_on_gpu and share.position is not None:
            self.relay.log_sentence(
                f"GPU {seen[share.position]} is shared with {share.others_on_gpu} ranks of other jobs: none is free"
            )
        return share

    def cores(self) -> list[int]:
        return environment.shared_cores(os.getppid() if self.worker.nanny else None)

    def launch(self) -> RankLaunch:
        spec, job = self.spec, self.job
        ranks = max(spec.local_world_size + self.device.other_ranks, job.ranks_on_host.get(spec.host, 0))
        threads = (
            job.settings.threads
            or environment.threads_of_job(job.settings.variables)
            or environment.threads(len(self.cores()) or os.cpu_count() or 1, ranks)
        )
        own = replace(
            job,
            ranks=(spec,),
            project=job.project and Project(job.project.sha256, b""),
            settings=replace(job.settings, threads=threads),
        )
        return RankLaunch(
            job=own,
            outbox=str(self.outbox),
            worker_pid=0 if dask_preload.in_client else os.getpid(),
            nanny_pid=os.getppid() if self.worker.nanny and not dask_preload.is_local else 0,
        )

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
                self.exit = {"was_ended": False, **message}
        if not data and self.exit is None:  # and its ranks with it
            self.exit = {"exit": -signal.SIGKILL, "server": "ended", "was_ended": self.stopping_since is not None}
        if self.exit is not None:
            self.ended_at = self.ended_at or time.time()
            self.leave_server()
            if left := self.exit.get("left"):
                self.relay.log_sentence(f"it has left processes behind, and they were ended: {', '.join(left)}")

    def on_message(self, message: inbox.Message) -> None:
        """Act on a message of the client; pass on one that is for the rank's process."""
        if "acknowledged" in message:
            self.relay.acknowledge(message["acknowledged"])
        elif "stop" in message:
            self.stop(finish_checkpoint=bool(message.get("finish_checkpoint")))
        elif "finish" in message:
            self.shared_status.ask_to_finish(message["finish"])
        elif "leave" in message:
            self.shared_status.ask_to_leave()
        elif "stacks" in message:
            self.request_stacks()
        elif "preempted" in message:
            self.shared_status.ask_to_finish(REASONS.index("preemption"))
            self.context.sender.say(self.spec.rank, Preempted())
        elif "rendezvous" not in message or self.spec.rank:  # rank 0 knows where it listens
            with contextlib.suppress(OSError):  # a rank that has ended does not read it
                self.send(message)

    @property
    def pause_s(self) -> float:
        """Return for how many seconds nothing has to be checked, unless an event comes."""
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
        self.context.sender.say(self.spec.rank, beat)

    def is_suspended(self) -> bool:
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
        if self.stack_until is not None and self.stack_until != math.inf and time.monotonic() > self.stack_until:
            self.stack_until = math.inf
            stacks, self.relay.captured = self.relay.captured or b"", None
            text = stacks[-STACK_BYTES:].decode(errors="replace")
            self.context.sender.say(self.spec.rank, Stack(text))

    # -- the end -------------------------------------------------------------------------------------------

    def is_drained(self, is_quiet: bool) -> bool:
        now = time.monotonic()
        if self.drain_until is None or self.relay.is_blocked:  # a slow client gets more time
            self.drain_until = now + DRAIN_S
        return now > self.drain_until + (0.0 if is_quiet else 10 * DRAIN_S)

    def check_stop(self) -> None:
        is_saved = self.save_until is not None and (not self.shared_status.saving or time.monotonic() > self.save_until)
        if self.stopping_since is None and (is_saved or self.context.is_cancelled()):
            self.stop()
        if self.stopping_since and time.monotonic() - self.stopping_since > self.context.job.stop_s:
            self.signal(signal.SIGKILL)

    def stop(self, finish_checkpoint: bool = False) -> None:
        if finish_checkpoint and self.shared_status.saving:
            self.save_until = self.save_until or time.monotonic() + SAVE_S
        elif self.stopping_since is None:
            self.stopping_since = time.monotonic()
            self.shared_status.ask_to_die()
            self.signal(signal.SIGTERM)

    def signal(self, number: int, alone: bool = False) -> None:
        if self.exit is None:
            with contextlib.suppress(OSError):
                self.server.sendall(json.dumps({"signal": number, "alone": alone}).encode() + b"\n")

    def end(self) -> End:
        """Return how the rank ended: from its own record, else from the exit of its process."""
        assert self.exit is not None
        if self.relay.open and not self.context.is_cancelled():
            self.relay.log_sentence("a process that it has left behind keeps its output open: its later output is lost")
        output = self.relay.tail.decode(errors="replace")
        place = self.shared_status.read()
        end = self.relay.end
        if end is None and self.context.job.is_script and self.exit.get("exit") == 0:
            end = End(value=results.file_of("value", spec.encode(None)))  # os._exit(0), or another program
        if end is None:
            # One that ended before the stop reached it has failed by itself, and may be the cause of the others' end.
            is_stopped = self.stopping_since is not None and self.exit["was_ended"]
            end = End(stopped=True) if is_stopped else End(failure=self.failure(output))
        if end.failure is not None:
            end = replace(end, failure=replace(end.failure, last_output=output))
        return replace(end, step=place.step, phase=place.phase)

    def failure(self, output: str) -> Failure:
        assert self.exit is not None
        if "refused" in self.exit:
            what = f"could not be started: its host lets this user start no other process ({self.exit['refused']})"
            message = f"{what}; run fewer ranks there, or raise the limit (ulimit -u, or a container's pids limit)"
            return Failure("start", message=message, time_s=self.ended_at)
        if "server" in self.exit:
            what = "ended with the fork server of its host, which was killed, as for lack of memory, or could not start"
            return Failure("killed", message=f"{what}; ddp-hydra warm starts and shows it", time_s=self.ended_at)
        kind, message = describe_exit(self.exit["exit"], self.exit["peak_rss"])
        fatal = output.rfind("Fatal Python error")
        trace = output[fatal:] if fatal >= 0 else ""
        return Failure(kind, message=message, traceback=trace, time_s=self.ended_at)
