"""Several hosts on one machine, with cables between them that can be cut. Linux, and root.

A host is a network namespace behind a virtual cable to a bridge, with process numbers and temporary files of its own:
it can be cut off, switched off and booted again, and it shares no file and no warm server with another. Host 0 runs
the Dask scheduler, the others run workers; the tests sit on the bridge.

    with Hosts(3) as hosts, hosts.client() as client:
        hosts.cut(1)

They may have two cables each, or IPv6 addresses only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client

from ddp_hydra.cluster.connection import workers_of

ROOT = Path(__file__).resolve().parents[3]
PREFIX = "ddph"
"""Of the names of namespaces, cables and bridges."""
TOOLS = ("ip", "unshare", "nsenter", "setsid", "mount")
INIT = """
for folder; do mount -t tmpfs tmpfs "$folder" || exit; done
mkdir -m 700 "$1/tmp" "$1/run" && echo up && trap '' CHLD && exec cat
"""
"""The first process of a host: it ends, and all others with it, when the test process does, however that ends. It
ignores the ends of its children, so that none of them stays as a zombie."""
PLUMBING = ("unshare", "nsenter", "cat")


FORWARD = """
import asyncio, sys
host, *ports = sys.argv[1:]
to = ports.pop()
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def serve(port):
    async def connected(reader, writer):
        there_reader, there_writer = await asyncio.open_connection(to, port)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)
    async with await asyncio.start_server(connected, host, port) as server:
        await server.serve_forever()
async def main():
    await asyncio.gather(*map(serve, map(int, ports)))
asyncio.run(main())
"""
"""What maps ports of one host to another, as a container runtime does."""


def ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Host:
    def __init__(self, network: int, number: int, family: int = 4) -> None:
        self.family = family
        self.namespace = f"{PREFIX}-{network}-{number}"
        self.cable = f"{PREFIX}{network}v{number}"
        self.bridge = f"{PREFIX}{network}"
        self.address = f"10.77.{network}.{10 + number}" if family == 4 else f"fd77:{network}::{10 + number}"
        self.second = f"10.78.{network}.{10 + number}"
        self.folder = _folder(network) / str(number)
        self.log = _folder(network) / f"{number}.log"
        self.life: int | None = None

    def connect(self) -> None:
        """Make the host's network, and put its cable into the bridge."""
        self.folder.mkdir(parents=True)
        ip("netns", "add", self.namespace)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("link", "set", self.cable, "master", self.bridge, "up")
        self.add_address(self.address, "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", device, "up")

    def add_address(self, address: str, device: str) -> None:
        size = ("24",) if "." in address else ("64", "nodad")
        ip("-n", self.namespace, "address", "add", "/".join((address, size[0])), "dev", device, *size[1:])

    def connect_second(self) -> None:
        cable = f"{self.cable}b"
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth1", "netns", self.namespace)
        ip("link", "set", cable, "master", f"{self.bridge}b", "up")
        self.add_address(self.second, "eth1")
        ip("-n", self.namespace, "link", "set", "eth1", "up")

    @property
    def url(self) -> str:
        return self.address if self.family == 4 else f"[{self.address}]"

    def boot(self, hidden: Iterable[Path] = ()) -> None:
        """Start its first process.

        Args:
            hidden: folders of this machine that are empty there.
        """
        stdin, self.life = os.pipe()
        told, stdout = os.pipe()
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        folders = map(str, (self.folder, *hidden))
        command = ["ip", "netns", "exec", self.namespace, *isolated, "sh", "-c", INIT, "sh", *folders]
        try:  # not a child of the tests, which count theirs
            subprocess.run(["setsid", "--fork", *command], stdin=stdin, stdout=stdout, check=True)
        finally:
            os.close(stdin)
            os.close(stdout)
        with os.fdopen(told) as lines:
            assert lines.readline() == "up\n", f"{self.namespace} does not come up"

    def start(self, *command: str, **variables: str) -> None:
        enter = ["nsenter", "--target", str(self.init()), "--mount", "--net", "--pid", f"--wd={self.folder}"]
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": f"{self.folder}/tmp", "XDG_RUNTIME_DIR": f"{self.folder}/run"}
        with self.log.open("ab") as log:
            subprocess.run(
                ["setsid", "--fork", *enter, *command],
                env={**os.environ, **own, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )

    def init(self) -> int:
        for process in self.processes():
            with contextlib.suppress(OSError):
                if re.search(r"^NSpid:.*\t1$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE):
                    return process.pid
        raise AssertionError(f"{self.namespace} is not up")

    def processes(self) -> list[psutil.Process]:
        found = []
        for pid in ip("netns", "pids", self.namespace, check=False).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def kill(self) -> None:
        deadline = time.monotonic() + 100
        while processes := self.processes():
            assert time.monotonic() < deadline, f"{processes} do not end"
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)
        if self.life is not None:
            os.close(self.life)
            self.life = None

    def remove(self) -> None:
        self.kill()
        for cable in (self.cable, f"{self.cable}b"):
            ip("link", "delete", cable, check=False)
        ip("netns", "delete", self.namespace, check=False)


class Hosts:
    """A scheduler's host and some workers' hosts.

    Args:
        n: hosts with workers; they count from 1.
        workers_each: workers on each of them.
        hidden: folders of this machine that the hosts do not see, such as that of the client's files.
        family: 4 or 6: which addresses there are.
        cables: of each host: 2 for one more, eth1, into another bridge.
        variables: of the environment of scheduler and workers.
    """

    def __init__(
        self,
        n: int,
        workers_each: int = 1,
        hidden: Iterable[Path] = (),
        family: int = 4,
        cables: int = 1,
        **variables: str,
    ) -> None:
        self.family, self.cables = family, cables
        self.n, self.workers_each, self.hidden, self.variables = n, workers_each, tuple(hidden), variables
        self.hosts: list[Host] = []
        self.hurt: set[int] = set()
        self.ended: set[int] = set()
        self.hidden_from_client: set[int] = set()
        self.started = 0

    def __enter__(self) -> Hosts:
        self.stack = contextlib.ExitStack()
        with self.stack:
            self.hosts = self.stack.enter_context(network(self.n + 1, self.family, self.cables))
            self.scheduler = f"tcp://{self.hosts[0].url}:8786"
            for number in range(self.n + 1):
                self.boot(number)
                self.start_dask(number)
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def start_dask(self, number: int) -> None:
        """Start what belongs on a host: the scheduler on host 0, else its workers."""
        if number == 0:
            where = ["--host", self.hosts[0].url, "--port", "8786", "--no-dashboard"]
            self.hosts[0].start(sys.executable, "-m", "distributed.cli.dask_scheduler", *where, **self.variables)
            return
        for _ in range(self.workers_each):
            self.add_worker(number)

    def add_worker(self, number: int, *address: str) -> None:
        """Start one more worker, with a nanny, on a host.

        Args:
            number: of the host.
            address: what `dask worker` is told of it, instead of the host's own.
        """
        self.started += 1
        host = self.hosts[number]
        at = address or ("--host", host.url)
        where = [*at, "--local-directory", str(host.folder / f"worker-{self.started}")]
        what = ["--nthreads", "1", "--no-dashboard", "--name", f"host{number}-{self.started}", self.scheduler]
        host.start(sys.executable, "-m", "distributed.cli.dask_worker", *where, *what, **self.variables)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.scheduler, timeout="100s", set_as_default=False) as client:
            if self.workers_each:
                client.wait_for_workers(self.n * self.workers_each, timeout=100)
            yield client

    def address(self, number: int) -> str:
        return self.hosts[number].address

    def number(self, worker: str) -> int:
        (number,) = (n for n, host in enumerate(self.hosts) if f"//{host.url}:" in worker)
        return number

    def processes(self, number: int) -> list[psutil.Process]:
        found = []
        for process in self.hosts[number].processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() not in PLUMBING:
                    found.append(process)
        return found

    def ranks(self, number: int) -> list[str]:
        return [title for process in self.processes(number) if (title := _title(process)).startswith("ddp_hydra rank")]

    # -- what can happen to them ---------------------------------------------------------------------------

    def cut(self, number: int) -> None:
        self.hurt.add(number)
        ip("link", "set", self.hosts[number].cable, "down")

    def mend(self, number: int) -> None:
        ip("link", "set", self.hosts[number].cable, "up")

    def part(self, one: int, other: int) -> None:
        """Let two hosts reach each other no more, and everybody else still."""
        self.hurt |= {one, other}
        for here, there in ((one, other), (other, one)):
            nobody = ["lladdr", "02:00:00:00:00:00", "nud", "permanent", "dev", "eth0"]  # packets go out and get lost
            ip("-n", self.hosts[here].namespace, "neighbour", "replace", self.hosts[there].address, *nobody)

    def hide(self, number: int) -> None:
        """Let a host and the client reach each other no more, and everybody else still."""
        self.hurt.add(number)
        self.hidden_from_client.add(number)
        ip("route", "add", "unreachable", self.hosts[number].address)

    def map_ports(self, number: int, address: str, to: int, *ports: int) -> None:
        """Give a host one more address, where ports lead to another host."""
        self.hosts[number].add_address(address, "eth0")
        self.hosts[number].start(sys.executable, "-c", FORWARD, address, *map(str, ports), self.hosts[to].address)

    def kill(self, number: int) -> None:
        self.hurt.add(number)
        self.ended.add(number)
        self.hosts[number].kill()

    def boot(self, number: int) -> None:
        """Switch a host on again. Nothing runs there."""
        self.hosts[number].boot(self.hidden)

    def terminate(self, number: int) -> None:
        """Send SIGTERM to all processes of a host, as a preemption does."""
        self.hurt.add(number)
        self.ended.add(number)
        for process in self.processes(number):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    def heal(self) -> None:
        """Make all as it was: cables, neighbours, scheduler, workers. A host whose workers do not answer is booted."""
        while self.hidden_from_client:
            ip("route", "delete", "unreachable", self.hosts[self.hidden_from_client.pop()].address)
        for number in self.hurt:
            self.mend(number)
            ip("-n", self.hosts[number].namespace, "neighbour", "flush", "dev", "eth0", "nud", "permanent")
        if 0 in self.hurt:
            sick = set(range(self.n + 1))
        elif self.hurt:
            with Client(self.scheduler, timeout="100s", set_as_default=False) as client:
                sick = self.ended | {number for number in self.hurt - self.ended if not self.is_well(number, client)}
        else:
            return
        for number in sorted(sick):
            self.kill(number)
            self.boot(number)
            self.start_dask(number)
        self.hurt.clear()
        self.ended.clear()
        with self.client():
            pass

    def is_well(self, number: int, client: Client) -> bool:
        workers = [worker for worker in workers_of(client) if self.number(worker) == number]
        answers = client.sync(client._run, os.getpid, workers=workers, on_error="ignore", callback_timeout=2)
        return len(answers) == self.workers_each and not self.ranks(number)


@contextlib.contextmanager
def network(n: int, family: int = 4, cables: int = 1) -> Iterator[list[Host]]:
    """Hosts that run nothing yet, on a bridge of their own at 10.77.<network>.1 or fd77:<network>::1."""
    sweep()
    with contextlib.ExitStack() as stack:
        number = next(number for number in range(1, 255) if _take(number, stack))
        stack.callback(_remove, number)
        for bridge in [f"{PREFIX}{number}", f"{PREFIX}{number}b"][:cables]:
            ip("link", "add", bridge, "type", "bridge")
            ip("link", "set", bridge, "up")
        own = [f"10.77.{number}.1/24"] if family == 4 else [f"fd77:{number}::1/64", "nodad"]
        ip("address", "add", *own, "dev", f"{PREFIX}{number}")
        hosts = [Host(number, count, family) for count in range(n)]
        for host in hosts:
            stack.callback(host.remove)
            host.connect()
            if cables == 2:
                host.connect_second()
        yield hosts


def sweep() -> None:
    """Remove networks whose owner was killed."""
    names = " ".join([*(path.name for path in Path("/sys/class/net").iterdir()), ip("netns", "list")])
    for number in {int(found) for found in re.findall(rf"\b{PREFIX}-?(\d+)\b", names)}:
        with contextlib.ExitStack() as stack:
            if _take(number, stack):
                _remove(number)


def _take(number: int, stack: contextlib.ExitStack) -> bool:
    """Own a network's number, unless it is owned; the kernel takes it back from a process that ends."""
    owner = socket.socket(socket.AF_UNIX)
    try:
        owner.bind(f"\0{PREFIX}-{number}")
    except OSError:
        owner.close()
        return False
    stack.callback(owner.close)
    return True


def _remove(number: int) -> None:
    for count in map(int, re.findall(rf"\b{PREFIX}-{number}-(\d+)\b", ip("netns", "list"))):
        Host(number, count).remove()
    for bridge in (f"{PREFIX}{number}", f"{PREFIX}{number}b"):
        ip("link", "delete", bridge, check=False)
    ip("route", "flush", "type", "unreachable", "root", f"10.77.{number}.0/24", check=False)
    shutil.rmtree(_folder(number), ignore_errors=True)


def _folder(network: int) -> Path:
    """Short, for the name of a socket has 107 bytes, and known, so that what was left can be found."""
    return Path(f"/run/{PREFIX}{network}")


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@functools.cache
def allowed() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        return False
    try:
        with network(1) as (host,):
            host.boot()
            return True
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False


needs_hosts = pytest.mark.skipif(not allowed(), reason="needs root and network namespaces (ip netns)")
