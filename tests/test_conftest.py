from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
import os, socket, subprocess, sys, tempfile, threading, time
import pytest

def test_variable():
    os.environ["MASTER_ADDR"] = "here"

def test_thread():
    threading.Thread(target=time.sleep, args=(3,), name="loader_0").start()

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_socket(private_folders):
    private_folders[1].mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(private_folders[1] / "x.sock"))

def test_file():
    tempfile.mkdtemp(prefix="spool-")

def test_process_group():
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_sender():
    from ddp_hydra import results
    results.connect(object())

def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("A", "b")
    assert "MASTER_ADDR" not in os.environ
    with tempfile.TemporaryDirectory():
        threading.Thread(target=time.sleep, args=(0.2,)).start()

@pytest.mark.gpu
def test_gpu():
    import torch
    assert torch.cuda.is_available()
"""


@pytest.mark.slow
@pytest.mark.integration
def test_whatever_a_test_leaves_behind_fails_it(tmp_path):
    here = Path(__file__)
    (tmp_path / "conftest.py").write_text(
        here.with_name("conftest.py").read_text().replace("GRACE_S = 30.0", "GRACE_S = 1.0")
    )
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {here.parents[1]}\nmarkers = gpu: x\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'base'}",
        str(tmp_path),
    ]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    for test, what in {
        "variable": "variables ['MASTER_ADDR']",
        "thread": "threads ['loader_0']",
        "process": "time.sleep(60)",
        "socket": "files ['x.sock']",
        "file": "files ['spool-",
        "process_group": "a process group",
        "sender": "a connected sender",
    }.items():
        error = told.partition(f"ERROR at teardown of test_{test} ")[2].partition("\n_____")[0]
        assert "left behind by this test" in error, told
        assert what in error, told
    assert "7 errors" in told, told
    assert "ERROR at teardown of test_clean" not in told
