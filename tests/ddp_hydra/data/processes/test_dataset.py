from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.processes import InProcesses, Processes, made_by
from ddp_hydra.data.processes import dataset as dataset_module
from ddp_hydra.data.transforms import TrainTransform
from ddp_hydra.data.wids import WidsShards
from ddp_hydra.errors import ConfigError
from tests.support.tar_server import described, index_of, numbered, serving

CPU = torch.device("cpu")
READY_S = 60


class Rows:
    """Sample i is a row of i, and who made it."""

    def __init__(self, n: int = 100, bad: int | None = None) -> None:
        self.n, self.bad_index = n, bad
        self.epoch = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == self.bad_index:
            raise KeyError(f"row {index} is not there")
        row = torch.full((3, 2), index, dtype=torch.int16)
        return {"row": row, "pid": os.getpid(), "epoch": self.epoch, "noise": random.random()}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Unpicklable(Rows):
    """Holds what can't be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Unreadable(Rows):
    """Can be pickled, and not unpickled."""

    def __setstate__(self, state: dict) -> None:
        raise OSError("not here")


class Dies(Rows):
    """Kills the process that reads it."""

    def __getitem__(self, index: int) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Breaks(Rows):
    """Fails in another process, between two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if os.getpid() != self.home and epoch == 2:
            raise OSError("the disk is gone")


class Announced(Rows):
    """Wants to know what will be read."""

    announced = ()

    def expect(self, indices: list[int]) -> None:
        self.announced = tuple(indices)

    def __getitem__(self, index: int) -> dict[str, object]:
        return super().__getitem__(index) | {"announced": len(self.announced)}


class Shards(WidsShards):
    """Says with each sample how many shards are still needed where it was read."""

    def __getitem__(self, index: int) -> dict[str, object]:
        number = int(super().__getitem__(index)[".cls"])
        return {"number": number, "needed": len(self._cache._cached.prefetcher.needed())}


@pytest.fixture
def opened():
    """Return a data set in processes, which end with the test."""
    all_opened = []

    def open_(dataset, number=1, **options) -> InProcesses:
        all_opened.append(made_by(Processes(number, **options), dataset))
        return all_opened[-1]

    yield open_
    for one in all_opened:
        one.close()


def ready(dataset: InProcesses) -> InProcesses:
    """Start the processes, and wait until all are ready."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(1)
    assert dataset._remotes
    assert all(remote.begun.wait(READY_S) for remote in dataset._remotes)
    return dataset


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A folder of two classes with twenty images each; one is none."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (root / "train" / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 255, (80, 100, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "train" / name / f"{number:02d}.jpg", quality=90)
    (root / "train" / "cats" / "03.jpg").write_bytes(b"nothing")
    return root


def folder(photos: Path, **options) -> S3ImageFolder:
    return S3ImageFolder(f"file://{photos}", "train", TrainTransform(32), max_bad_fraction=0.1, **options)


BATCHES = [list(range(first, first + 8)) for first in range(0, 40, 8)]


@pytest.mark.medium
@pytest.mark.parametrize("number", [1, 2])
def test_processes_make_the_batches_that_threads_make(opened, photos, number):
    found = {}
    for count in (0, number):
        dataset = opened(folder(photos), count)
        loader = Loader(dataset, CPU, channels_last=True)
        if count:
            ready(dataset)
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            found[count, epoch] = list(loader.load(BATCHES))
        assert dataset.bad == {"train/cats/03.jpg": "not an image: the file starts with b'nothing'"}
        assert dataset.error_of(3) == dataset.bad["train/cats/03.jpg"]
        assert dataset.error_of(4) == ""
        assert dataset.classes == ["cats", "dogs"]
        stats = dataset.stats()
        assert stats["samples"] == 80
        assert stats["bad_samples"] == 1
    for epoch in (0, 1):
        for (x, y), (of_threads, targets) in zip(found[number, epoch], found[0, epoch], strict=True):
            assert torch.equal(x, of_threads)
            assert x.stride() == of_threads.stride()
            assert torch.equal(y, targets)
    assert not torch.equal(found[number, 0][0][0], found[number, 1][0][0])


@pytest.mark.medium
def test_the_first_batches_do_not_wait_for_the_process(opened, monkeypatch):
    dataset = opened(Rows())
    dataset.set_epoch(3)
    monkeypatch.setattr(dataset._remotes[0].begun, "is_set", lambda: False)
    here = dataset.__getitems__([1, 2])
    assert here["pid"].tolist() == [os.getpid()] * 2
    monkeypatch.undo()
    there = ready(dataset).__getitems__([1, 2])
    assert set(there["pid"].tolist()) == {dataset._remotes[0].process.pid}
    assert there["row"].tolist() == here["row"].tolist()
    dataset.set_epoch(5)
    assert dataset.__getitems__([1, 2])["epoch"].tolist() == [5, 5]
    assert dataset.dataset.epoch == 5


@pytest.mark.medium
def test_several_processes_share_the_batches_and_have_seeds_of_their_own(opened):
    dataset = ready(opened(Rows(), 2, seed="7/0"))
    loaded = list(Loader(dataset, CPU).load([[index, index + 1] for index in range(0, 60, 2)]))
    assert [batch["row"][0, 0, 0].item() for batch in loaded] == list(range(0, 60, 2))
    pids = {remote.process.pid for remote in dataset._remotes}
    assert {batch["pid"][0].item() for batch in loaded} == pids
    noise = [value.item() for batch in loaded for value in batch["noise"]]
    assert len(set(noise)) == len(noise)
    first = random.Random(random.Random("7/0/0").getrandbits(32)).random()
    assert first in noise


@pytest.mark.medium
def test_who_waits_for_a_batch_hears_that_samples_are_read(opened):
    reports = []
    dataset = ready(opened(Rows()))
    dataset.progress = lambda: reports.append(None)
    dataset.__getitems__([1, 2])
    assert reports
    dataset.close()
    reports.clear()
    dataset.__getitems__([1, 2])  # here
    assert len(reports) == 3


@pytest.mark.medium
def test_batches_may_grow_and_shrink(opened):
    dataset = ready(opened(Rows()))
    for size in (1, 10, 2, 100, 3, 100):
        rows = dataset.__getitems__(range(100 - size, 100))["row"]
        assert rows[:, 0, 0].tolist() == list(range(100 - size, 100))
    assert len(dataset._remotes[0]._memory) == 1


@pytest.mark.medium
def test_who_wants_to_know_what_will_be_read_waits_for_the_process(opened):
    dataset = opened(Announced())
    (batch,) = Loader(dataset, CPU).load([[4, 5, 6]])
    assert batch["pid"][0].item() == dataset._remotes[0].process.pid
    assert batch["announced"].tolist() == [3, 3, 3]


@pytest.mark.integration
def test_each_process_learns_what_of_a_shard_another_one_reads(opened, monkeypatch, tmp_path):
    with serving() as server:
        server.add(a=numbered(0, 4), b=numbered(4, 8))
        server.files["/index.json"] = index_of(*(described(f"{name}.tar", 4) for name in "ab"))
        shards = Shards(f"{server.url}/index.json", cache_dir=tmp_path, prefetch_shards=0)
        dataset = opened(shards, 2)
        for _ in range(2):
            dataset.expect(range(8))
            monkeypatch.setattr(dataset, "_remote", itertools.cycle(dataset._remotes).__next__)
            read = [dataset.__getitems__([index]) for index in range(8)]
            assert [one["number"].item() for one in read] == list(range(8))
            assert [one["needed"].item() for one in read] == [2, 2, 2, 1, 1, 1, 1, 0]


@pytest.mark.medium
def test_an_error_of_the_data_set_is_raised_and_says_where_it_was(opened):
    dataset = ready(opened(Rows(bad=4)))
    with pytest.raises(KeyError, match="row 4 is not there") as caught:
        dataset.__getitems__([3, 4])
    assert "in __getitem__" in caught.value.__notes__[0]
    assert dataset.__getitems__([5])["row"][0, 0, 0] == 5


@pytest.mark.medium
def test_a_process_that_is_killed_is_named_and_its_end_is_an_error(opened):
    dataset = ready(opened(Dies()))
    with pytest.raises(ConnectionError, match=r"has ended by signal 9; .* data\.memory_mb"):
        dataset.__getitems__([1])
    with pytest.raises(ConnectionError, match="has ended by signal 9"):
        dataset.__getitems__([1])


@pytest.mark.medium
def test_what_breaks_a_process_between_batches_is_printed(opened, capfd):
    dataset = ready(opened(Breaks()))
    dataset.set_epoch(2)
    process = dataset._remotes[0].process
    assert process.wait(READY_S) == 1
    with pytest.raises(ConnectionError, match=r"has ended with code 1; what it printed stands above"):
        dataset.__getitems__([1])
    assert "OSError: the disk is gone" in capfd.readouterr().err


@pytest.mark.medium
def test_a_process_ends_with_the_data_set_and_with_the_one_that_started_it(opened):
    dataset = opened(Rows())
    dataset.set_epoch(1)
    process = dataset._remotes[0].process
    for _ in range(2):  # while it imports torch, and later
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        assert ready(dataset).__getitems__([1])["pid"][0] == process.pid
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    dataset.close()
    assert process.returncode == 0
    other = ready(opened(Rows()))._remotes[0]
    with socket.socket(fileno=os.dup(other._connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)  # as the kernel does when a process is killed
    assert other.process.wait(READY_S) == 0


def test_a_process_that_has_not_begun_is_not_waited_for(opened, monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(["sleep", "600"], **options))  # reads nothing
    dataset = opened(Rows())
    dataset.dataset.table = bytes(2**22)  # no socket takes so much at once
    dataset.set_epoch(1)
    process = dataset._remotes[0].process
    dataset.close()
    assert process.returncode == -signal.SIGKILL


def test_what_can_not_be_pickled_is_refused_where_processes_were_asked_for(opened):
    dataset = opened(Unpicklable(), 2)
    with pytest.raises(ConfigError, match=r"data\.processes=2 can't make batches of Unpicklable: .*data\.processes=0"):
        dataset.set_epoch(0)


@pytest.mark.medium
@pytest.mark.parametrize(("dataset", "why"), [(Unpicklable(), "can't be pickled"), (Unreadable(), "OSError: not here")])
def test_else_threads_make_its_batches(opened, capsys, monkeypatch, dataset, why):
    monkeypatch.setattr(type(dataset), "read_apart", True, raising=False)
    there = opened(dataset, None, to_gpu=True)
    assert isinstance(there, InProcesses)
    there.set_epoch(0)
    for remote in there._remotes:
        assert remote.begun.wait(READY_S)
    assert there.__getitems__([1])["pid"].tolist() == [os.getpid()]
    assert why in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(16, 1, 4), (64, 1, 4), (16, 2, 2), (4, 1, 1), (2, 1, 1), (16, 8, 1)]
)
def test_on_gpus_a_rank_has_a_process_for_every_four_cores(monkeypatch, cores, ranks, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    images = type("Images", (Rows,), {"read_apart": True})()
    assert Processes(None, to_gpu=True).of(images) == count
    assert Processes(None, to_gpu=False).of(images) == 0
    assert Processes(None, to_gpu=True).of(Rows()) == 0
    assert Processes(0, to_gpu=True).of(images) == 0
    assert Processes(3).of(Rows()) == 3


@pytest.mark.parametrize("number", [-1, 1.5, "two"])
def test_a_number_that_is_none_is_refused(number):
    with pytest.raises(ConfigError, match=r"data\.processes is .*, and must be a whole number"):
        Processes(number)


def test_an_iterable_data_set_is_refused_where_processes_were_asked_for():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(ConfigError, match=r"Stream is iterable: leave data\.processes out"):
        made_by(Processes(1), Stream())
    assert isinstance(made_by(Processes(None, to_gpu=True), Stream()), Stream)


def test_without_processes_the_data_set_is_itself():
    rows = Rows()
    assert made_by(Processes(0), rows) is rows
    assert made_by(Processes(1), None) is None


def test_each_process_has_its_part_of_threads_and_memory(monkeypatch, photos):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    dataset = folder(photos, threads=30, memory_mb=200, cache_mb=40)
    dataset.share(4)
    assert (dataset.threads, dataset.decoders, dataset.memory_mb, dataset.cache_mb) == (8, 4, 50, 10)
    assert dataset_module.MOST == 4
