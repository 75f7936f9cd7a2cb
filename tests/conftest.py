"""What every test is held to: it leaves this process and this machine as it found them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.support.s3_server import session_s3 as session_s3
from tests.support.warm_server import client2, on_two_ranks, ranks_alive, warm_server, workers_idle  # noqa: F401  fixtures

for profile, examples in (("few", 10), ("some", 25), ("many", 200)):  # --hypothesis-profile=
    settings.register_profile(
        profile, deadline=None, database=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("some")
set_hypothesis_home_dir(Path(__file__).parents[1] / ".pytest_cache" / "hypothesis")

GRACE_S = 30.0
"""What is on its way out when a test ends has so long to be gone."""
LIBRARY_VARIABLES = ("PYTEST_", "KMP_", "RAY_CLIENT_MODE", "TF2_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
"""Set by pytest, scikit-learn, Ray, TensorBoard and torch, when they are imported."""
LIBRARY_THREADS = ("Dask-", "TCP-Executor", "asyncio_", "pytest_timeout")
"""Pools that live as long as the process that first used them."""
LIBRARY_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
LIBRARY_FILES = ("dask-scratch-space", "torchinductor_", ".tensorboard-info", ".ses")  # the last one: onnxruntime
LEASE = ".lease"
"""A worker that is killed leaves it, unlocked; whoever takes one next removes it."""
IMPORT_FOLDER = "ddp_hydra-import-"
"""A command that is killed leaves it, until the next one removes it. One that ends removes its own, which
tests/integration/test_job.py looks at."""


@pytest.fixture(scope="session", autouse=True)
def private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Temporary files and sockets of the tests lie apart, so that what is left there is theirs."""
    tmp_path_factory.getbasetemp()  # stays where pytest keeps it
    get_temp_dir()  # of Python's fork server, which removes it when this process ends
    root = Path(tempfile.mkdtemp(prefix="ddp-"))  # short, for the name of a socket has 107 bytes
    before = {name: os.environ.get(name) for name in ("TMPDIR", "XDG_RUNTIME_DIR", "DDP_HYDRA_KEEP_WARM_S")}
    temporary, runtime = root / "tmp", root / "run"
    for name, folder in (("TMPDIR", temporary), ("XDG_RUNTIME_DIR", runtime)):
        folder.mkdir(mode=0o700)
        os.environ[name] = str(folder)
    tempfile.tempdir = None  # read TMPDIR again
    os.environ["DDP_HYDRA_KEEP_WARM_S"] = "0"  # no fork server outlives its job, but where a test wants it
    yield temporary, runtime / "ddp_hydra"
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = None
    shutil.rmtree(root, ignore_errors=True)  # a process that was killed may still remove its own files there


@pytest.fixture(scope="session", autouse=True)
def interrupts_heard() -> None:
    """Ctrl-C and a closed terminal mean something to what the tests start, also in the background and under nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """No test cuts the power, so none needs its files to be on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The tensors of tests are small, and several processes of tests share the cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """A client of a server that is gone (Ray) may find Dask at its port: what Tornado says of it is no record."""

    def is_ours(record: logging.LogRecord) -> bool:
        return not record.name.startswith("tornado.")

    caplog.handler.addFilter(is_ours)
    yield caplog
    caplog.handler.removeFilter(is_ours)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What runs in the background catches the signals of this process for good; a fork may lose one that it catches."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def hydra_as_before() -> Iterator[None]:
    """Hydra's config and logging of a command that ran in this process end with its test."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    yield
    if "hydra.core.hydra_config" in sys.modules:
        sys.modules["hydra.core.hydra_config"].HydraConfig.instance().cfg = None
    logging.root.setLevel(level)
    for handler in [one for one in logging.root.handlers if one not in handlers]:
        logging.root.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def nothing_leaks(private_folders: tuple[Path, Path]) -> Iterator[None]:
    """Fail a test that leaves variables, threads, processes, a process group, sockets or files behind."""
    before = Snapshot.take(*private_folders)
    yield
    deadline = time.monotonic() + GRACE_S
    while (found := before.changes(*private_folders)) and time.monotonic() < deadline:
        gc.collect()  # frames of an error that was raised may be part of a cycle
        time.sleep(0.02)
    if found:
        before.put_back()
        pytest.fail("left behind by this test: " + "; ".join(found), pytrace=False)


@dataclass(frozen=True)
class Snapshot:
    """What a test may not change."""

    variables: dict[str, str]
    threads: set[threading.Thread]
    processes: set[psutil.Process]
    files: set[Path]

    @classmethod
    def take(cls, *folders: Path) -> Snapshot:
        """Look around."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)}
        files: set[Path] = set()
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):  # a fork server that ends removes its folder
                files |= set(folder.iterdir())
        return cls(variables, set(threading.enumerate()), children(), files)

    def changes(self, *folders: Path) -> list[str]:
        """Say what there is now that was not there before."""
        now = Snapshot.take(*folders)
        names = {name for name, _ in self.variables.items() ^ now.variables.items()}
        threads = [
            thread.name
            for thread in now.threads - self.threads
            if not thread.daemon and not thread.name.startswith(LIBRARY_THREADS)
        ]
        processes = [said for process in now.processes - self.processes if (said := describe(process))]
        files = [
            path.name
            for path in now.files - self.files
            if not path.name.startswith((*LIBRARY_FILES, IMPORT_FOLDER)) and path.suffix != LEASE
        ]
        found = {"variables": names, "threads": threads, "processes": processes, "files": files}
        return [f"{what} {sorted(which)}" for what, which in found.items() if which] + list(states())

    def put_back(self) -> None:
        """Spare the tests that follow."""
        for name in os.environ.keys() - self.variables.keys():
            if not name.startswith(LIBRARY_VARIABLES):
                del os.environ[name]
        os.environ.update(self.variables)
        for process in children() - self.processes:
            if describe(process):
                process.kill()
                process.wait()
        if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
            sys.modules["torch.distributed"].destroy_process_group()
        if "ddp_hydra.results" in sys.modules:
            sys.modules["ddp_hydra.results"].connect(None)


def children() -> set[psutil.Process]:
    """The child processes of this one. psutil would look at all processes of the machine, twice for each test."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return set(psutil.Process().children())
    found = set()
    for thread in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in thread.read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.add(psutil.Process(int(pid)))
    return found


def describe(process: psutil.Process) -> str:
    """Name a child process; nothing for one that belongs to Python, or is gone."""
    try:
        command = " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""
    return "" if any(ours in command for ours in LIBRARY_PROCESSES) else f"{process.pid} {command:.80}"


def states() -> Iterator[str]:
    """Name what modules keep for the whole process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield "a process group"
    results = sys.modules.get("ddp_hydra.results")
    if results is not None and results._process.sender is not None:
        yield "a connected sender (results.connect)"


def pytest_configure() -> None:
    """Collect no garbage while all modules are imported: it would take a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules from now on."""
    gc.freeze()
    gc.enable()


LONG = ("tests/integration/", "tests/properties/", "tests/docs/test_recipes", "tests/test_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that short ones fill the end when several processes share the tests."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if "train" in item.fixturenames:
            item.add_marker("medium")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
