"""Has the host's fork server start the process of one rank."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import msgspec
from distributed import Worker
from msgspec.structs import replace

from ddp_hydra.config.project import Project
from ddp_hydra.rank import (
    dask_preload,
    device_leases,
    environment,
    fork_client,
    gpus,
    inbox,
    network,
    outbox,
    preemption,
)
from ddp_hydra.rank.record_relay import RecordRelay, RecordSender
from ddp_hydra.rank.spec import JobSpec, RankLaunch, RankSpec
from ddp_hydra.record import Up


class RankContext:
    """What the ranks of one worker share.

    Args:
        worker: the Dask worker.
        job: of its ranks, and of other workers'.
        is_cancelled: returns whether the client is gone, or gave up.

    Attributes:
        sender: of the ranks' records.
        selector: waits for what they, and the client, send.
        project: folder of the unpacked project space; None without one.
    """

    selector: selectors.BaseSelector
    project: Path | None = None

    def __init__(self, worker: Worker, job: JobSpec, is_cancelled: Callable[[], bool]) -> None:
        self.worker, self.job, self.is_cancelled = worker, job, is_cancelled
        self.sender = RecordSender(worker, job.topic, job.attempt)


class Launcher:
    """Prepares all that a rank's process needs, and has it forked.

    Args:
        context: of the worker's ranks.
        spec: the rank's place.
        stack: closes, when the rank has ended, what is opened here.
        relay: writes into the rank's log.

    Attributes:
        control: socket to the process.
        output: pipe of its stdout and stderr.
        server: connection to the fork server.
    """

    def __init__(self, context: RankContext, spec: RankSpec, stack: ExitStack, relay: RecordRelay) -> None:
        self.context, self.spec, self.stack, self.relay = context, spec, stack, relay
        self.worker, self.job = context.worker, context.job
        self.outbox = outbox.path(context.worker.local_directory, context.job.topic, spec.rank)

    def start(self, shared_status_fd: int) -> None:
        self.control, theirs = (self.stack.enter_context(end) for end in socket.socketpair())
        self.output, output = os.pipe()
        self.stack.callback(os.close, self.output)
        their_output = self.stack.enter_context(os.fdopen(output, "wb", buffering=0))
        share = self.share()
        launch_file = self.write_launch_file(share)
        fds = [theirs.fileno(), their_output.fileno(), shared_status_fd, launch_file.fileno()]
        if self.spec.rank == 0:
            interface = self.job.settings.interface
            host = network.address_of(interface) if interface else self.spec.host
            listener = self.stack.enter_context(network.bind(host, self.job.settings.port_range))
            fds.append(listener.fileno())
            rendezvous = host, listener.getsockname()[1]
            self.send({"rendezvous": rendezvous})
            self.context.sender.say(0, Up(rendezvous))
            self.context.sender.flush(at_once=True)  # the others wait for it; what follows may take seconds
        else:
            self.context.sender.say(self.spec.rank, Up())
        fork_client.hold()
        preemption.prepare(self.worker)
        self.server = self.stack.enter_context(fork_client.connect())
        request = self.request(share)
        socket.send_fds(self.server, [json.dumps(request).encode() + b"\n"], fds)
        for end in (theirs, their_output, launch_file):
            end.close()

    def send(self, message: inbox.Message) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def request(self, share: device_leases.Share) -> dict[str, Any]:
        spec, job, settings = self.spec, self.job, self.job.settings
        project = self.context.project
        return {
            "title": f"ddp_hydra rank {spec.rank}/{spec.world_size} {job.topic}",
            "environment": environment.of_rank(
                job, spec, self.interface(), str(self.outbox.with_name("error.json")), share.position
            ),
            "cwd": self.working_folder(),
            "path": [*([str(project)] if project else []), *(str(Path(entry).absolute()) for entry in sys.path)],
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
        if self.job.settings.interface:
            network.address_of(self.job.settings.interface)  # raises, with the known interfaces, if it is unknown
            return self.job.settings.interface
        # An address that is not of this machine leads here through a port mapping.
        host = self.spec.host
        return network.interface_of(host) or network.interface_towards(self.worker.scheduler.addr)

    def share(self) -> device_leases.Share:
        spec, seen = self.spec, gpus.identities(os.environ)
        wanted = environment.preferred_gpu(spec)
        if environment.is_placed():
            seen = seen[:1]
        share = self.stack.enter_context(
            device_leases.acquire(self.job.gang, spec.local_world_size, self.cores(), seen, wanted)
        )
        if share.others_on_gpu and share.position is not None:
            self.relay.log_sentence(
                f"GPU {seen[share.position]} is shared with {share.others_on_gpu} ranks of other jobs: none is free"
            )
        return share

    def cores(self) -> list[int]:
        return environment.shared_cores(os.getppid() if self.worker.nanny else None)

    def launch(self, share: device_leases.Share) -> RankLaunch:
        spec, job = self.spec, self.job
        ranks = max(spec.local_world_size + share.other_ranks, job.ranks_on_host.get(spec.host, 0))
        threads = job.settings.threads or environment.threads(len(self.cores()) or os.cpu_count() or 1, ranks)
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

    def write_launch_file(self, share: device_leases.Share) -> IO[bytes]:
        file: IO[bytes]
        if hasattr(os, "memfd_create"):
            file = self.stack.enter_context(os.fdopen(os.memfd_create("ddp_hydra-launch"), "w+b"))
        else:
            file = self.stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        file.write(msgspec.msgpack.encode(self.launch(share)))
        file.flush()
        return file
