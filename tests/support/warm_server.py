"""The warm server of tests that start ranks, and clusters on it: one for a session, whichever tests are the first."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil
import pytest

if TYPE_CHECKING:
    from distributed import Client, Worker

ROOT = Path(__file__).resolve().parents[2]


PATIENCE_S = 100.0
"""How long to wait for what happens soon on a quiet machine: a busy one takes its time."""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll until something is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s} s still not: {what}"
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to notice does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def warm_server(private_folders) -> Iterator[psutil.Process]:
    """The warm server of these tests, in an environment without anybody's settings."""
    from ddp_hydra.rank import fork_client

    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "DASK_", "HYDRA_", "DDP_HYDRA_")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("DDP_HYDRA_KEEP_WARM_S", "0")
        fork_client.release()
        with _started(fork_client.socket_path()) as process:
            fork_client.hold()
            yield psutil.Process(process.pid)
            fork_client.release()
        assert not fork_client.socket_path().exists()


@contextlib.contextmanager
def _started(address: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server as `fork_client` does, but with the tests' module."""
    from ddp_hydra.rank import environment

    address.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(128)
        command = [sys.executable, "-m", "tests.support.fork_server", str(listener.fileno()), str(address)]
        process = subprocess.Popen(
            command, cwd="/", env=environment.of_server(), pass_fds=[listener.fileno()], start_new_session=True
        )
    yield process
    process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def ranks_alive(warm_server) -> Callable[[], list[str]]:
    """The titles of the ranks that these tests have running."""

    def titles() -> list[str]:
        found = []
        for process in warm_server.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and " rank " in title:
                    found.append(title)
        return found

    return titles


@contextlib.contextmanager
def local_client(n_workers: int) -> Iterator[Client]:
    """Yield a client of a new cluster. Most tests start none, so Dask is imported here."""
    import dask
    from distributed import Client, LocalCluster

    from ddp_hydra.cluster.connection import QUIET

    with (
        patch.dict(os.environ),  # Dask leaves there what it sets for its workers
        dask.config.set({**QUIET, "distributed.worker.multiprocessing-method": "forkserver"}),  # imports Dask once
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            env=dict(os.environ),
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        yield client


@pytest.fixture(scope="session")
def client2(warm_server) -> Iterator[Client]:
    with shared_client(2) as client:
        yield client


@contextlib.contextmanager
def shared_client(n_workers: int) -> Iterator[Client]:
    """Yield a client of a cluster that a session's tests share."""
    with local_client(n_workers) as client:
        _shared.append(client)
        yield client
        _shared.remove(client)


_shared: list[Client] = []
IDLE_S = PATIENCE_S
"""Seconds that the workers of a shared cluster may take to end what a test has left there."""


@pytest.fixture(autouse=True)
def workers_idle(request) -> Iterator[None]:
    """Fail a test that leaves a task on a shared cluster: it would keep a worker's only thread from the next test."""
    yield
    if request.node.get_closest_marker("integration"):
        for client in _shared:
            deadline = time.monotonic() + IDLE_S
            while (
                left := {key for keys in client.run(_tasks).values() for key in keys}
            ) and deadline > time.monotonic():
                time.sleep(0.05)
            assert not left, f"left on the workers by this test: {sorted(left)}"


def _tasks(dask_worker: Worker) -> list[str]:
    """On a worker: the tasks that it runs, or will; a cancelled one runs until its thread is free."""
    state = dask_worker.state
    return [str(task.key) for task in (*state.executing, *state.long_running, *state.ready, *state.constrained)]


@pytest.fixture
def on_two_ranks(client2, request) -> Iterator[Callable[..., list[Any]]]:
    """Run a function of the test's module on two ranks, and return what each of them returns."""
    import cloudpickle

    from ddp_hydra import dispatch

    cloudpickle.register_pickle_by_value(request.module)
    yield partial(dispatch.run, client2)
    cloudpickle.unregister_pickle_by_value(request.module)
