"""The main job on clusters of a real dask-gateway server, which the client reaches through its TLS proxy only."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.support import hosts
from tests.integration.support.by_hand import killed_at_work, program
from tests.integration.support.training import summary_of
from tests.support.ports import free_port

pytest.importorskip("dask_gateway_server", reason="its wheel, which holds its proxy, is for Linux on x86_64")
pytestmark = pytest.mark.integration

CONFIG = """
from dask_gateway_server.options import Integer, Options

c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.SimpleAuthenticator.password = "{password}"
c.Proxy.address, c.Proxy.tcp_address = "127.0.0.1:{http}", "127.0.0.1:{tcp}"
c.ClusterConfig.scheduler_cmd = ["{python}", "-m", "dask", "scheduler"]
c.ClusterConfig.worker_cmd = ["{python}", "-m", "dask", "worker"]
c.ClusterConfig.cluster_max_workers = 3
c.Backend.cluster_options = Options(Integer("worker_cores", 1, min=1, max=4))
c.LocalBackend.inherited_environment = ["PATH", "PYTHONPATH", "XDG_RUNTIME_DIR", "TMPDIR"]
c.LocalBackend.clusters_directory = "{folder}/clusters"
"""
"""Its own default commands, `dask-scheduler` and `dask-worker`, are gone from distributed."""


@dataclass
class Server:
    """A dask-gateway server on loopback."""

    folder: Path
    http: int
    tcp: int

    @property
    def overrides(self) -> tuple[str, ...]:
        address = (
            f"cluster.address=http://127.0.0.1:{self.http}",
            f"cluster.proxy_address=gateway://127.0.0.1:{self.tcp}",
        )
        return ("cluster=gateway", *address, "data=tiny", "model=tiny", "optimizer.lr=0.1")

    def clusters(self) -> dict[str, dict]:
        """Those that are pending or running, by name."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/api/v1/clusters/")
        request.add_header("Authorization", "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


USER, PASSWORD = "tester", "only for this test"
LOGIN = {
    "DASK_GATEWAY__AUTH__TYPE": "basic",
    "DASK_GATEWAY__AUTH__KWARGS__USERNAME": USER,
    "DASK_GATEWAY__AUTH__KWARGS__PASSWORD": PASSWORD,
}


@pytest.fixture(scope="module")
def gateway(warm_server, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gateway")
    for name in ("tmp", "clusters"):
        (folder / name).mkdir()
    http, tcp = free_port(), free_port()
    config = folder / "config.py"
    config.write_text(CONFIG.format(http=http, tcp=tcp, python=sys.executable, folder=folder, password=PASSWORD))
    server, log = Server(folder, http, tcp), folder / "server.log"
    command = (sys.executable, "-m", "dask_gateway_server", "--config", config)
    with program(*command, log=log, TMPDIR=str(folder / "tmp")):
        yield wait_until_up(server, log)


def wait_until_up(server: Server, log: Path) -> Server:
    from tests.integration.conftest import wait_for

    def is_up() -> bool:
        with contextlib.suppress(OSError):
            return server.clusters() == {}
        return False

    wait_for(is_up, "a gateway that answers")
    return server


@pytest.fixture(autouse=True)
def no_cluster_left(gateway, wait_for) -> Iterator[None]:
    yield
    wait_for(lambda: not gateway.clusters(), "no cluster left running")


@pytest.mark.slow
@pytest.mark.skipif(not hosts.allowed(), reason="needs root, to hide the workers' files from the client")
def test_the_main_job_comes_home_through_the_proxy(cli, gateway):
    """The client sees no file of the workers, as on another machine."""
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', gateway.folder / "tmp"]
    job = [sys.executable, "-m", "ddp_hydra", *gateway.overrides, "hydra.run.dir=run"]
    ended = subprocess.run(
        [*hide, *job], cwd=cli.folder, env=cli.environment(**LOGIN), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = cli.folder / "run"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {
        "metrics.jsonl",
        "checkpoints/last.pt",
        "checkpoints/best.pt",
        "logs/rank-0.log",
        "logs/rank-1.log",
    } <= files
    assert summary_of(run)["status"] == "done"


@pytest.mark.slow
def test_a_cluster_that_is_kept_serves_the_next_job_which_ends_it(cli, gateway):
    ended = cli.done(*gateway.overrides, "cluster.keep=true", "+cluster.worker_cores=2", "hydra.run.dir=one", **LOGIN)
    ((name, cluster),) = gateway.clusters().items()
    assert cluster["options"] == {"worker_cores": 2}
    (typed,) = re.findall(r"left running: the next job uses it with (\S+)", ended.stderr)
    assert typed == f"cluster.name={name}"
    cli.done(*gateway.overrides, typed, "cluster.keep=true", "hydra.run.dir=two", **LOGIN)
    assert list(gateway.clusters()) == [name]
    cli.done(*gateway.overrides, typed, "hydra.run.dir=three", **LOGIN)
    assert [summary_of(cli.folder / run)["status"] for run in ("one", "two", "three")] == ["done"] * 3


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_no_cluster_and_has_only_reached_the_gateway(cli, gateway, wait_for):
    with killed_at_work(cli, *gateway.overrides, "cluster.client_timeout_s=1", **LOGIN) as pid:
        assert reached(pid) <= {gateway.http, gateway.tcp}
        assert gateway.clusters()
    wait_for(lambda: not gateway.clusters(), "the end of the cluster, which nobody has asked for")


def reached(pid: int) -> set[int]:
    """The ports that a process talks to, its own apart."""
    found = psutil.Process(pid).net_connections("tcp")
    own = {one.laddr.port for one in found}
    return {one.raddr.port for one in found if one.raddr} - own


@pytest.mark.slow
def test_a_sweep_has_one_cluster_for_all_jobs(cli, gateway):
    def created() -> int:
        return (gateway.folder / "server.log").read_text().count("Created cluster")

    before = created()
    ended = cli.done("-m", *gateway.overrides, "dispatch.ranks=1", "seed=1,2", "hydra.sweep.dir=sweep", **LOGIN)
    assert [summary_of(cli.folder / "sweep" / number)["status"] for number in "01"] == ["done"] * 2, ended.stderr
    assert created() == before + 1


@pytest.mark.slow
def test_workers_that_the_gateway_does_not_give(cli, gateway):
    ended = cli.run(*gateway.overrides, "cluster.n_workers=9", "cluster.wait_timeout_s=1", **LOGIN)
    assert ended.returncode == 1
    assert re.search(r"[0-3] of 9 workers came in \d+ s: the gateway says that \w+ is RUNNING", ended.stderr)
    assert "would exceed resource limit of 3 workers" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["cluster.address=http://127.0.0.1:1"], "Is cluster.address the gateway's"),
        pytest.param(["cluster.name=nosuch"], "Does cluster.name=nosuch still run?", marks=pytest.mark.slow),
        (["+cluster.worker_cores=99"], "worker_cores"),
        pytest.param(["+cluster.workercores=1"], "workercores", marks=pytest.mark.slow),
    ],
)
def test_what_can_be_wrong(cli, gateway, changed, said):
    ended = cli.run(*gateway.overrides, *changed, **LOGIN)
    assert ended.returncode == 1
    assert "cluster dask_gateway.GatewayCluster could not be started" in ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_gateway_that_does_not_let_us_in(cli, gateway):
    ended = cli.run(*gateway.overrides, **LOGIN | {"DASK_GATEWAY__AUTH__KWARGS__PASSWORD": "wrong"})
    assert ended.returncode == 1
    assert "401" in ended.stderr
    assert "are you let in (cluster.auth, or gateway.auth in Dask's config)?" in ended.stderr
