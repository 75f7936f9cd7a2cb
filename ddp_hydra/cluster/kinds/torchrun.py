"""`cluster=torchrun`: torchrun, or another launcher with its variables, starts the workers, one on each host.

The process of RANK 0 has scheduler, client and the first worker in it, as `cluster=local` has; see `rank/torchrun.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
from omegaconf import DictConfig

from ddp_hydra.cluster.connection import QUIET, await_scheduler, load
from ddp_hydra.cluster.kinds.local import CONNECT_S, Local, make_security
from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import environment, torchrun
from ddp_hydra.rank.torchrun import Hosts, ProcessPlace

LOOPBACK = ("127.", "::1", "localhost")


class Torchrun(Local):
    """Starts `distributed.LocalCluster` with one worker, and tells the other hosts where its scheduler is."""

    hint = "what torchrun says on the other hosts may tell why"

    def __init__(self, cfg: DictConfig, logs: Path | None = None) -> None:
        super().__init__(cfg, logs)
        self.target = "distributed.LocalCluster"
        self.trusts_network = bool(self.arguments.pop("trust_network", False))
        self.arguments |= {"processes": False, "threads_per_worker": 1, "memory_limit": 0}
        self.arguments["preload"] = "ddp_hydra.rank.dask_preload"

    def check(self) -> None:
        typed = " ".join(sys.argv[1:])
        place = torchrun.find_place()
        if place is None:
            names = [name for name in torchrun.NEEDED if name not in os.environ]
            are_not = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not"
            raise ClusterError(
                f"cluster=torchrun runs in the processes that torchrun starts, but {are_not} set here: type "
                f"torchrun --standalone --nproc-per-node 2 -m ddp_hydra {typed}"
            )
        if place.rank:
            raise ClusterError(
                f"this is rank {place.rank} of {place.world_size} that torchrun has started, and only rank 0 runs a "
                "job, on all of them: from Python, leave the others out, or type torchrun ... -m ddp_hydra"
            )
        if self.n_workers not in (None, place.hosts):
            raise ClusterError(
                f"cluster.n_workers={self.n_workers}, but torchrun has started one worker on each of {place.hosts} "
                "hosts: leave it out, or give null where an experiment= has it, and give torchrun --nnodes"
            )
        super().check()
        self.n_workers, self.hosts = 1, place.hosts
        if place.hosts > 1:
            self.secure()
        self.arguments["host"] = self.arguments.get("host") or (own_address() if place.hosts > 1 else "127.0.0.1")

    @property
    def expected(self) -> int:
        return self.hosts

    def secure(self) -> None:
        load()
        given = self.arguments.get("security")
        if isinstance(given, bool):
            raise ClusterError(
                f"cluster.security={given}: a certificate that Dask makes stays in this process: for several hosts "
                f"give {NEEDS}"
            )
        security = make_security(given)
        if all(security.get_tls_config_for_role(role).get("cert") for role in ("scheduler", "worker", "client")):
            self.arguments |= {"security": security, "protocol": "tls://"}
        elif self.trusts_network:
            self.arguments["protocol"] = "tcp://"
        else:
            raise ClusterError(
                f"cluster=torchrun on several hosts: whoever reaches their ports could run code as you: give {NEEDS}"
            )

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        with super().open() as cluster:
            Hosts.say(scheduler=cluster.scheduler_address)
            yield cluster


NEEDS = (
    "a certificate and its key in files that all hosts have, by 'cluster.security={tls_ca_file: …}' or in Dask's own "
    "config (docs/clusters.md#torchrun); or, in a network of your own, cluster.trust_network=true"
)


def own_address() -> str:
    """Return the address of this host on the way to MASTER_ADDR, or an address of it that others can reach."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(target)  # sends nothing
        own = str(datagrams.getsockname()[0])
    if own.startswith(LOOPBACK) and not host.startswith(LOOPBACK):  # a name that means this host only here
        others = [one for addresses in environment.interfaces().values() for one in addresses]
        return next((one for one in others if not one.startswith(LOOPBACK)), own)
    return own


# -- the first process of another host ---------------------------------------------------------------------


def work_on_host(place: ProcessPlace, compose: Callable[[], DictConfig]) -> int:
    """Run this host's worker whenever there is a scheduler; return the exit status of RANK 0's process."""
    manager: Torchrun | None = None
    for line in Hosts.lines():
        if "exit" in line:
            return int(line["exit"])
        if "run_dir" in line:
            torchrun.remember(str(line["run_dir"]), int(line["hosts"]))
        elif "scheduler" in line:
            if manager is None:
                manager = Torchrun(compose())
                manager.secure()
            if asyncio.run(work(str(line["scheduler"]), manager.arguments)):
                return 130
    raise ClusterError(f"RANK {place.rank}: torchrun's store is gone, and the process of RANK 0 with it")


async def work(scheduler: str, arguments: Any) -> bool:
    """Be a worker until the scheduler closes it; return whether a signal has ended it."""
    if not scheduler.startswith(arguments["protocol"]):
        raise ClusterError(f"torchrun's store names the scheduler {scheduler}, not one of {arguments['protocol']}")
    from distributed import Worker

    security, was_told = arguments.get("security"), asyncio.Event()
    await_scheduler(scheduler, security, CONNECT_S)  # a worker would wait for ever
    with dask.config.set(QUIET):
        async with Worker(scheduler, nthreads=1, memory_limit=0, security=security, dashboard=False) as worker:

            def on_signal() -> None:
                if not was_told.is_set():
                    was_told.set()
                    closing.append(asyncio.ensure_future(worker.close(reason="signal")))

            closing: list[Any] = []
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, on_signal)
            await worker.finished()
            await asyncio.gather(*closing)
    return was_told.is_set()
