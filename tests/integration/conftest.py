"""Real processes for these tests: Dask clusters with gangs of ranks on them, and the command line.

A warm server of their own serves all of them, in the runtime folder of the tests, so that nothing else on the machine
is touched or counted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client

from ddp_hydra.dispatch import Gang
from ddp_hydra.record import Record
from tests.integration.support.warm_commands import WarmCommands
from tests.support.s3_server import png, s3  # noqa: F401 (fixtures)
from tests.support.warm_server import PATIENCE_S, alive, local_client, shared_client, wait_for

ROOT = Path(__file__).resolve().parents[2]
FORKED = {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver"}
"""For commands that nobody kills: those leave a folder behind."""


@pytest.fixture(name="wait_for", scope="session")
def wait_for_function():
    return wait_for


@pytest.fixture(name="alive", scope="session")
def alive_function():
    return alive


@pytest.fixture(scope="session", autouse=True)
def started(warm_server) -> None:
    """All of these tests have the warm server."""


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """On a busy machine, ranks that were stopped may take long to end; the client of these tests waits for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_hydra.dispatch.attempt.END_S", PATIENCE_S)
        yield


@pytest.fixture(autouse=True)
def no_rank_left(ranks_alive) -> Iterator[None]:
    """No test leaves a rank behind."""
    yield
    wait_for(lambda: not ranks_alive(), "no rank left running")


@pytest.fixture(autouse=True, scope="module")
def functions_travel_by_value(request) -> Iterator[None]:
    """Test functions are shipped whole, as those of a script or notebook are: ranks import no test module."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


# -- clusters ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def client4(warm_server) -> Iterator[Client]:
    with shared_client(4) as client:
        yield client


@pytest.fixture
def fresh_client(warm_server) -> Iterator[Client]:
    """Two workers that a test may kill."""
    with local_client(2) as client:
        yield client


@dataclass
class Heard:
    """What a gang says, by rank."""

    records: list[Record] = field(default_factory=list)

    def __call__(self, record: Record) -> None:
        self.records.append(record)

    def texts(self, name: str) -> dict[int, str]:
        """The text that each rank sent last under a name."""
        return {r.rank: r.data.text for r in self.records if r.kind == "text" and r.data.name == name}

    def output(self, rank: int) -> str:
        """What a rank wrote to stdout and stderr."""
        return "".join(r.data.text for r in self.records if r.kind == "log" and r.rank == rank)

    def pids(self) -> list[int]:
        """The processes of the ranks, where they told them."""
        return [int(pid) for pid in self.texts("pid").values()]


@pytest.fixture(scope="session")
def new_heard() -> type[Heard]:
    return Heard


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def gang(heard) -> Callable[..., Gang]:
    """Make a gang whose records are in `heard`."""

    def make(client: Client, **settings: Any) -> Gang:
        return Gang(client, **{"on_record": heard, **settings})

    return make


# -- the project space and the command line ----------------------------------------------------------------


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """A copy of the project space, with a tiny model and data set beside the real ones."""
    folder = tmp_path_factory.mktemp("project")
    for source in (ROOT, Path(__file__).parent / "project"):
        for part in ("conf", "models", "data"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / part, folder / part, ignore=ignored, dirs_exist_ok=True)
    return folder


@contextlib.contextmanager
def project_at(folder: Path) -> Iterator[None]:
    """Have commands of this process find the config, models and data of a project space."""

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in ("models", "data")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_HYDRA_PROJECT", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        for name in imported():
            patch.delitem(sys.modules, name)
        yield
        for name in imported():
            del sys.modules[name]


@pytest.fixture
def project_here(project) -> Iterator[None]:
    with project_at(project):
        yield


@dataclass
class CommandLine:
    """`python -m ddp_hydra`, in a folder of its own."""

    folder: Path
    project: Path
    warm: WarmCommands

    def environment(self, **variables: str) -> dict[str, str]:
        home = {"HOME": str(self.folder / "home"), "DDP_HYDRA_PROJECT": str(self.project), "COLUMNS": "200"}
        # A cluster of this process sets it, and Dask then wipes the environment that /proc shows of a command.
        inherited = {name: value for name, value in os.environ.items() if name != "__DASK_PARENT_PID"}
        return {**inherited, **home, **variables}

    def start(self, *arguments: str, module: str = "ddp_hydra", **variables: str) -> subprocess.Popen[str]:
        """Start it, as the leader of its own process group."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *arguments: str, module: str = "ddp_hydra", timeout_s: float = 400, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end. Workers of a local cluster are forked, which takes less time than spawning them.

        So is the command itself, unless it is another program's or a variable is for Python's start.
        """
        own_cluster = not any(word.startswith("cluster=") for word in arguments)
        if own_cluster:
            variables = FORKED | variables
        if module == "ddp_hydra" and not any(name.startswith("PYTHON") for name in variables):
            sweeps = any(word == "-m" or word.startswith("hparams_search=") for word in arguments)
            fork_workers = own_cluster and not sweeps  # a sweep forks its clusters' processes itself
            environment = self.environment(**variables)
            return self.warm.run(module, arguments, self.folder, environment, timeout_s, fork_workers)
        process = self.start(*arguments, module=module, **variables)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def done(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end, which has to be a good one."""
        ended = self.run(*arguments, **options)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended


@pytest.fixture(scope="session")
def warm_commands(warm_server, private_folders) -> Iterator[WarmCommands]:
    commands = WarmCommands(private_folders[0].parent)
    yield commands
    commands.close()


@pytest.fixture
def cli(tmp_path, project, warm_commands) -> CommandLine:
    return CommandLine(tmp_path, project, warm_commands)


@pytest.fixture(scope="module")
def module_cli(tmp_path_factory, project, warm_commands) -> CommandLine:
    """For runs that several tests look at."""
    return CommandLine(tmp_path_factory.mktemp("cli"), project, warm_commands)
