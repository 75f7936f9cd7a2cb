"""Stands between one rank and the process of rank 0, as the task of a Dask worker stands between a rank and the client.

It runs in the process that torchrun has started. The rank is a child of that process, so that whatever happens to it,
somebody is left to say what it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import msgspec

from ddp_hydra.console.signals import SIGNALS, held_back
from ddp_hydra.rank import inbox, outbox, torchrun_rank
from ddp_hydra.rank.processes import kill_group
from ddp_hydra.rank.rank_process import RankProcess
from ddp_hydra.rank.record_relay import RecordSender
from ddp_hydra.rank.spec import GangSettings, JobSpec, RankSpec, TorchrunLaunch
from ddp_hydra.rank.task import WorkerTask, not_started
from ddp_hydra.rank.torchrun_channel import GANG
from ddp_hydra.record import End, Preempted, Up


class TorchrunWorker:
    """Stands in for the parts of `distributed.Worker` that `WorkerTask` uses.

    Args:
        address: names it.
        folder: for files on their way; this user's only.

    Attributes:
        send: sends lines to the process of rank 0; None until that is found.
        unsent: lines that wait for it.
    """

    def __init__(self, address: str, folder: str) -> None:
        self.address, self.local_directory = address, folder
        self.send: Callable[[bytes], None] | None = None
        self.unsent: list[bytes] = []
        self.lock = threading.Lock()

    def log_event(self, _topic: str, lines: bytes) -> None:
        with self.lock:
            if self.send is None:
                self.unsent.append(lines)
            else:
                self.send(lines)

    def send_by(self, send: Callable[[bytes], None]) -> None:
        with self.lock:
            for lines in self.unsent:
                send(lines)
            self.unsent.clear()
            self.send = send


class TorchrunRank(RankProcess):
    """Forks a rank, and watches it as its parent.

    Args:
        context: of the task that serves it.
        spec: the rank's place.
    """

    def fork(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        control, theirs = socket.socketpair()
        output, their_output = os.pipe()
        parent = os.getpid()
        with held_back(SIGNALS):
            self.pid = os.fork()
            if self.pid == 0:
                control.close()
                os.close(output)
                torchrun_rank.main(self.spec, parent, theirs, their_output, self.shared_status_fd)
        theirs.close()
        os.close(their_output)
        self.stack.callback(control.close)
        self.stack.callback(os.close, output)
        self.launcher.control, self.launcher.output = control, output

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Act on a message; tell the process of rank 0 that this one has got a signal."""
        if "told_to_end" in message:
            self.context.sender.say(self.spec.rank, Preempted(message["told_to_end"]))
        else:
            super().on_message(message)

    def start(self) -> None:
        self.stack.callback(self.relay.close)
        self.relay.start(self.launcher.control, self.launcher.output)
        if hasattr(os, "pidfd_open"):
            assert self.pid
            self.process_fd = os.pidfd_open(self.pid)
            self.stack.callback(os.close, self.process_fd)
            self.listen(self.process_fd, self.reap)

    def reap(self) -> None:
        if self.exit is not None or not self.pid:
            return
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            kill_group(pid)  # processes that the rank started, such as data loaders
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            self.exit = {"exit": os.waitstatus_to_exitcode(status), "peak_rss": peak}
            if hasattr(self, "process_fd"):
                self.unlisten(self.process_fd)

    def check_stop(self) -> None:
        self.reap()
        super().check_stop()

    def signal(self, number: int, alone: bool = False) -> None:
        if self.exit is None and self.pid:
            with contextlib.suppress(OSError):
                (os.kill if alone else os.killpg)(self.pid, number)

    def kill(self) -> None:
        if self.exit is None and self.pid:
            self.signal(signal.SIGKILL, alone=True)  # it may not have its process group yet
            self.signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.exit = {"exit": -signal.SIGKILL, "peak_rss": 0}


class TorchrunTask(WorkerTask):
    """Serves one rank: passes its records on, and says how it ended.

    Args:
        spec: the rank's place.
        worker: takes the records.
        on_server: called when the rank has heard where the process of rank 0 is.
        stack: closes, when the rank has ended, what is opened here.
    """

    def __init__(
        self, spec: RankSpec, worker: TorchrunWorker, on_server: Callable[[Mapping[str, Any]], None], stack: ExitStack
    ) -> None:
        self.launched_by = os.getppid()
        self.has_agent = "TORCHELASTIC_RUN_ID" in os.environ
        self.was_given_up = False
        stands_in = cast(Any, worker)
        job, sender = JobSpec(gang=GANG, attempt=0, ranks=(spec,)), RecordSender(stands_in, GANG, 0)
        box = inbox.of_task(GANG, spec.worker)
        super().__init__(stands_in, job, (spec,), sender, box, self.is_useless, stack)
        self.spec, self.own_worker = spec, worker
        self.rank = TorchrunRank(self.context, spec)
        stack.callback(self.rank.close)
        stack.callback(self.rank.kill)
        self.rank.relay.on_up = lambda up: on_server(up.server or {})
        self.launched_by = os.getppid()
        self.has_agent = "TORCHELASTIC_RUN_ID" in os.environ
        self.was_given_up = False

    def give(self, settings: GangSettings, call: bytes, attempt: int = 0, **more: Any) -> None:
        """Give the rank its job.

        Args:
            settings: of the gang.
            call: "module:name", arguments and keyword arguments, encoded by `return_values`.
            attempt: number of the gang's start.
            more: see `TorchrunLaunch`.
        """
        folder = outbox.folder(self.own_worker, GANG, self.spec.rank)
        job = JobSpec(gang=GANG, attempt=attempt, ranks=(self.spec,), call=call, settings=settings)
        line = msgspec.json.encode(TorchrunLaunch(job=job, outbox=str(folder), **more)) + b"\n"
        with contextlib.suppress(OSError):  # it has ended, and that will be said
            self.rank.launcher.control.sendall(line)

    def run_to_end(self) -> End:
        """Pass on what the rank sends until it has ended, and then how it ended; return that."""
        number = self.spec.rank
        self.sender.say(number, Up())
        self.sender.flush(at_once=True)
        try:
            self.rank.start()
            self.ranks[number] = self.rank
            while self.ranks:
                self.serve()
        except Exception as error:  # of ours, or of the host
            self.rank.kill()
            self.sender.say_end(number, not_started(error, "could not be watched"))
        self.sender.flush(at_once=True)
        return self.sender.ended[number]

    def give_up(self) -> None:
        """Have the rank end soon; called from any thread."""
        self.was_given_up = True
        self.box.put({"stop": True})

    @property
    def has_lost_torchrun(self) -> bool:
        """Return whether torchrun was killed: nobody would end this process, or start it again."""
        return self.has_agent and os.getppid() != self.launched_by

    def is_useless(self) -> bool:
        return self.was_given_up or self.has_lost_torchrun
