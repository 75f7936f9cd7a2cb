"""A logger's process: what reaches it, and that nothing it does reaches the job."""

from __future__ import annotations

import io
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddp_hydra.config.project import starter
from ddp_hydra.job.loggers import LoggerProcess, RecordBuffer
from ddp_hydra.record import Beat, Checkpoint, File, Image, Log, Metrics, Record, Text
from ddp_hydra.writers.loggers import Order, RunInfo
from ddp_hydra.writers.loggers.process import RedactedOutput

ROOT = Path(__file__).parents[3]
LONG_S = 45.0
MINE = '''
import json, os, subprocess, sys, time
from pathlib import Path
from ddp_hydra.writers.loggers import Logger, Refusal, ServiceRun


class Mine:
    """A plain writer."""

    def __init__(self, folder, fails=False):
        self.file, self.fails = (Path(folder) / "mine.txt").open("a"), fails

    def write(self, record):
        if self.fails:
            print("at http://me:pw123@host/runs", flush=True)
            raise ValueError(f"no {record.step} with token=abc123")
        print(record.kind, record.step, getattr(record.data, "metrics", None), file=self.file, flush=True)

    def close(self):
        print("closed", file=self.file, flush=True)


class Service(Logger):
    """A service that may be away, refuse, block, crash."""

    advice = "Type something"

    def __init__(self, folder, away=0, refuses=None, does=""):
        super().__init__("best")
        self.file, self.away, self.refuses, self.does = (Path(folder) / "service.txt").open("a"), away, refuses, does
        self.kept = []

    def say(self, *words):
        print(*words, file=self.file, flush=True)

    def begin(self, job):
        if self.does == "blocks":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            self.say("pids", os.getpid(), child.pid)
            time.sleep(1000)
        if self.does == "crashes":
            os._exit(3)
        if self.does == "is refused":
            raise Refusal("the password=hunter2 is wrong")
        self.say("begin", job.name, job.sweep, job.tags, job.params, job.earlier)
        self.say("pids", os.getpid())
        return ServiceRun(job.earlier or "run-1", "http://user:pw@host/run-1", "noted")

    def metrics(self, values, record):
        self.kept.append((record.step, values))

    def flush(self):
        if self.away > 0:
            self.away -= 1
            raise ConnectionError("nobody there")
        while self.kept:
            step, values = self.kept.pop(0)
            if step == self.refuses:
                raise Refusal("a bad step")
            self.say(step, json.dumps(values))

    def text(self, name, text, step):
        self.say("text", name, text, step)

    def image(self, name, png, step):
        self.say("image", name, len(png), step)

    def checkpoint(self, path, step, is_best):
        self.say("checkpoint", path.name, step, is_best)

    def end(self, status):
        self.say("end", status)
'''

Start = Callable[..., LoggerProcess]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my_writer.py").write_text(MINE)
    return tmp_path


@pytest.fixture
def started(folder) -> Iterator[Start]:
    """Start a logger of the project space; its runs are in `.runs`."""
    processes = []

    def start(target: str = "Service", earlier: str = "", buffer: RecordBuffer | None = None, **settings):
        node = {"_target_": f"models.my_writer.{target}", "folder": str(folder), **settings}
        job = RunInfo("a/0", folder, ["t"], "a", {"lr": 1}, earlier)
        order = Order(node, job, (folder, starter()), 1.0)
        runs: list[dict[str, str]] = []
        sender = LoggerProcess(target, order, folder / "logs" / "mine.log", runs.append, buffer)
        sender.runs = runs  # type: ignore[attr-defined]
        processes.append(sender)
        return sender

    yield start
    for sender in processes:
        sender.kill()


def metrics(step: int, **values: float | None) -> Record:
    return Record(Metrics(metrics=values or {"loss": 0.5}, epoch=1, samples=8 * step), 0, step, 1e9)


def ended(sender: LoggerProcess, status: str = "finished", timeout_s: float = LONG_S) -> str:
    sender.finish(status)
    return sender.wait(time.monotonic() + timeout_s)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    """The processes that a logger has named, once it has."""
    file = folder / "service.txt"
    wait_for(lambda: file.exists() and "pids" in file.read_text() and file.read_text().endswith("\n"), "pids")
    line = next(line for line in file.read_text().splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


# -- the buffer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [{"max_messages": 3}, {"max_bytes": 2}])
def test_a_full_buffer_drops_the_oldest_and_counts_them(most):
    buffer = RecordBuffer(**most)
    for number in range(5):
        buffer.put(b"%d" % number)
    buffer.put(None)
    assert [buffer.get() for _ in range(3)] == [b"3", b"4", None]
    assert buffer.dropped == 3


# -- what a logger gets ------------------------------------------------------------------------------------


def test_the_last_line_of_a_library_is_written_too_without_its_secrets():
    file = io.StringIO()
    output = RedactedOutput(file)
    output.write("first\nat http://me:pw123@host/runs")
    output.end_line()
    first, second = file.getvalue().splitlines()
    assert first == "first"
    assert second.startswith("at http://")
    assert "pw123" not in second


@pytest.mark.integration
def test_a_writer_of_the_project_gets_all_records(started, folder):
    sender = started("Mine")
    for record in (metrics(1), Record(Log("x")), Record(Beat()), metrics(2, loss=math.nan)):
        sender.write(record)
    assert ended(sender) == ""
    assert (folder / "mine.txt").read_text().splitlines() == [
        "metrics 1 {'loss': 0.5}", "log None None", "metrics 2 {'loss': nan}", "closed",
    ]  # fmt: skip
    assert not (folder / "logs" / "mine.log").exists()  # nothing was printed


@pytest.mark.integration
def test_a_service_gets_each_kind_and_the_end(started, folder, caplog):
    caplog.set_level(logging.INFO)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000002.pt").write_bytes(b"x")
    sender = started(earlier="run-0")
    os.kill(*pids(folder), signal.SIGINT)  # it is for the job
    sender.write(metrics(1, loss=math.nan, **{"val/x": 2.0}))
    sender.write(Record(Metrics({"loss": 9.0}), 1, 1))  # of another rank
    sender.write(Record(Text(name="n", text="hello"), 0, 2))
    sender.write(Record(Image(name="i", png="AAAA"), 0, 2))
    for name, is_best in (("step-000002.pt", True), ("step-000002.pt", False), ("step-000001.pt", True)):
        sender.write(Record(File(f"checkpoints/{name}", 1, "", checkpoint=Checkpoint(step=2, best=is_best)), 0, 2))
    assert ended(sender, "failed") == ""
    lines = [line for line in (folder / "service.txt").read_text().splitlines() if not line.startswith("pids")]
    assert lines[0] == "begin a/0 a ['t'] {'lr': 1} run-0"
    assert '1 {"loss": NaN, "val/x": 2.0, "epoch": 1.0, "samples": 8.0}' in lines
    assert [line for line in lines if line.startswith(("text", "image", "check"))] == [
        "text n hello 2", "image i 3 2", "checkpoint step-000002.pt 2 True",
    ]  # fmt: skip
    assert lines[-1] == "end failed"
    assert sender.runs == [{"id": "run-0", "url": "http://host/run-1"}]  # without the password
    assert "Service: http://host/run-1" in caplog.text
    assert "Service: noted" in caplog.text
    assert not any(thread.name.startswith("Service") for thread in threading.enumerate())


@pytest.mark.integration
def test_a_service_that_was_away_gets_everything_later_but_what_it_refuses(started, folder, caplog):
    sender = started(away=2, refuses=3)
    for step in range(1, 4):
        sender.write(metrics(step))
    assert ended(sender) == ""
    lines = (folder / "service.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines if line[0].isdigit()] == ["1", "2"]
    assert lines[-1] == "end finished"
    assert sorted(record.getMessage() for record in caplog.records) == [
        "Service answers again",
        f"Service did not take a record (a bad step): the job goes on. See {folder}/logs/mine.log",
        "Service does not answer (ConnectionError: nobody there): the job goes on, and its records wait. "
        "Type something",
    ]


# -- what a logger does to the job -------------------------------------------------------------------------


@pytest.mark.integration
def test_a_writer_that_always_fails_is_said_once_without_its_secrets(started, folder, caplog):
    sender = started("Mine", fails=True)
    for step in range(5):
        sender.write(metrics(step))
    assert ended(sender) == ""
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "Mine did not take a record (ValueError: no 0 with token=***)"
    ]
    log = (folder / "logs" / "mine.log").read_text()
    assert log.count("ValueError") >= 5
    assert "at http://***@host/runs" in log
    assert "abc123" not in log
    assert "pw123" not in log


@pytest.mark.integration
def test_a_service_that_refuses_the_run_gets_nothing(started, folder, caplog):
    sender = started(does="is refused")
    wait_for(lambda: sender.has_failed, "an error")
    sender.write(metrics(1))
    assert ended(sender) == ""
    assert "Service gets no records (the password=*** is wrong): the job goes on. Type something" in caplog.text
    assert "hunter2" not in (folder / "logs" / "mine.log").read_text()


@pytest.mark.integration
def test_a_blocked_logger_blocks_nobody(started, folder, caplog):
    sender = started(does="blocks", buffer=RecordBuffer(max_messages=100, max_bytes=10_000))
    processes = pids(folder)
    for step in range(10_000):  # more than the pipe and the buffer hold
        sender.write(metrics(step))
    assert sender.buffer.dropped > 0
    assert ended(sender, timeout_s=0.5) == "it had not taken everything when the job ended"
    wait_for(lambda: not any(map(psutil.pid_exists, processes)), "the end of the logger and of its own process")


@pytest.mark.integration
def test_a_logger_that_crashes(started):
    sender = started(does="crashes")
    sender.process.wait(LONG_S)
    sender.write(metrics(1))
    assert ended(sender) == "its process ended with 3"


@pytest.mark.integration
def test_a_logger_that_cannot_be_imported(started, caplog):
    sender = started("Missing")
    assert ended(sender) == ""
    assert "Missing gets no records (" in caplog.text


@pytest.mark.integration
def test_records_that_were_too_many_are_counted(started, folder):
    has_all = threading.Event()

    class Held(RecordBuffer):
        """Gives nothing before all is there."""

        def get(self, block=True, timeout=None):
            has_all.wait()
            return super().get(block, timeout)

    sender = started(buffer=Held(max_messages=10))
    for step in range(15):
        sender.write(metrics(step))
    sender.finish("finished")
    has_all.set()
    assert sender.wait(time.monotonic() + LONG_S) == "it was too slow, and 7 records were left out"


@pytest.mark.integration
@pytest.mark.parametrize("does", ["", "blocks"])
def test_the_logger_of_a_killed_job_ends_by_itself(folder, does):
    script = f"""
import sys, time
from pathlib import Path
from ddp_hydra.job.loggers import LoggerProcess
from ddp_hydra.writers.loggers import Order, RunInfo
folder = {str(folder)!r}
node = {{"_target_": "models.my_writer.Service", "folder": folder, "does": {does!r}}}
order = Order(node, RunInfo("a", Path(folder)), (Path(folder), Path({str(starter())!r})), {0.5 if does else 60.0})
LoggerProcess("Service", order, Path(folder) / "log", print)
time.sleep(1000)
"""
    job = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        processes = pids(folder)
    finally:
        job.kill()
        job.wait()
    wait_for(lambda: not psutil.pid_exists(processes[0]), "the end of the logger")
    for pid in processes[1:]:  # nobody is left who knows it
        os.kill(pid, signal.SIGKILL)
    if not does:
        assert (folder / "service.txt").read_text().splitlines()[-1] == "end killed"
