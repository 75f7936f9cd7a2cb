from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hydra.cli import compose
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import torchrun
from ddp_hydra.rank.processes import RANK_PID
from tests.support.ports import free_port
from tests.support.warm_server import wait_for

MORE = ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT", RANK_PID)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path) -> None:
    for name in (*torchrun.NEEDED, *MORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def started(monkeypatch):
    """Be a process of a launcher."""

    def start(rank: int, **more: str) -> None:
        values = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, **more}
        for name, value in {**values, "MASTER_ADDR": "h", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))

    return start


def test_the_processes_of_a_host_meet_at_one_socket(started, monkeypatch):
    assert torchrun.find_place() is None

    def path(rank: int, **more: str) -> Path:
        started(rank, **more)
        place = torchrun.find_place()
        assert place is not None
        return place.socket

    assert path(0) == path(1) != path(2) == path(3)
    assert torchrun.find_place() == torchrun.ProcessPlace(3, 1, 4, 2)
    torchrun.remember("/nowhere")  # without an agent, nothing is noted
    assert compose.with_run_dir_before(["a=1"]) == ["a=1"]
    assert path(0) != path(0, TORCHELASTIC_RUN_ID="other")
    monkeypatch.setenv(RANK_PID, "1")  # a program that a rank starts
    assert torchrun.find_place() is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "all"}, "must be whole numbers: .*'all'"),
        ({"LOCAL_WORLD_SIZE": "4"}, "RANK=3, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4 do not fit together"),
        ({"LOCAL_WORLD_SIZE": "3"}, "each host needs equally many processes"),
        ({"LOCAL_WORLD_SIZE": "0"}, "do not fit together"),
    ],
)
def test_variables_that_do_not_fit_together_are_refused(started, variables, said):
    started(3, **variables)
    with pytest.raises(ConfigError, match=said):
        torchrun.find_place()


PROCESS = """
import os, signal, sys
from ddp_hydra.rank import torchrun
place = torchrun.find_place()
if place.local_rank:
    torchrun.end_with_first(place)
with torchrun.ended_together(place):
    input()
    {end}
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("end", "first", "others"),
    [
        ("sys.exit(130)", 130, 130),
        ("sys.exit('a sentence')", 1, 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 1),
    ],
)
def test_the_processes_of_a_host_end_with_the_first_one(end, first, others, tmp_path):
    variables = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": str(os.getpid())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS.format(end=end)],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(3)
    ]
    try:
        wait_for(lambda: list(tmp_path.rglob("torchrun-*")), "the socket")
        (path,) = tmp_path.rglob("torchrun-*")
        # One listens there, and two are connected. The name of a socket has 107 bytes, so the folder may be another.
        wait_for(lambda: Path("/proc/net/unix").read_text().count(f"/{path.name}") == 3, "all")
        assert [process.poll() for process in processes] == [None] * 3
        for process in processes:
            process.communicate(b"\n", timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [first, others, others]
    assert not list(tmp_path.rglob("torchrun-*"))


@pytest.mark.medium
def test_hosts_with_other_numbers_of_processes_do_not_wait_for_one_another():
    """The numbers of RANK 2 fit together."""
    variables = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = "import sys; from ddp_hydra.__main__ import main; sys.argv = ['ddp-hydra', 'cluster=torchrun']; main()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **variables, "RANK": rank, "LOCAL_WORLD_SIZE": local},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, local in (("0", "2"), ("2", "1"))
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [1, 1]
    assert "RANK=0, LOCAL_RANK=0, WORLD_SIZE=3, LOCAL_WORLD_SIZE=2 do not fit together" in said[0]
    assert "RANK 2 has LOCAL_WORLD_SIZE=1, and RANK 0 has 2: each host needs equally many processes" in said[1]


# -- restarts ----------------------------------------------------------------------------------------------


@pytest.fixture
def agent(started, tmp_path) -> Path:
    """Be rank 0 of an agent that has started all twice; return the run directory that the first ones noted."""
    for attempt in range(2):
        error_file = tmp_path / "logs" / "none_x1" / f"attempt_{attempt}" / "0" / "error.json"
        started(0, TORCHELASTIC_RESTART_COUNT=str(attempt), TORCHELASTIC_ERROR_FILE=str(error_file))
        error_file.parent.mkdir(parents=True)
        if attempt == 0:
            torchrun.remember(str(tmp_path / "it's a\\run"))
            assert torchrun.remembered() is None
            memory = torchrun.memory()
            assert memory is not None
            memory.write_text(memory.read_text().replace(str(os.getpid()), "1", 1))
    return tmp_path / "it's a\\run"


def test_a_restart_goes_on_in_the_same_run_directory(agent):
    assert torchrun.remembered() == agent
    typed = ["seed=1", "hydra.run.dir=mine", "resume=other"]
    quoted = text.quoted(f"{agent.parent}/it's a\\run")
    assert compose.with_run_dir_before(typed) == ["seed=1", "resume=other", f"hydra.run.dir={quoted}"]
    (agent / "checkpoints").mkdir(parents=True)
    (agent / "checkpoints" / "last.pt").write_bytes(b"a checkpoint")
    assert compose.with_run_dir_before(typed) == ["seed=1", f"resume={quoted}", f"hydra.run.dir={quoted}"]
    assert compose.with_run_dir_before(["-m", *typed]) == ["-m", *typed]


def test_the_number_of_hosts_at_first_is_kept_where_there_are_fewer(agent, started):
    error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
    started(0, WORLD_SIZE=2, TORCHELASTIC_ERROR_FILE=error_file)
    torchrun.remember(str(agent))
    assert torchrun.read_memory() == (os.getpid(), 2, str(agent))
