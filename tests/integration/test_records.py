"""Records on their way from ranks to the client: complete, in order, and never faster than they are read."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from ddp_hydra import results
from ddp_hydra.errors import RankFailed, RecordError
from ddp_hydra.rank.outbox import CHUNK_BYTES
from ddp_hydra.rank.record_relay import WINDOW_BYTES
from ddp_hydra.record import File, Record
from ddp_hydra.writers.handler import ResultsHandler, default_writers

pytestmark = pytest.mark.integration


def rank() -> int:
    return dist.get_rank()


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run_into(tmp_path, gang):
    """Run a function on a gang whose results are written to a run directory, as a job's are."""

    def run(client, fn, *args, slow_s=0.0):
        job = gang(client)
        with ResultsHandler(default_writers(tmp_path / "run", job.fetch, progress=False)) as handler:

            def take(record):
                time.sleep(slow_s)
                handler.handle(record)

            job.on_record = take
            return job.run(fn, *args)

    return run


def test_of_many_small_records_none_is_lost_and_each_ranks_order_is_kept(client2, gang, heard):
    def log_all(n):
        for step in range(n):
            results.log({"value": step * 10 + rank()}, step=step)

    gang(client2).run(log_all, 10_000)
    for number in range(2):
        metrics = [record for record in heard.records if record.kind == "metrics" and record.rank == number]
        assert [record.step for record in metrics] == list(range(10_000))
        assert all(record.data.metrics["value"] == record.step * 10 + number for record in metrics)


def test_a_slow_reader_holds_the_rank_back_and_misses_nothing(client2, gang, tmp_path, wait_for):
    """While the client sleeps, the rank can send what fits on the way and then waits."""
    progress = tmp_path / "progress"
    progress.write_text("0")
    size, count = 30_000, 1000
    seen, sent_while_asleep = [], []

    def send(path):
        for number in range(count):
            results.text(f"text-{number}", "x" * size)
            if rank() == 0:
                path.write_text(str(number + 1))

    def slow(record):
        if record.kind != "text" or record.rank != 0:
            return
        seen.append(record.data.name)
        if len(seen) == 1:
            before = 0
            while (now := int(progress.read_text() or 0)) != before or not now:  # until the rank moves no more
                before = now
                time.sleep(1)
            sent_while_asleep.append(now)

    gang(client2, on_record=slow).run(send, progress)
    assert 0 < sent_while_asleep[0] * size < 2 * WINDOW_BYTES < count * size
    assert seen == [f"text-{number}" for number in range(count)]


def test_records_do_not_pile_up_in_the_schedulers_memory(client2, gang):
    def kept(dask_scheduler):
        return sum(len(event) for topic in dask_scheduler._broker._topics.values() for _, event in topic.events)

    def look(record):
        if record.kind == "text" and record.data.name == "last":
            found.append(client2.run_on_scheduler(kept))

    def send():
        for number in range(1000):
            results.text(f"text-{number}", "x" * 30_000)
        results.text("last", "")
        dist.barrier()

    found = []
    gang(client2, on_record=look).run(send)
    assert len(found) == 2
    assert max(found) < WINDOW_BYTES


def test_files_of_every_rank_arrive_whole_whether_small_or_large(client2, run_into, tmp_path):
    def content(number, size):
        return hashlib.sha256(bytes([number])).digest() * (size // 32)

    def submit():
        results.submit(f"notes/from-{rank()}.txt", f"hello from {rank()}")
        results.submit(f"large/{rank()}.bin", content(rank(), 20_000_000))
        results.submit("notes/same.txt", "first")
        dist.barrier()

    run_into(client2, submit)
    files = files_under(tmp_path / "run")
    assert [files.pop(f"notes/from-{number}.txt") for number in (0, 1)] == [b"hello from 0", b"hello from 1"]
    assert [files.pop(f"large/{number}.bin") for number in (0, 1)] == [content(0, 20_000_000), content(1, 20_000_000)]
    assert files.pop("notes/same.txt") == b"first"
    listed = files.pop("submitted.txt").decode().splitlines()
    assert sorted(listed) == [f"{name}.bin" for name in ("large/0", "large/1")] + [
        f"notes/{name}.txt" for name in ("from-0", "from-1", "same")
    ]
    assert sorted(files) == ["logs/rank-0.log", "logs/rank-1.log"]


def test_a_rank_keeps_only_a_few_files_on_the_way(client2, run_into, tmp_path):
    def submit_many():
        most = 0
        for number in range(12):
            results.submit(f"{rank()}/{number}.bin", bytes(100_000))
            most = max(most, len(list(results._process.sender._outbox.iterdir())))
        return most

    assert max(run_into(client2, submit_many, slow_s=0.05)) <= 4
    assert len(list((tmp_path / "run").rglob("*.bin"))) == 24


def test_files_come_in_pieces_where_the_client_does_not_see_the_outbox(client2, gang, tmp_path):
    """As with a worker on another host: its path leads nowhere here."""

    def fetch(record):
        if record.kind == "file":
            elsewhere = f"/of/another/host/{Path(record.data.source).name}"
            other = msgspec.structs.replace(record.data, source=elsewhere)
            job.fetch(msgspec.structs.replace(record, data=other), tmp_path / str(record.rank))

    job = gang(client2, on_record=fetch)
    job.run(lambda: results.submit("large.bin", bytes([rank()]) * (2 * CHUNK_BYTES + 5)))
    for number in range(2):
        assert (tmp_path / str(number)).read_bytes() == bytes([number]) * (2 * CHUNK_BYTES + 5)


@pytest.mark.parametrize("path", ["../evil", "summary.json"])
def test_a_path_out_of_the_run_directory_or_into_its_own_files_is_refused(client2, run_into, tmp_path, path):
    with pytest.raises((RankFailed, RecordError), match=r"(?i)path|give a folder of its own"):
        run_into(client2, lambda: results.submit(path, "evil"))
    assert not [name for name in files_under(tmp_path) if "log" not in name]


def test_a_rank_that_does_not_ask_is_refused_by_the_client(client2, run_into, tmp_path):
    """A hostile rank skips the check on its own side."""

    def forge():
        file = File("good", 4, hashlib.sha256(b"evil").hexdigest(), inline="ZXZpbA==")
        msgspec.structs.force_setattr(file, "path", "../evil")
        results._process.sender.send(Record(file))

    with pytest.raises(RecordError, match="not allowed"):
        run_into(client2, forge)
    assert not [name for name in files_under(tmp_path) if "log" not in name]


def test_a_rank_cannot_have_the_client_copy_any_file_it_names(client2, run_into, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"key")

    def forge():
        results.emit(File("loot", 3, hashlib.sha256(b"key").hexdigest(), source=str(secret)))

    with pytest.raises((RecordError, FileNotFoundError)):
        run_into(client2, forge)
    assert not (tmp_path / "run" / "loot").exists()
    assert secret.read_bytes() == b"key"


def test_a_file_that_is_not_what_was_announced_is_not_put_in_place(client2, run_into, tmp_path):
    def forge():
        file = results.file_of("out/file.bin", b"good" * results.INLINE_BYTES)
        results.emit(msgspec.structs.replace(file, sha256="0" * 64))

    with pytest.raises(RecordError, match=r"damaged|changed on its way"):
        run_into(client2, forge)
    assert "out/file.bin" not in files_under(tmp_path / "run")


def test_what_a_rank_writes_to_its_terminal_is_in_its_log(client2, run_into, tmp_path):
    def say():
        print(f"out {rank()}")
        print(f"err {rank()}", file=sys.stderr)
        os.write(1, f"raw {rank()}\n".encode())
        os.system(f"echo child {rank()}")

    run_into(client2, say)
    for number in range(2):
        lines = (tmp_path / "run" / "logs" / f"rank-{number}.log").read_text().splitlines()
        assert lines[0].startswith(f"rank {number} of 2: ")
        assert lines[1:] == [f"{what} {number}" for what in ("out", "err", "raw", "child")]


def test_a_character_that_falls_between_two_reads_stays_one(client2, run_into, tmp_path):
    def talk():
        sys.stdout.write("x" + "\N{SNOWMAN}" * 200_000 + "\n")

    run_into(client2, talk)
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert log.count("\N{SNOWMAN}") == 200_000
    assert "\N{REPLACEMENT CHARACTER}" not in log


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV])
def test_the_last_words_before_a_crash_are_heard(client2, gang, heard, end):
    def die():
        print("the last line")
        sys.stderr.write("the very last words")
        sys.stderr.flush()
        if rank() == 1:
            os.kill(os.getpid(), end)
        time.sleep(60)

    with pytest.raises(RankFailed, match=rf"(?s)rank 1 .*{end.name}") as caught:
        gang(client2).run(die)
    assert "the last line\nthe very last words" in heard.output(1)
    assert "the last line" in caught.value.failure.last_output
    assert "the very last words" in str(caught.value) or end == signal.SIGSEGV


def test_records_of_a_rank_that_ends_at_once_all_arrive(client2, gang, heard):
    def log_and_leave():
        for step in range(2000):
            results.log({"value": 1.0}, step=step)
        os._exit(0)

    with pytest.raises(RankFailed, match="code 0"):
        gang(client2, ranks=1).run(log_and_leave)
    assert [record.step for record in heard.records if record.kind == "metrics"] == list(range(2000))


def test_records_outside_a_rank_say_where_they_belong():
    with pytest.raises(RecordError, match="outside a rank"):
        results.log({"value": 1.0}, step=1)
