"""Runs one rank in a process of its own, below the process that torchrun has started for it.

The process that torchrun has started stays outside of the training, as a Dask worker does: it reads what this one
sends and prints, and says how it ended.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ddp_hydra import forked, heartbeat, results
from ddp_hydra.console.signals import SIGNALS, own_handler
from ddp_hydra.rank import environment, fault_injection, network, return_values, torchrun_meeting
from ddp_hydra.rank.processes import die_with_parent
from ddp_hydra.rank.spec import RankSpec, TorchrunLaunch
from ddp_hydra.record import Up


def main(spec: RankSpec, parent: int, control: socket.socket, output: int, shared_status_fd: int) -> NoReturn:
    """Run one rank; called in the process that was forked for it.

    Args:
        spec: this rank's place.
        parent: process id of the process that torchrun has started.
        control: socket to it: records go out, the job comes in.
        output: pipe for stdout and stderr.
        shared_status_fd: the page of memory in which this rank writes where it is.
    """

    def work() -> int:
        forked.begin()
        os.setsid()  # Ctrl-C is for the parent
        die_with_parent(parent)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream_fd in (1, 2):
            os.dup2(output, stream_fd)
        os.close(output)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, 2)  # by which the parent requests the stacks
        code = run(spec, control, heartbeat.SharedStatus.of(shared_status_fd))
        forked.end()
        return code

    forked.run_and_exit(work)


def run(spec: RankSpec, control: socket.socket, shared_status: heartbeat.SharedStatus) -> int:
    from setproctitle import setproctitle

    from ddp_hydra.rank import process, process_group  # it imports torch, while the parent gets the job ready

    setproctitle(f"ddp_hydra rank {spec.rank}/{spec.world_size} torchrun")
    heartbeat.connect(shared_status)
    heartbeat.at("join", 0)
    with control.makefile("rb") as lines:
        if not (line := lines.readline()).endswith(b"\n"):
            raise EOFError("the process of torchrun has ended")
    launch = msgspec.json.decode(line, type=TorchrunLaunch)
    job, settings = launch.job, launch.job.settings
    process.take_helper(settings.data_workers)
    sender = process.SocketSender(control, Path(launch.outbox))
    results.connect(sender, spec.rank, job.attempt, settings.retry_s)

    def work() -> Any:
        process.set_threads(settings.threads, spec.local_world_size)
        os.environ.update(variables(spec, settings.interface))
        fn, args, kwargs = return_values.decode(job.call)
        compared = comparable(args) if spec.world_size > 1 else {}
        mine = torchrun_meeting.Choices(kwargs.get("files", {}), compared, job.attempt, launch.server, launch.numbers)
        store = torchrun_meeting.meet(spec, settings.start_timeout_s, settings.timeout_s)
        first = torchrun_meeting.agree(store, spec, mine, settings.start_timeout_s)
        if spec.rank:
            results.emit(Up(server=dict(first.server)))
            results.connect(sender, spec.rank, first.attempt, settings.retry_s)
        fault_injection.install(spec.rank, first.attempt, {})
        signal.signal(signal.SIGTERM, own_handler(lambda *_: process.on_sigterm(shared_status)))
        with process_group.process_group(store, spec.rank, spec.world_size, settings.backend, settings.timeout_s):
            torchrun_meeting.check_same(mine.arguments, first.arguments, spec)
            print(f"rank {spec.rank} of {spec.world_size}: {process.describe_place('')}")  # noqa: T201
            heartbeat.at("run", 0)
            for key, number in first.numbers.items():
                replace_number(args[0], key, number)
            value = process.call_function(fn, args, {**kwargs, "files": first.files})
            heartbeat.at("end", shared_status.step)
        return value

    return process.report_end(work)


def replace_number(config: dict[str, Any], key: str, number: int) -> None:
    *groups, name = key.split(".")
    for group in groups:
        config = config[group]
    assert isinstance(config.get(name, False), int), key
    config[name] = number


def comparable(args: Any) -> dict[str, str]:
    """Return the fingerprints of what must be the same on all ranks; only rank 0 knows the run that it resumes."""
    same = [{k: v for k, v in one.items() if k != "resume"} if isinstance(one, Mapping) else one for one in args]
    return torchrun_meeting.fingerprints(same)


def variables(spec: RankSpec, interface: str | None) -> dict[str, str]:
    """Return what a rank's environment has beyond torchrun's: its GPU first, and the network interface.

    gloo takes the interface that the host's name leads to, which often is loopback. That of the way to MASTER_ADDR
    reaches the other hosts.

    Raises:
        ClusterError: this host has no such interface.
    """
    found = environment.own_gpu_first(os.environ, spec.local_rank)
    if interface:
        network.address_of(interface)
        named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        return found | {name: value for name, value in named.items() if name not in os.environ}
    if spec.nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        host = os.environ["MASTER_ADDR"]
        towards = network.interface_towards(f"tcp://{host}:{os.environ['MASTER_PORT']}")
        if towards and not any(address.startswith("127.") for address in network.interfaces()[towards]):
            found["GLOO_SOCKET_IFNAME"] = towards
    return found
