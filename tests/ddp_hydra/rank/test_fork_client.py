from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import ddp_hydra
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import environment, fork_client, processes
from ddp_hydra.rank.spec import JobSpec, RankSpec

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ALONE = RankSpec(0, 1, 0, 1, 0, worker="w", host="127.0.0.1")
JOB = JobSpec(gang="g", attempt=2, ranks=(ALONE,))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536", "HOME": "/root"}, {"HOME": "/root"}),
        (
            {"OMP_NUM_THREADS": "8", "MALLOC_TRIM_THRESHOLD_": "1"},
            {"OMP_NUM_THREADS": "8", "MALLOC_TRIM_THRESHOLD_": "1"},
        ),
    ],
)
def test_dasks_limits_for_its_workers_are_dropped_and_a_users_own_are_kept(given, kept):
    assert environment.without_dasks_limits(given) == kept


def test_a_rank_finds_what_everyone_expects_in_its_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MY_OWN", "x")
    variables = environment.of_rank(JOB, ALONE, "eth1")
    assert "OMP_NUM_THREADS" not in variables
    assert {name: variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MY_OWN", *INTERFACES)} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MY_OWN": "x",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }
    assert (variables["TORCHELASTIC_RUN_ID"], variables["TORCHELASTIC_RESTART_COUNT"]) == ("g", "2")
    assert variables["TORCHELASTIC_MAX_RESTARTS"] == "0"


def test_a_users_own_choice_of_interface_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    variables = environment.of_rank(JOB, ALONE, "eth1")
    assert [variables[name] for name in INTERFACES] == ["eth7", "=eth1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert not set(INTERFACES) & environment.of_rank(JOB, ALONE, None).keys()


def test_each_local_rank_sees_its_own_gpu_first(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    second = RankSpec(1, 3, 1, 3, 0, worker="w", host="127.0.0.1")
    assert environment.of_rank(JOB, second, None)["CUDA_VISIBLE_DEVICES"] == "5,6,4"


def test_a_script_finds_the_gpu_that_was_taken_for_it_at_its_local_rank(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    second = RankSpec(1, 2, 1, 2, 0, worker="w", host="127.0.0.1")
    seen = [
        environment.of_rank(replace(JOB, is_script=True), second, gpu=gpu)["CUDA_VISIBLE_DEVICES"]
        for gpu in (None, 1, 2)
    ]
    assert [of_one.split(",")[1] for of_one in seen] == ["5", "5", "6"]
    assert environment.of_rank(JOB, second, None, gpu=2)["CUDA_VISIBLE_DEVICES"] == "6,4,5"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"])
def test_each_batch_job_has_a_server_of_its_own(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    first = fork_client.socket_path()
    assert first == fork_client.socket_path()
    monkeypatch.setenv(name, "2")
    assert fork_client.socket_path() != first


@pytest.mark.integration
def test_each_cgroup_has_a_server_of_its_own():
    """Really put into a cgroup where this user may make one; version 1 and 2 both have a folder for each."""
    roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    root = next((root for root in roots if (root / "cgroup.procs").exists() and os.access(root, os.W_OK)), None)
    if root is None:
        pytest.skip("needs the right to make a cgroup")
    group = root / f"ddp_hydra-test-{os.getpid()}"
    program = (
        "import sys; from pathlib import Path; from ddp_hydra.rank import fork_client\n"
        "print(fork_client.socket_path()); Path(sys.argv[1]).write_text('0'); print(fork_client.socket_path())"
    )
    group.mkdir()
    try:
        command = [sys.executable, "-c", program, str(group / "cgroup.procs")]
        before, inside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    finally:
        group.rmdir()
    assert before != inside
    assert Path(before).parent == Path(inside).parent


def test_a_runtime_folder_open_to_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ddp_hydra").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="must be your own and closed to others"):
        fork_client.connect()


@pytest.mark.parametrize("made", ["a symbolic link", "a dangling link", "a file", "a link on the way"])
def test_something_else_in_place_of_the_runtime_folder_is_refused(tmp_path, monkeypatch, made):
    folder = tmp_path / "run" / "ddp_hydra"
    monkeypatch.setattr(fork_client, "runtime_folder", lambda: folder)
    monkeypatch.setattr(fork_client, "MAX_TRIES", 20)
    place = folder.parent if made == "a link on the way" else folder
    place.parent.mkdir(exist_ok=True)
    if made == "a file":
        place.touch()
    else:
        place.symlink_to(tmp_path if made == "a symbolic link" else tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"ddp_hydra must be your own.*XDG_RUNTIME_DIR"):
        fork_client.connect()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a long path needs /proc")
def test_a_runtime_folder_may_have_a_long_path(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    monkeypatch.setattr(fork_client, "runtime_folder", lambda: folder)
    monkeypatch.setattr(fork_client, "_start", lambda address, short: listener.bind(short) or listener.listen())
    with socket.socket(socket.AF_UNIX) as listener, fork_client.connect(), listener.accept()[0]:
        assert fork_client.socket_path().is_socket()
        with fork_client.connect(), listener.accept()[0]:  # it is there already
            pass


def test_a_server_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(fork_client, "runtime_folder", lambda: folder)
    monkeypatch.setattr(fork_client, "_start", lambda address, short: listener.bind(short) or listener.listen())
    monkeypatch.setattr(fork_client, "user_of", lambda connection: os.getuid() + 1)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        pytest.raises(ConfigError, match=rf"belongs to user id {os.getuid() + 1}.*XDG_RUNTIME_DIR"),
    ):
        fork_client.connect()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "KMP_AFFINITY", "LD_PRELOAD", "TORCH_LOGS", "CUDA_HOME", "LANG"])
def test_variables_that_are_read_at_import_tell_servers_apart(monkeypatch, name):
    before = environment.identity()
    monkeypatch.setenv(name, "7")
    assert environment.identity() != before


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "KMP_INIT_AT_FORK", "TORCHELASTIC_RUN_ID", "RANK"])
def test_variables_that_each_rank_reads_itself_do_not(monkeypatch, name):
    before = environment.identity()
    monkeypatch.setenv(name, "7")
    assert environment.identity() == before


@pytest.mark.medium
def test_limits_and_the_mask_of_new_files_tell_servers_apart():
    program = (
        "import os, resource; from ddp_hydra.rank.environment import identity; names = [identity()]\n"
        "mask = os.umask(0o077); names.append(identity()); os.umask(mask)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard)); names.append(identity())\n"
        "os.nice(1); names.append(identity()); print(*names)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert len(set(ended.stdout.split())) == (4 if Path("/proc/self/status").exists() else 3)


def test_a_changed_file_of_the_library_has_another_server(tmp_path, monkeypatch):
    """Also one that is older than the newest, as a file that was put back is."""
    for name, text in (("a.py", "1"), ("b.py", "1")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(ddp_hydra, "__path__", [str(tmp_path)])
    environment._versions.cache_clear()
    try:
        before = environment.identity()
        os.utime(tmp_path / "a.py", (0, 0))
        assert environment.identity() == before  # a process keeps its server
        environment._versions.cache_clear()
        assert environment.identity() != before
    finally:
        environment._versions.cache_clear()


def test_a_server_needs_nothing_of_the_folder_that_it_was_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}here{os.pathsep}/there")
    path = environment.of_server()["PYTHONPATH"].split(os.pathsep)
    assert path[1:] == [str(tmp_path / "here"), "/there"]
    before = environment.identity()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert environment.identity() != before


def test_after_a_change_of_the_environment_another_server_is_held(tmp_path, monkeypatch):
    made: list[tuple[socket.socket, socket.socket]] = []

    def connect() -> socket.socket:
        made.append(socket.socketpair())
        return made[-1][0]

    address = tmp_path / "one.sock"
    monkeypatch.setattr(fork_client, "connect", connect)
    monkeypatch.setattr(fork_client, "socket_path", lambda: address)
    try:
        fork_client.hold()
        fork_client.hold()
        assert len(made) == 1
        address = tmp_path / "another.sock"
        fork_client.hold()
        assert len(made) == 2
        assert processes.has_ended(made[0][1])
        made[1][1].close()  # the server has ended
        fork_client.hold()
        assert len(made) == 3
    finally:
        fork_client.release()
        for pair in made:
            for end in pair:
                end.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_lock_of_the_folder_is_given_back_whatever_was_forked_meanwhile(tmp_path):
    with fork_client.locked(tmp_path / "mine") as handle:
        read, write = os.pipe()
        if not (pid := os.fork()):
            os.read(read, 1)
            os._exit(0)
    with fork_client.locked(tmp_path / "mine") as again:
        assert handle >= 0 <= again
    os.write(write, b"x")
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)


def test_who_waits_for_the_lock_of_the_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_client, "TOLD_S", -1.0)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    told = []

    def tell(text, *names):
        told.append(text % names)
        os.close(handle)  # it is given back

    monkeypatch.setattr(fork_client.log, "warning", tell)
    with fork_client.locked(tmp_path):
        (sentence,) = told
    assert f"another process has locked {tmp_path}: waiting for it" in sentence
