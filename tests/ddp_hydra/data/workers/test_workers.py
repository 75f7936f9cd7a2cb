"""Workers of torch's DataLoader make what the process itself would make, and say what they have learned."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from ddp_hydra.data import draws
from ddp_hydra.data.draws import Indices
from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.mix import Mix
from ddp_hydra.data.samplers import Distributed
from ddp_hydra.data.transforms import TrainTransform
from ddp_hydra.data.workers import InWorkers, helper, with_workers
from ddp_hydra.data.workers.context import Queue
from ddp_hydra.data.workers.loader import number_of
from ddp_hydra.data.workers.worker import SharedBatch
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError, DataError
from tests.ddp_hydra.data.workers import sets
from tests.ddp_hydra.data.workers.sets import (
    Announced,
    Drawing,
    Ends,
    Leaving,
    Noisy,
    Permuted,
    RawFile,
    Row,
    Rows,
    Unpicklable,
    Unreadable,
    Wordy,
)  # fmt: skip

CPU = torch.device("cpu")
pytestmark = pytest.mark.medium


@pytest.fixture(scope="module", autouse=True)
def one_helper():
    """One helper for all tests of this module, as importing torch takes seconds; it ends with them."""
    kept = helper.current()
    yield
    assert helper.current() is kept


@pytest.fixture
def loader():
    """Return the loader of a data set with workers, which end with the test."""
    made = []

    def of(data, number=2, **options) -> Loader:
        said: list[str] = []
        made.append(with_workers(number, data, False, said.append))
        one = Loader(made[-1], CPU, warn=said.append, **options)
        one.said = said
        return one

    yield of
    for data in made:
        if hasattr(data, "close"):
            data.close()


def batches(n: int, size: int = 2, epoch: int = 0) -> list[Indices]:
    return [Indices(range(first, first + size), epoch) for first in range(0, n, size)]


def test_batches_come_in_order_from_all_workers_pass_after_pass(loader):
    one = loader(Rows())
    for epoch in (0, 1):
        found = list(one.load(batches(40, epoch=epoch)))
        assert [batch.row[0, 0, 0].item() for batch in found] == list(range(0, 40, 2))
        assert tuple(found[3].text) == ("row 6", "row 7")
        assert isinstance(found[3], Row)
        there = found[1:] if epoch == 0 else found  # the first one of all says how large they are
        assert {batch.epoch[0].item() for batch in there} == {epoch}
        assert len({batch.pid[0].item() for batch in there} - {os.getpid()}) == 2
    for pid in {batch.pid[0].item() for batch in found} - {os.getpid()}:  # these go to the whole group
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    left = one.load(batches(40))
    next(left)
    left.close()
    assert [batch.row[0, 0, 0].item() for batch in one.load(batches(8))] == [0, 2, 4, 6]
    assert list(one.load([])) == []
    sizes = (1, 10, 2, 100, 3)
    found = list(one.load([Indices(range(100 - size, 100)) for size in sizes]))
    assert [batch.row[:, 0, 0].tolist() for batch in found] == [list(range(100 - size, 100)) for size in sizes]
    found[1].row.zero_()  # a batch may be written to
    told = list(loader(Announced()).load(batches(22)))  # each worker is told what it will read
    assert [batch.told[0].item() for batch in told[1:]] == [10, 10] * 5


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


@pytest.mark.parametrize("own", [True, False])
def test_workers_make_the_images_that_threads_make(loader, photos, own):
    found = {}
    for workers in (0, 2):
        transform = TrainTransform(32) if own else Noisy()
        images = S3ImageFolder(f"file://{photos}", "train", transform, max_bad_fraction=0.1)
        one = loader(images, workers)
        data = one.dataset
        for epoch in (0, 1):
            data.set_epoch(epoch)
            found[workers, epoch] = list(one.load(batches(40, 8, epoch)))
        assert data.bad == {"train/cats/03.jpg": "not an image: the file starts with b'nothing'"}
        assert data.error_of(3) == data.bad["train/cats/03.jpg"]
        assert data.error_of(4) == ""
        assert data.classes == ["cats", "dogs"]
        assert data.stats()["samples"] == 80
        assert data.stats()["bad_samples"] == 1
    for epoch in (0, 1):
        for (x, y), (of_threads, targets) in zip(found[2, epoch], found[0, epoch], strict=True):
            assert torch.equal(x, of_threads)
            assert x.stride() == of_threads.stride()
            assert torch.equal(y, targets)
    assert not torch.equal(found[2, 0][0][0], found[2, 1][0][0])


def test_workers_draw_what_the_process_itself_would_draw(loader):
    order = Distributed(96, 8, seed=3)
    right = [torch.stack(list(map(torch.Tensor.double, one))) for one in Loader(Drawing(), CPU, seed=7).load(
        order.batches(1)
    )]  # fmt: skip
    torch.manual_seed(4)
    expected = torch.rand(())
    torch.manual_seed(4)
    for number in (1, 2):
        loaded = loader(Drawing(), number, seed=7).load(order.batches(1))
        found = [torch.stack(list(map(torch.Tensor.double, one))) for one in loaded]
        assert all(map(torch.equal, found, right))
    assert torch.equal(torch.rand(()), expected)


def test_workers_make_the_batches_of_a_mixture(loader):
    def read(workers: int) -> list[list]:
        data = look_into(Mix({"one": Drawing(6), "two": Drawing(4)}, {"two": 2}))
        one, sampler = loader(data, workers, seed=1), Distributed(1, 3, seed=1, mixture=data.mixture)
        made = [batch for epoch in range(2) for batch in one.load(sampler.batches(epoch, 3 * epoch))]
        return [part.tolist() for batch in made for part in batch]

    assert read(2) == read(0)


def test_an_order_that_a_data_set_draws_for_an_epoch_is_one_everywhere_and_disturbs_nothing(loader):
    torch.manual_seed(4)
    expected = torch.rand(())
    for epoch in (0, 1):
        torch.manual_seed(epoch)  # each rank has drawn something else before
        data = Permuted()
        draws.tell_epoch(data, epoch, 7)
        assert sorted(data.order) == list(range(96))
        found = torch.cat(list(loader(data, 2, seed=7).load(batches(96, 8, epoch)))).tolist()
        assert found == data.order
    torch.manual_seed(4)
    draws.tell_epoch(Permuted(), 5, 7)
    assert torch.equal(torch.rand(()), expected)


def test_an_error_has_the_frames_of_the_user(loader):
    one = loader(Rows(bad=4))
    with pytest.raises(KeyError, match="row 4 is not there") as caught:
        list(one.load(batches(8)))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.name) == (sets.__file__, "__getitem__")
    assert "raise KeyError(f" in (last.line or "")
    assert "in a worker of the DataLoader (data.workers)" in caught.value.__notes__
    assert len(list(one.load(batches(4)))) == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("how", "said"), [("exits", r"calls sys\.exit\(\)"), ("stops", "raises StopIteration")])
def test_a_data_set_that_ends_the_reading_is_named_with_the_sample_and_its_own_line(loader, workers, how, said):
    one = loader(Ends(how), workers)
    with pytest.raises(DataError, match=rf"Ends {said} where it is asked for sample 4 \(.*sets\.py, line \d+, in"):
        list(one.load(batches(8)))


def test_workers_have_the_files_that_a_data_set_has_opened_and_are_told_of_it(tmp_path):
    before = helper.open_files()
    data = RawFile(tmp_path / "file")
    assert helper.open_files() - before == set(data.files)
    kept = with_workers(2, data, False, print, data.files)
    try:
        first, *others = Loader(kept, CPU).load(batches(24))
    finally:
        kept.close()
    assert [part.tolist() for part, _ in (first, *others)] == [[n, n + 1] for n in range(0, 24, 2)]
    assert all(told.all() for _, told in others)
    said: list[str] = []
    assert with_workers(2, data, False, said.append, range(100, 150)) is data
    assert "it has 50 files open, and a worker takes 40" in said[0]
    for fd in data.files:
        os.close(fd)


def test_a_file_that_was_closed_since_the_data_set_was_built_does_not_hinder_workers(tmp_path):
    data = RawFile(tmp_path / "file")
    closed = os.open(tmp_path / "file", os.O_RDONLY)
    kept = with_workers(1, data, False, print, [*data.files, closed])
    os.close(closed)
    try:
        assert next(Loader(kept, CPU).load(batches(4)))[0].tolist() == [0, 1]
    finally:
        kept.close()
    for fd in data.files:
        os.close(fd)


def test_a_file_that_the_rank_has_mapped_is_mapped_in_workers(loader, tmp_path):
    one = loader(sets.Mapped(tmp_path / "rows.npy"))
    assert len(one.dataset.pickled) < 100 * 8
    values, names, pids = zip(*list(one.load(batches(40)))[1:], strict=True)
    assert torch.cat(values).tolist() == list(range(2, 40))
    assert {name for names_of_batch in names for name in names_of_batch} == {str(tmp_path / "rows.npy")}
    assert os.getpid() not in torch.cat(pids).tolist()


def test_what_a_data_set_starts_can_be_ended(loader):
    found = list(loader(sets.Ending()).load(batches(8)))
    assert len(found) == 4
    assert all([one.tolist() for one in batch.told] == [[-15] * len(batch.row)] * 2 for batch in found)


def test_a_worker_that_is_killed_is_named(loader):
    with pytest.raises(ConnectionError, match=r"has ended by signal 9; .* data\.workers or data\.memory_mb"):
        list(loader(Rows(dies=9)).load(batches(20)))


@pytest.mark.slow
def test_workers_whose_helper_is_killed_are_told_apart(monkeypatch, loader):
    monkeypatch.setattr(helper, "_current", lambda: None)  # the other tests go on with theirs
    one = loader(Rows(), 1)
    loaded = one.load(batches(600))
    for _ in range(2):
        next(loaded)
    parent = psutil.Process(one.workers.context.started[0].pid).parent()
    parent.kill()
    with pytest.raises(ConnectionError, match=r"has ended with the process that starts them; somebody has killed that"):
        list(loaded)
    assert helper.current() is not one.workers.context.helper, "the next pass has another"


@pytest.mark.slow
def test_a_helper_that_no_workers_use_ends(monkeypatch, loader):
    monkeypatch.setattr(helper, "_current", lambda: None)  # the other tests go on with theirs
    one = loader(Rows(), 1)
    assert len(list(one.load(batches(8)))) == 4
    parent = psutil.Process(one.workers.context.started[0].pid).parent()
    one.dataset.close()
    one.workers = None
    gc.collect()
    assert not parent.is_running()


@pytest.mark.slow
def test_a_worker_that_ends_itself_is_named(loader):
    with pytest.raises(ConnectionError, match=r"has ended with code 0; what it printed stands above"):
        list(loader(Leaving()).load(batches(20)))


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_sends_is_named(loader):
    one = loader(Wordy(), 1)
    loaded = one.load(batches(60))
    for _ in range(2):
        next(loaded)
    time.sleep(0.5)  # it sends what nobody takes yet
    os.kill(one.workers.context.started[0].pid, signal.SIGKILL)
    with pytest.raises(ConnectionError, match=r"has ended by signal 9"):
        list(loaded)


def test_a_rank_without_room_for_batches_says_so():
    sent = Queue()
    sent.put(SharedBatch(torch.ones(3)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="may open 3 files, too few"):
            sent.get(timeout=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_child_of_another_stays_the_others(loader):
    one = loader(Rows())
    list(one.load(batches(8)))
    pid = os.fork()
    if not pid:
        os._exit(7)
    one.dataset.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize(
    ("data", "why"), [(Unpicklable(), "Unpicklable can't be pickled, so"), (Unreadable(), "unpickled in a worker, so")]
)
def test_what_can_not_be_pickled_stays_here(loader, data, why):
    one = loader(data)
    found = list(one.load(batches(12)))
    assert [batch.row[0, 0, 0].item() for batch in found] == list(range(0, 12, 2))
    assert {batch.pid[0].item() for batch in found} == {os.getpid()}
    (said,) = one.said
    assert why in said


def test_quick_batches_have_no_workers_unless_they_are_asked_for():
    data = with_workers(None, Rows(), True, print)
    assert isinstance(data, InWorkers)
    one = Loader(data, CPU)
    one._quickest_s = 0.0
    assert len(list(one.load(batches(12)))) == 6
    assert one.workers is None


def test_batches_made_ahead_stay_within_the_memory_given(loader):
    for memory_mb, number, factor in ((100, 2, 4), (330 / 2**20, 2, 2), (100 / 2**20, 1, 1)):
        one = loader(Rows(), memory_mb=memory_mb)
        list(one.load(batches(4)))
        assert (one.workers.number, one.workers.loader.prefetch_factor) == (number, factor)


@pytest.mark.parametrize(
    ("cores", "ranks", "own", "images"), [(16, 1, 8, 4), (64, 1, 8, 4), (4, 2, 1, 1), (1, 1, 1, 1)]
)
def test_on_gpus_the_number_goes_by_the_cores(monkeypatch, cores, ranks, own, images):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert number_of(None, Rows(), to_gpu=True) == own
    assert number_of(None, SimpleNamespace(share=print), to_gpu=True) == images
    assert number_of(None, Rows(), to_gpu=False) == 0
    assert number_of(3, Rows(), to_gpu=False) == 3
    for given in (-1, 1.5, "two", True):
        with pytest.raises(ConfigError, match=r"data\.workers=.*: give a whole number"):
            number_of(given, Rows(), to_gpu=False)
