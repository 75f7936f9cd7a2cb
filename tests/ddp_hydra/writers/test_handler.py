from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hydra.errors import RecordError
from ddp_hydra.record import End, Log, Metrics, Record, RolledBack, Start
from ddp_hydra.writers.handler import ResultsHandler, default_writers


class Memory:
    def __init__(self, error: Exception | None = None) -> None:
        self.records: list[Record] = []
        self.closed = 0
        self.error = error

    def write(self, record: Record) -> None:
        if self.error:
            raise self.error
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1
        if self.error:
            raise self.error


def test_remembers_what_the_summary_needs(metrics_record):
    writer = Memory()
    with ResultsHandler([writer]) as handler:
        handler.handle(metrics_record(1, train__loss=2.0, lr=0.1))
        handler.handle(metrics_record(2, train__loss=1.0))
        handler.handle(metrics_record(3, rank=1, train__loss=99.0))
        handler.handle(Record(Log("hi")))
        handler.handle(Record(Metrics({"val/loss": math.nan}), step=4))
    assert handler.summary.metrics == {"train/loss": 1.0, "lr": 0.1, "val/loss": None}
    assert (handler.summary.steps, handler.summary.samples) == (4, 16)
    assert len(writer.records) == 5
    assert writer.closed == 1


def test_the_steps_of_the_summary_are_those_that_were_done(metrics_record):
    """Not the last step that a number was logged for; fewer after a rollback and in a new attempt."""
    with ResultsHandler([]) as handler:
        handler.handle(metrics_record(9, loss=1.0))
        handler.handle(metrics_record(7, delayed=1.0))
        assert handler.summary.steps == 9
        handler.handle(Record(RolledBack(), step=4))
        assert handler.summary.steps == 4
        handler.handle(metrics_record(8, loss=1.0))
        handler.handle(metrics_record(5, attempt=1, loss=1.0))
    assert handler.summary.steps == 5


def test_full_disk_is_one_sentence_with_the_file_and_keeps_no_record_from_the_others(metrics_record):
    full, other = Memory(OSError(errno.ENOSPC, "No space left on device", "runs/metrics.jsonl")), Memory()
    handler = ResultsHandler([full, other])
    with pytest.raises(RecordError, match=r"cannot write runs/metrics.jsonl: No space left .*free some space"):
        handler.handle(metrics_record(1, loss=1.0))
    assert len(other.records) == 1
    with pytest.raises(RecordError, match="No space left"):
        handler.close()
    assert (full.closed, other.closed) == (1, 1)
    handler.close()
    assert other.closed == 1


def test_error_of_the_block_is_not_hidden_by_a_failing_close():
    broken = Memory(ValueError("close failed"))
    with pytest.raises(KeyError) as caught, ResultsHandler([broken]):
        raise KeyError("the real one")
    assert any("close failed" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="close failed"), ResultsHandler([broken]):
        pass


def test_default_writers_make_the_designed_run_directory(
    tmp_path, metrics_record, checkpoint_record, file_record, tree
):
    with ResultsHandler(default_writers(tmp_path / "run", progress=False)) as handler:
        handler.handle(Record(Start(lines=[])))
        handler.handle(metrics_record(10, train__loss=0.5))
        handler.handle(checkpoint_record(10, best=True))
        handler.handle(file_record("samples/names.txt"))
        handler.handle(Record(Log("hello\n"), rank=1))
        handler.handle(Record(End(stopped=True)))
    files = tree(tmp_path / "run")
    events = {name for name in files if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(events) == 1
    names = {"step-000010.pt", "last.pt", "best.pt", "manifest.json"}
    expected = {"metrics.jsonl", "logs/rank-1.log", "samples/names.txt"} | {f"checkpoints/{name}" for name in names}
    assert files - events == expected


def test_unwritable_output_directory_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*file/run: Not a directory"):
        default_writers(tmp_path / "file" / "run")
    assert default_writers(tmp_path / "new" / "run", tensorboard=False, progress=False)


@pytest.mark.integration
def test_no_torch_on_the_client(tmp_path):
    code = f"""
import base64, importlib, json, pkgutil, sys
import ddp_hydra.writers as package
from ddp_hydra.record import Image, Metrics, Record, Text
assert not {{"rich", "tensorboard"}} & set(sys.modules), "importing the package is cheap"
import ddp_hydra.storage.manifest
assert not {{"rich", "tensorboard"}} & set(sys.modules), "reading a manifest is cheap"
for module in pkgutil.iter_modules(package.__path__, "ddp_hydra.writers."):
    importlib.import_module(module.name)
head = b"\\x89PNG\\r\\n\\x1a\\n" + bytes(4) + b"IHDR" + bytes([0, 0, 0, 1] * 2)
png = base64.b64encode(head + bytes(20)).decode()
from ddp_hydra.writers.handler import default_writers
from ddp_hydra.writers.handler import ResultsHandler
with ResultsHandler(default_writers({str(tmp_path)!r})) as handler:
    handler.handle(Record(Metrics({{"train/loss": 1.0}}), step=1))
    handler.handle(Record(Text("t", "hello")))
    handler.handle(Record(Image("i", png)))
print(json.dumps([name for name in ("torch", "tensorflow", "tensorboardX") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
