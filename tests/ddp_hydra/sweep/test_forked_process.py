"""Forked processes: what they say, and how they end."""

from __future__ import annotations

import atexit
import gc
import gzip
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from ddp_hydra import forked
from ddp_hydra.sweep import scheduler
from ddp_hydra.sweep.scheduler import ForkedProcess, wait_for_message
from tests.support.warm_server import alive, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def start(tmp_path):
    children = []

    def start(work, **more) -> ForkedProcess:
        children.append(ForkedProcess(work, tmp_path / "logs" / "out.log", **more))
        return children[-1]

    yield start
    for child in children:
        if not child.pipe.closed:
            child.end(0.1)


def receive_all(child: ForkedProcess, timeout_s: float = 60.0) -> list:
    deadline = time.monotonic() + timeout_s
    while child.receive():
        assert time.monotonic() < deadline
        wait_for_message([child], 1.0)
    return child.messages


def test_what_it_sends_and_returns_is_heard_and_what_it_prints_is_in_its_file(start, tmp_path):
    (tmp_path / "only_there.py").write_text("class Refused(Exception):\n    pass\n")

    def work(pipe):
        sys.path.insert(0, str(tmp_path))
        print("hello")
        os.system("echo from its own child")
        print("trouble", file=sys.stderr)
        pipe.send("first")
        pipe.send(importlib.import_module("only_there").Refused())  # what only it can import is not heard
        return "x" * 10**6

    child = start(work)
    assert receive_all(child) == ["first", "x" * 10**6]
    assert child.describe_end().endswith("can't be read here: ModuleNotFoundError: No module named 'only_there'")
    assert (tmp_path / "logs/out.log").read_text() == "hello\nfrom its own child\ntrouble\n"


def test_a_tensor_that_it_returns_outlives_it(start):
    import torch

    child = start(lambda pipe: torch.ones(3))
    child.process.join()
    (found,) = receive_all(child)
    assert found.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("work", "how"),
    [
        (lambda pipe: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda pipe: os._exit(3), "the process exited with code 3 before its work was done"),
        (lambda pipe: 1 / 0, "the process exited with code 1 before its work was done"),
    ],
)
def test_one_that_says_nothing_has_an_end_in_words(start, work, how):
    child = start(work)
    assert receive_all(child) == []
    assert child.describe_end() == how


@pytest.mark.parametrize("deaf", [False, True])
def test_it_ends_with_all_that_it_has_started_also_when_it_does_not_listen(start, deaf, tmp_path):
    def work(pipe):
        if deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(subprocess.Popen(["sleep", "60"]).pid)
        time.sleep(60)

    child = start(work)
    while not child.messages:
        wait_for_message([child], 1.0)
        child.receive()
    child.end(timeout_s=0.5)
    assert not child.process.is_alive()
    wait_for(lambda: not alive(child.messages[0]), "the end of its own child")


def test_an_interrupt_at_its_very_start_ends_it_and_runs_nothing_of_this_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nfrom pathlib import Path\nfrom ddp_hydra.sweep.scheduler import ForkedProcess\n"
        "fork = os.fork\n"
        "def interrupted() -> int:\n"
        "    pid = fork()\n    if pid == 0:\n        os.kill(os.getpid(), signal.SIGINT)\n    return pid\n"
        "os.fork = interrupted\n"
        "try:\n"
        f"    child = ForkedProcess(lambda pipe: 1, Path({str(tmp_path)!r}) / 'out')\n"
        "    while child.receive():\n        pass\n"
        "    print(child.messages, child.process.exitcode)\n"
        "finally:\n    print('end of this process', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[] 130\nend of this process\n", "")


def test_it_dies_with_us(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom ddp_hydra.sweep.scheduler import ForkedProcess\n"
        f"child = ForkedProcess(lambda pipe: time.sleep(60), Path({str(tmp_path)!r}) / 'out')\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    wait_for(lambda: not alive(pid), "the end of the child")


def test_it_keeps_no_lock_of_this_process(start, monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr(scheduler, "LOCKS", {write_end})

    def work(pipe):
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(write_end)
        os.fstat(read_end)
        return "fine"

    assert receive_all(start(work)) == ["fine"]
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("fails", [False, True])
def test_user_code_ends_as_in_python_and_what_this_process_has_open_is_left_to_it(start, tmp_path, fails):
    """Files are flushed, threads joined, and exit handlers called that were registered there."""
    kept: list = []
    ours = (tmp_path / "ours.txt").open("w")
    ours.write("once\n")
    atexit.register(note := lambda: (tmp_path / "handler-of-this-process").touch())
    finalizer = weakref.finalize(ours, (tmp_path / "finalizer-of-this-process").touch)

    def work(pipe):
        file = (tmp_path / "open.txt").open("w")
        packed = gzip.open(tmp_path / "open.gz", "wt")  # noqa: SIM115, it is left open
        kept.extend([file, packed])
        file.write("text"), packed.write("packed")
        atexit.register((tmp_path / "handler").touch)
        kept.append(weakref.finalize(file, (tmp_path / "finalizer").touch))
        threading.Thread(target=lambda: (time.sleep(0.3), (tmp_path / "thread").touch())).start()
        return 1 / (not fails)

    child = start(work)
    assert receive_all(child) == ([] if fails else [1.0])
    assert child.process.exitcode == int(fails)
    assert (tmp_path / "open.txt").read_text() == "text"
    assert gzip.decompress((tmp_path / "open.gz").read_bytes()) == b"packed"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.stat().st_size and path.suffix == "") == [
        "finalizer", "handler", "thread",
    ]  # fmt: skip
    ours.close()
    finalizer.detach()
    atexit.unregister(note)
    assert (tmp_path / "ours.txt").read_text() == "once\n"


def test_a_thread_that_does_not_end_holds_up_its_process_for_a_limited_time(start, tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "END_S", 1)
    child = start(lambda pipe: threading.Thread(target=time.sleep, args=(60,), name="upload").start())
    assert receive_all(child) == [None]
    assert "ends after 1 s without threads that still run: upload" in (tmp_path / "logs/out.log").read_text()


def test_garbage_of_this_process_is_collected_and_its_objects_are_frozen_there_only(start):
    """What is frozen and unfrozen counts as old: a sweep grew by the config of each job."""

    class Node:
        pass

    gc.collect()
    gc.disable()  # only what is called here makes an object old
    try:
        node = Node()
        node.itself, was = node, weakref.ref(node)
        child = start(lambda pipe: [type(one).__name__ for one in gc.get_objects()].count("Node"))
        assert any(one is node for one in gc.get_objects())  # frozen objects are not among them
        del node
        gc.collect(0)
        assert was() is None
    finally:
        gc.enable()
    assert receive_all(child)[-1] == 0
