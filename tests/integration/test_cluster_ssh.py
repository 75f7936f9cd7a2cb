"""SSHCluster over a real SSH connection, on loopback."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import psutil
import pytest

from tests.integration.conftest import wait_for
from tests.integration.support.by_hand import killed_at_work, program
from tests.integration.support.training import summary_of

pytestmark = pytest.mark.integration

TINY = ("cluster=ssh", "data=tiny", "model=tiny", "optimizer.lr=0.1")
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def server(warm_server, tmp_path_factory) -> Iterator[Path]:
    """The folder of an SSH server, with its port, its key and the user's."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user", "stranger"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(folder / name)
        key.write_public_key(folder / f"{name}.pub")
    command = (sys.executable, Path(__file__).with_name("support") / "ssh_server.py", folder)
    with program(*command, log=folder / "server.log") as process:
        (folder / "pid").write_text(str(process.pid))
        wait_for((folder / "port").exists, "an SSH server that listens")
        port = (folder / "port").read_text()
        public = (folder / "host.pub").read_text()
        (folder / "known_hosts").write_text(f"[{HOST}]:{port} {public}")
        yield folder


def login(server: Path, hosts: int, key: str = "user") -> tuple[str, ...]:
    connect = {"port": int((server / "port").read_text()), "known_hosts": str(server / "known_hosts")}
    connect |= {"client_keys": f"[{server / key}]", "username": "anybody"}
    options = ",".join(f"{name}:{value}" for name, value in connect.items())
    return (
        f"cluster.hosts=[{','.join([HOST] * hosts)}]",
        f"cluster.connect_options={{{options}}}",
        f"+cluster.worker_options.host={HOST}",
        f"+cluster.scheduler_options.host={HOST}",
    )


@pytest.fixture(autouse=True)
def nothing_left(server) -> Iterator[None]:
    yield
    wait_for(lambda: not running(server), "the end of all that ran on the hosts")


def running(server: Path) -> list[psutil.Process]:
    return psutil.Process(int((server / "pid").read_text())).children(recursive=True)


@pytest.mark.slow
def test_the_main_job_on_hosts_over_ssh(cli, server):
    cli.done(*TINY, *login(server, hosts=3), "hydra.run.dir=run")
    summary = summary_of(cli.folder / "run")
    assert (summary["status"], summary["world_size"]) == ("done", 2)
    assert (cli.folder / "run" / "checkpoints" / "last.pt").exists()


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nothing_running_on_the_hosts(cli, server):
    with killed_at_work(cli, *TINY, *login(server, hosts=2), "cluster.client_timeout_s=1"):
        assert running(server)


def test_a_key_that_is_not_let_in(cli, server):
    ended = cli.run(*TINY, *login(server, hosts=2, key="stranger"))
    assert ended.returncode == 1
    assert re.search(
        r"SSHCluster could not be started: Permission denied.*has to work without a password", ended.stderr
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_python_that_the_hosts_do_not_have(cli, server):
    ended = cli.run(*TINY, *login(server, hosts=2), "cluster.remote_python=/nowhere/python")
    assert ended.returncode == 1
    assert "cluster.remote_python to have ddp_hydra on every host" in ended.stderr
    assert "/nowhere/python" in ended.stderr
