"""Functions and scripts on ranks behave and end as programs do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_hydra import dispatch, heartbeat
from ddp_hydra.errors import RankFailed

pytestmark = pytest.mark.integration


def rest() -> None:
    for _ in range(6000):  # Python hears a signal between two calls: just before a long sleep, it would be late
        time.sleep(0.1)


def look() -> dict[str, Any]:
    """Fork and start processes as user code does, and return what came of them."""
    heartbeat.at("validate", 7)  # in the loop, where SIGTERM asks the rank to finish
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: (writer.send("up"), rest()))
    child.start()
    reader.recv()
    child.terminate()
    child.join()
    reader.close(), writer.close()
    if not (pid := os.fork()):
        sys.exit(7)
    left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with subprocess.Popen(["sleep", "30"]) as program:
        program.send_signal(2)
    for _ in range(5):
        os.system("true &")
    mine, until = psutil.Process(), time.monotonic() + 60
    while mine.children() and time.monotonic() < until:
        time.sleep(0.01)
    inherited = []
    for number in sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # a thread has closed it meanwhile
            if number > 2 and os.get_inheritable(number):
                inherited.append(number)
    return {
        "terminated": child.exitcode,
        "asked to finish": heartbeat.here().finish,
        "exit code of a fork": left,
        "interrupted": program.returncode,
        "children": [one.pid for one in mine.children()],
        "inherited": inherited,
        "temporary folder": tempfile.gettempdir(),
    }


def test_processes_of_a_rank_are_its_own(client2):
    found = dispatch.Gang(client2, group=False).run(look)  # gloo's own descriptors are inherited
    right = {"terminated": -15, "asked to finish": 0, "exit code of a fork": 7, "interrupted": -2, "children": []}
    assert found == [right | {"inherited": [], "temporary folder": tempfile.gettempdir()}] * 2


def end_late(folder: Path) -> None:
    """Leave a file open, and a thread that runs."""
    rank = os.environ["RANK"]
    log = (folder / f"log{rank}").open("w")
    globals()["kept"] = log
    log.write("x" * 870)

    def write() -> None:
        time.sleep(0.5)
        (folder / f"late{rank}").touch()

    threading.Thread(target=write).start()


def test_open_files_are_written_and_threads_joined(client2, tmp_path):
    dispatch.run(client2, end_late, tmp_path)
    assert [(tmp_path / f"log{rank}").stat().st_size for rank in range(2)] == [870, 870]
    assert [(tmp_path / f"late{rank}").exists() for rank in range(2)] == [True, True]


SCRIPT = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(1)
    (folder / "saved").touch()
    sys.exit(1)
if len(sys.argv) == 2:
    (folder / rank).write_text(os.environ["TORCHELASTIC_MAX_RESTARTS"])
    os._exit(0)
signal.signal(signal.SIGTERM, save)
(folder / f"up{rank}").touch()
while rank == "0" or not (folder / "up0").exists():
    time.sleep(0.05)
raise ValueError("no")
"""


def test_a_script_may_end_at_once_or_save_when_another_rank_has_failed(client2, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert dispatch.run(client2, dispatch.script(path, tmp_path)) == [None, None]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0", "0"]
    with pytest.raises(RankFailed, match="ValueError: no"):
        dispatch.run(client2, dispatch.script(path, tmp_path, "save"))
    assert (tmp_path / "saved").exists()


def test_a_script_is_told_where_its_folder_is_missing(client2, tmp_path, caplog):
    path = tmp_path / "train.py"
    path.write_text("")
    dispatch.Gang(client2, cwd="/no/such/folder").run(dispatch.script(path))
    assert "has no folder /no/such/folder, so the script works in " in caplog.text
