"""Fork servers that stay warm for the next command, and end by themselves.

Most tests have a torch that is imported at once; the last one trains twice with the real one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hydra import dispatch
from ddp_hydra.cli import commands
from ddp_hydra.heartbeat import SharedStatus
from ddp_hydra.rank import fork_client, lazy_dynamo
from tests.support.warm_server import PATIENCE_S

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
FAILS = b'{"title": "a rank that fails at once", "keep_warm_s": %g}\n'


@pytest.fixture
def runtime(monkeypatch, alive, wait_for) -> Iterator[Path]:
    """A runtime folder of its own; at the end, no server may be left that does not end when it is asked to."""
    with tempfile.TemporaryDirectory(prefix="w-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        pids = [status["pid"] for address in commands.server_sockets() if (status := fork_client.ask(address, "stop"))]
        wait_for(lambda: not any(map(alive, pids)), "the end of the fork servers")


@pytest.fixture
def keep_warm(runtime, monkeypatch) -> None:
    """Servers that stay for the next gang."""
    monkeypatch.setenv("DDP_HYDRA_KEEP_WARM_S", "60")


@pytest.fixture
def library(runtime, tmp_path, monkeypatch) -> Path:
    """A torch that notes when it is imported, in the place of the real one."""
    library = tmp_path / "library" / "torch.py"
    library.parent.mkdir()
    library.write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('first\\n')\n")
    monkeypatch.setenv("PYTHONPATH", f"{library.parent}{os.pathsep}{ROOT}")
    return library


def fork(keep_warm_s: float) -> None:
    with fork_client.connect() as server, server.makefile("rb") as lines:
        server.sendall(FAILS % keep_warm_s)
        assert "pid" in json.loads(lines.readline())
        assert "exit" in json.loads(lines.readline())


def status() -> dict[str, Any] | None:
    """What the server says of itself; None where there is none."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := fork_client.ask(fork_client.socket_path(), "status")) == {} and time.monotonic() < deadline:
        pass  # it has no time for an answer on a busy machine
    return found


def test_it_stays_after_its_last_rank_and_serves_whoever_comes_next(library, tmp_path, capsys):
    fork(60)
    first = status()
    assert first is not None
    assert 50 < first["ends_in_s"] <= 60
    fork(60)
    second = status()
    assert second is not None
    assert second["pid"] == first["pid"]
    assert (tmp_path / "imports").read_text() == "first\n"
    with fork_client.connect():
        commands.warm([])
    commands.warm(["stop"])
    commands.warm([])
    used, idle, ended, none = capsys.readouterr().out.splitlines()
    about = rf"process {first['pid']}: {{}}, \d+ s old, \d+ MiB, {re.escape(sys.executable)}"
    assert re.fullmatch(about.format("in use, 0 ranks"), used)
    assert re.fullmatch(about.format(r"idle, ends in \d+ s"), idle)
    assert (ended, none) == ("  has ended", "no fork server runs")


def test_it_belongs_to_no_command(library, tmp_path, monkeypatch, wait_for):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        fork(60)
    found = status()
    assert found is not None
    process = Path(f"/proc/{found['pid']}")
    if not process.exists():
        pytest.skip("looks into /proc")
    assert (process / "cwd").readlink() == Path("/")

    def fds() -> dict[int, str]:
        found = {}
        for fd in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed by now
                found[int(fd.name)] = str(fd.readlink())
        return found

    def others() -> list[str]:
        return [target for fd, target in fds().items() if fd > 2 and not target.startswith(("socket:", "anon_inode:"))]

    assert [fds()[fd] for fd in (0, 1, 2)] == [os.devnull] * 3
    wait_for(lambda: not others(), "an end of its looks at the memory")
    session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
    assert session == found["pid"] != os.getsid(0)


@pytest.mark.parametrize("end", ["time", "SIGTERM", "no socket"])
def test_it_ends_by_itself(library, alive, wait_for, end):
    fork(0.3 if end == "time" else 60)
    found = status()
    if found is not None:  # a slow machine takes longer than its time
        if end == "SIGTERM":
            os.kill(found["pid"], signal.SIGTERM)
        elif end == "no socket":
            fork_client.socket_path().unlink()
        wait_for(lambda: not alive(found["pid"]), "the end of the server")
    wait_for(lambda: not fork_client.runtime_folder().exists(), "the end of its folder")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_had_ended_by_itself_was_not_ended_by_a_signal(warm_server, alive, wait_for, is_late):
    """Also where the server has not looked at it yet."""
    request = {"title": "a rank that waits for its launch", "affinity": [], "environment": dict(os.environ), "cwd": "/"}
    ours, theirs = socket.socketpair()
    page, page_fd = SharedStatus.create()
    with ours, theirs, Path(os.devnull).open("wb") as output, fork_client.connect() as server:
        fds = [theirs.fileno(), output.fileno(), page_fd]
        socket.send_fds(server, [json.dumps({**request, "path": sys.path}).encode() + b"\n"], fds)
        with server.makefile("rb") as lines:
            rank = json.loads(lines.readline())["pid"]
            wait_for(lambda: os.getpgid(rank) == rank, "a process group of its own, which gets the signals")
            if is_late:
                warm_server.suspend()
                os.kill(rank, signal.SIGKILL)
                wait_for(lambda: not alive(rank), "its end")
            server.sendall(b'{"signal": %d}\n' % signal.SIGTERM)
            warm_server.resume()
            end = json.loads(lines.readline())
    page.close()
    os.close(page_fd)
    assert (end["exit"], end["was_ended"]) == ((-signal.SIGKILL, False) if is_late else (-signal.SIGTERM, True))


def test_an_edited_library_is_imported_anew(library, tmp_path):
    fork(60)
    first = status()
    library.write_text(library.read_text().replace("first", "second"))
    fork(60)
    second = status()
    assert first is not None
    assert second is not None
    assert second["pid"] == first["pid"]  # the same process, with a new program
    assert (tmp_path / "imports").read_text() == "first\nsecond\n"


def test_several_commands_at_once_share_one(library, tmp_path):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fork, [60] * 4))
    assert len(commands.server_sockets()) == 1
    assert (tmp_path / "imports").read_text() == "first\n"


def test_of_a_killed_command_only_the_idle_server_is_left_and_that_ends(library, alive, wait_for):
    program = (
        "import time; from ddp_hydra.rank import fork_client; server = fork_client.connect()\n"
        f"server.sendall({FAILS % 1!r}); server.recv(1000)\n"
        "print(fork_client.socket_path(), flush=True); time.sleep(30)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        address = Path(command.stdout.readline().strip())
        found = fork_client.ask(address, "status")
        command.kill()
    assert found is not None
    assert found["ends_in_s"] is None
    wait_for(lambda: not alive(found["pid"]), "the end of the server")
    assert not address.exists()


def test_a_dead_servers_socket_is_nobodys(library):
    fork_client.runtime_folder().mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(fork_client.socket_path()))
    assert status() is None
    fork(60)
    assert status() is not None


def step_of_ddp(compiled: bool) -> bool:
    """Return whether torch's compiler was still to be imported after a step, before one that may be compiled."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    is_put_off = isinstance(sys.modules["torch._dynamo"], lazy_dynamo.StandIn)
    if compiled:
        torch.compile(model, backend="eager")(torch.ones(2)).sum().backward()
        optimizer.step()
        assert not isinstance(sys.modules["torch._dynamo"], lazy_dynamo.StandIn)
    return is_put_off


@pytest.mark.slow
def test_ranks_import_the_compiler_when_they_need_it_and_the_server_before_the_next_ones(keep_warm, fresh_client):
    found = [dispatch.run(fresh_client, step_of_ddp, compiled) for compiled in (False, True, False)]
    assert found == [[True, True], [True, True], [False, False]]


@pytest.mark.slow
def test_the_second_command_runs_what_was_edited_with_its_own_environment(cli, project, runtime, tmp_path):
    own = replace(cli, project=Path(shutil.copytree(project, tmp_path / "own")))
    model = own.project / "models" / "tiny.py"
    plain = model.read_text()
    words = ("data=tiny", "model=tiny", "trainer.threads=1", "trainer.max_steps=1", "cluster.n_workers=1")
    pids = []
    for number, said in enumerate(("one", "two")):
        tell = f"import os\nprint('model {said}, variable', os.environ['MY_OWN'])\n"
        model.write_text(plain.replace("import json\n", f"import json\n{tell}", 1))
        run = tmp_path / f"run-{number}"
        settings = {"XDG_RUNTIME_DIR": str(runtime), "DDP_HYDRA_KEEP_WARM_S": "60"}
        own.done(*words, f"hydra.run.dir={run}", MY_OWN=f"of {said}", **settings)
        assert f"model {said}, variable of {said}" in (run / "logs" / "rank-0.log").read_text()
        pids += [found["pid"] for address in commands.server_sockets() if (found := fork_client.ask(address, "status"))]
    assert len(pids) == 2
    assert pids[0] == pids[1]
    assert not (own.folder / "core").exists()


@pytest.mark.slow
def test_the_import_of_torch_begins_before_that_of_hydra(cli, project, runtime, tmp_path):
    own = replace(cli, project=Path(shutil.copytree(project, tmp_path / "own")))
    model = own.project / "models" / "tiny.py"
    tell = "import os, psutil\nprint('server began', psutil.Process(os.getppid()).create_time())\n"
    model.write_text(model.read_text().replace("import json\n", f"import json\n{tell}", 1))
    words = ("data=tiny", "model=tiny", "trainer.threads=1", "trainer.max_steps=1", "cluster.n_workers=1")
    run = tmp_path / "run"
    own.done(*words, f"hydra.run.dir={run}", XDG_RUNTIME_DIR=str(runtime))
    began = re.search(r"server began (\S+)", (run / "logs" / "rank-0.log").read_text())
    assert began is not None
    assert float(began[1]) < (run / ".hydra" / "config.yaml").stat().st_mtime


@pytest.mark.parametrize(
    "words",
    [pytest.param(("nonsense=1",), marks=pytest.mark.slow), ("cluster=local", "experiment=here")],
    ids=["an error", "inline"],
)
def test_a_server_that_no_rank_needs_ends_at_once(cli, project, runtime, tmp_path, wait_for, words):
    own = replace(cli, project=Path(shutil.copytree(project, tmp_path / "own")))
    experiment = own.project / "conf" / "experiment" / "here.yaml"
    experiment.parent.mkdir(exist_ok=True)
    experiment.write_text(
        "# @package _global_\ndefaults:\n  - override /cluster: inline\n  - override /data: tiny\n"
        "  - override /model: tiny\ntrainer:\n  max_steps: 1\n  threads: 1\n"
    )
    ended = own.run(*words, f"hydra.run.dir={tmp_path / 'run'}", XDG_RUNTIME_DIR=str(runtime))
    assert (ended.returncode == 0) == (words[0] != "nonsense=1"), ended.stderr
    wait_for(lambda: not list((runtime / "ddp_hydra").glob("*.sock")), "the end of the fork server")
