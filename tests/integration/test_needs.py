"""Clusters that somebody else has set up: a scheduler without ddp_hydra, workers with too little or something else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed import Client

import ddp_hydra
from ddp_hydra import dispatch
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.errors import ClusterError

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """All that is installed here but torch and ddp_hydra."""
    folder = tmp_path_factory.mktemp("bare")
    for site in filter(lambda path: path.endswith(("site-packages", "dist-packages")), sys.path):
        for path in Path(site).iterdir():
            if not path.name.startswith(("torch", "ddp_hydra", "__editable__", "_")) and path.suffix != ".pth":
                with contextlib.suppress(FileExistsError):
                    (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def other(bare, tmp_path_factory) -> Path:
    """What another version of both leaves, over the rest."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "ddp_hydra").mkdir()
    (folder / "ddp_hydra" / "__init__.py").write_text('__version__ = "0.0.9"\n')
    (folder / "torch-2.0.0.dist-info").mkdir()
    (folder / "torch-2.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    return folder


@contextlib.contextmanager
def process(program: str, *arguments: str, path: tuple[Path, ...], folder: Path) -> Iterator[None]:
    """A program of Dask's in a folder of its own; without the usual places for packages, but for the full one."""
    isolated = () if path == (ROOT,) else ("-S",)
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, *isolated, "-m", f"distributed.cli.{program}", *arguments, "--no-dashboard"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            stdout=log,
            stderr=log,
        ) as running,
    ):
        try:
            yield
        finally:
            running.terminate()


Add = Callable[..., contextlib.AbstractContextManager[None]]


@pytest.fixture(scope="module")
def cluster(warm_server, bare, tmp_path_factory) -> Iterator[tuple[Client, Add]]:
    """A scheduler without ddp_hydra, and two workers that have it all."""
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"

    def add(*path: Path, name: str) -> contextlib.AbstractContextManager[None]:
        what = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--name", name]
        return process("dask_worker", *what, path=path, folder=folder)

    where = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file)]
    with (
        process("dask_scheduler", *where, path=(bare,), folder=folder),
        add(ROOT, name="one"),
        add(ROOT, name="two"),
        Client(scheduler_file=str(file), timeout="100s", set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=100)
        yield client, add


def addresses(client: Client) -> dict[str, str]:
    return {worker["name"]: address for address, worker in workers_of(client).items()}


def who_am_i() -> int:
    return dist.get_rank()


@pytest.mark.slow
def test_a_scheduler_needs_no_ddp_hydra(cluster, wait_for):
    client, _ = cluster

    def has_it(dask_scheduler):
        import importlib.util

        return importlib.util.find_spec("ddp_hydra") is not None, dict(dask_scheduler._ddp_hydra_reservations)

    assert dispatch.run(client, who_am_i) == [0, 1]
    assert client.run_on_scheduler(has_it) == (False, {})


@pytest.mark.slow
def test_workers_with_too_little_or_something_else_are_named_before_the_job(cluster, bare, other):
    client, add = cluster
    with add(bare, name="bare"), add(other, bare, name="other"):
        client.wait_for_workers(4, timeout=100)
        with pytest.raises(ClusterError) as caught:
            dispatch.run(client, who_am_i)
        names = addresses(client)
    assert f"\n  {names['bare']}: Python 3." in str(caught.value)
    assert "no ddp_hydra, no torch" in str(caught.value)
    assert "ddp_hydra 0.0.9, torch 2.0.0" in str(caught.value)
    assert f"\n  {names['one']}, {names['two']}: " in str(caught.value).replace(
        f"{names['two']}, {names['one']}", f"{names['one']}, {names['two']}"
    )
    assert f"pip install ddp-hydra=={ddp_hydra.__version__}" in str(caught.value)
    assert "pip install torch==" in str(caught.value)


@pytest.mark.slow
def test_packages_that_a_job_asks_for_are_checked_on_the_workers(cluster, gang, wait_for):
    client, _ = cluster
    wait_for(lambda: len(addresses(client)) == 2, "the end of the others")
    assert gang(client, pip=["torch>=2", "distributed"]).run(who_am_i) == [0, 1]
    with pytest.raises(ClusterError, match=r"not-there>=1 \(not installed\)\ntype there: pip install 'not-there>=1'"):
        gang(client, pip=["torch>=2", "not-there>=1"]).run(who_am_i)
