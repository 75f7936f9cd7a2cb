"""How a batch of images is made, whatever they come from: threads, memory, chance, and plain data loaders."""

from __future__ import annotations

import errno
import io
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from ddp_hydra.data.images.dataset import ImageDataset, PreallocatedBatch
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.transforms import EvalTransform, TrainTransform
from ddp_hydra.errors import DataError
from ddp_hydra.storage.base import StaleCredentialsError, TemporaryError


def jpeg(number: int, size: int = 100) -> bytes:
    pixels = np.random.RandomState(number).randint(0, 255, (5, 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


FILES = [jpeg(number) for number in range(24)]


class Stored(ImageDataset):
    """Images in memory; what goes wrong with some is given."""

    def __init__(self, wrong: dict[int, Exception | bytes] | None = None, **images) -> None:
        super().__init__(**{"max_bad_fraction": 0.5, **images})
        self.targets = np.arange(len(FILES), dtype=np.int32) % 3
        self.classes = ["a", "b", "c"]
        self.wrong = wrong or {}
        self.fetched: list[int] = []

    def fetch(self, index: int) -> bytes:
        self.fetched.append(index)
        wrong = self.wrong.get(index, FILES[index])
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    def n_bytes(self, index: int) -> int:
        return len(FILES[index])

    def name(self, index: int) -> str:
        return f"image {index}"

    def where(self) -> str:
        return "memory"


def two_views(image):
    pixels = torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1)
    return [pixels, pixels.float()]


def in_a_dict(image, rng):
    return {"image": image, "mask": image[0], "flag": torch.tensor(1, dtype=torch.uint8)}


in_a_dict.thread_safe = True


class Exits(EvalTransform):
    def __call__(self, *_):
        raise SystemExit(3)


@pytest.fixture
def stored():
    """Make data sets that are closed at the end."""
    made = []

    def make(*arguments, **options) -> Stored:
        made.append(Stored(*arguments, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def test_a_batch_is_made_in_place_and_needs_no_collating(stored):
    data = stored(transform=EvalTransform(32))
    samples = data.__getitems__([3, 1, 4])
    assert isinstance(samples, PreallocatedBatch)
    images, targets = data.collate(samples)
    assert images.data_ptr() == samples[0][0].data_ptr()
    assert images.shape == (3, 3, 32, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.tolist() == [0, 1, 1]
    for image, index in zip(images, [3, 1, 4], strict=True):
        assert torch.equal(image, data[index][0])


@pytest.mark.medium
@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 7, "decoders": 1}, {"threads": 3, "decoders": 5}])
def test_chance_depends_on_seed_epoch_and_index_and_not_on_threads(stored, options):
    transform = TrainTransform(32, hue=0.2, erase=0.5)
    data, other = stored(transform=transform, seed=4), stored(transform=transform, seed=4, **options)
    batch = list(range(24))
    first, _ = data.collate(data.__getitems__(batch))
    assert torch.equal(first, other.collate(other.__getitems__(batch))[0])
    assert torch.equal(first.flip(0), data.collate(data.__getitems__(batch[::-1]))[0])
    data.set_epoch(1)
    assert not torch.equal(first, data.collate(data.__getitems__(batch))[0])
    another = stored(transform=transform, seed=5)
    assert not torch.equal(first, another.collate(another.__getitems__(batch))[0])


def test_many_are_fetched_at_a_time_and_few_decoded(stored, monkeypatch):
    data = stored(threads=24, decoders=2, transform=EvalTransform(32))
    at_once, most, lock = [0], [0], threading.Lock()
    decoded, fetch, all_fetch = data.make_image, data.fetch, threading.Barrier(24)
    monkeypatch.setattr(data, "fetch", lambda index: (all_fetch.wait(60), fetch(index))[1])

    def counting(*arguments):
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.005)
        try:
            return decoded(*arguments)
        finally:
            with lock:
                at_once[0] -= 1

    monkeypatch.setattr(data, "make_image", counting)
    data.__getitems__(range(24))
    assert most[0] == 2


def test_files_in_flight_stay_within_the_memory_given(stored):
    data = stored(threads=24, memory_mb=3.5 * max(map(len, FILES)) / 2**20, transform=EvalTransform(32))
    at_once, most, lock = [0], [0], threading.Lock()
    fetch = data.fetch

    def counting(index):
        with lock:
            at_once[0] += data.n_bytes(index)
            most[0] = max(most[0], at_once[0])
        time.sleep(0.005)
        try:
            return fetch(index)
        finally:
            with lock:
                at_once[0] -= data.n_bytes(index)

    data.fetch = counting
    data.__getitems__(range(24))
    assert 0 < most[0] <= data.memory_mb * 2**20
    alone = stored(threads=8, memory_mb=1e-6, transform=EvalTransform(32))  # of files larger than that, each is alone
    assert len(alone.__getitems__(range(24))) == 24


CLOSED = PermissionError(13, "Permission denied", "5.jpg")
LOOP = OSError(errno.ELOOP, "Too many levels of symbolic links", "5.jpg")


@pytest.mark.medium
@pytest.mark.parametrize(
    "wrong", [b"text", FILES[5][:300], b"", FileNotFoundError("gone"), PermissionError("403"), CLOSED, LOOP]
)
def test_what_cannot_be_read_is_replaced_by_the_next_and_named(stored, wrong):
    data = stored({5: wrong, 6: wrong}, transform=EvalTransform(32))
    data[0]
    image, target = data[5]
    assert torch.equal(image, stored(transform=EvalTransform(32))[7][0])
    assert target == 7 % 3
    assert sorted(data.bad) == ["image 5", "image 6"]
    assert data.stats()["bad_samples"] == 2
    fetched = len(data.fetched)
    data[5]
    assert len(data.fetched) <= fetched + 1  # the bad ones are not asked for again


def test_the_replacement_is_the_same_for_every_reader(stored):
    """So that what a run learns from does not depend on who read what, and in which order."""
    assert stored({23: b"text"}, transform=EvalTransform(32))[23][1] == 0  # the last is followed by the first
    data, other = (stored({5: b"text", 6: b"text"}, transform=TrainTransform(32)) for _ in range(2))
    other.__getitems__([6, 4])
    for reader in (other, pickle.loads(pickle.dumps(data)), pickle.loads(pickle.dumps(other))):
        assert torch.equal(data[5][0], reader[5][0])
        reader.close()


@pytest.mark.parametrize("error", [TemporaryError("503"), StaleCredentialsError("expired")])
def test_a_store_that_is_down_is_no_bad_sample(stored, error):
    data = stored({5: error}, transform=EvalTransform(32))
    data[0]
    with pytest.raises(type(error)):
        data[5]
    assert data.bad == {}
    data = stored({index: PermissionError("403") for index in range(24)})  # no access from the start
    with pytest.raises(PermissionError):
        data[5]


def test_a_file_that_may_not_be_read_is_a_bad_sample_also_as_the_first_one(stored):
    data = stored({5: CLOSED}, max_bad_fraction=0.5)
    data[5]
    assert len(data.bad) == 1


def test_nothing_readable_any_more_fails_and_says_so(stored):
    data = stored({index: PermissionError("403") for index in range(1, 24)})
    data[0]
    with pytest.raises(ValueError, match=r"\d\d of 24 samples of memory are bad.*data\.max_bad_fraction="):
        data.__getitems__(range(1, 24))


def test_what_it_cost_is_counted(stored):
    data = stored(transform=EvalTransform(32), cache_mb=1)
    data.__getitems__(range(10))
    data.__getitems__(range(12))
    stats = data.stats()
    assert (stats["samples"], stats["cache_hits"], stats["bad_samples"]) == (22, 10, 0)
    assert stats["decode_s"] > 0
    assert len(data.fetched) == 12


def batches(data, **options) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = DataLoader(data, batch_size=8, **options)
    return [(images.clone(), targets.clone()) for images, targets in loader]


def same(some, others) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) for batch, other in zip(some, others, strict=True) for a, b in zip(batch, other, strict=True)
    )


def test_a_plain_data_loader_reads_it(stored):
    data = stored(transform=TrainTransform(32))
    plain = batches(data)
    assert len(plain) == 3
    assert same(plain, batches(data, collate_fn=data.collate))


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        ({"threads": 0}, r"threads is 0.*data\.threads="),
        ({"decoders": 0}, r"decoders is 0.*data\.decoders="),
        ({"max_bad_fraction": 2}, r"data\.max_bad_fraction="),
    ],
)
def test_a_value_that_cannot_be_is_refused(arguments, typed):
    with pytest.raises(ValueError, match=typed):
        Stored(**arguments)


def test_a_transform_that_exits_is_no_batch_that_never_comes(stored):
    data = stored(threads=8, transform=Exits(32))
    for _ in range(2):
        with pytest.raises(SystemExit):
            data.__getitems__([0, 1, 2])


@pytest.mark.medium
def test_a_transform_that_takes_no_image_of_many_is_told():
    def refuses(image):
        raise ValueError("the image is too small")

    class Large(Stored):
        def fetch(self, index: int) -> bytes:
            return FILES[index % len(FILES)]

        n_bytes = ImageDataset.n_bytes

    data = Large(transform=refuses, max_bad_fraction=0.01)
    data.targets = np.zeros(200_000, np.int32)
    with pytest.raises(ValueError, match=r"100 images in a row of memory can't be read: image 0 \(the image is too"):
        data.__getitems__([0])
    data.close()


@pytest.mark.parametrize("transform", [two_views, in_a_dict])
def test_a_transform_may_return_several_tensors(transform):
    data = Stored(transform=transform)
    assert data.scaling == ""
    expected, classes = default_collate([data[index] for index in range(3)])
    assert classes.tolist() == [0, 1, 2]
    ((views, found),) = Loader(data, torch.device("cpu")).load([[0, 1, 2]])
    assert found.tolist() == classes.tolist()
    assert type(views) is type(expected)
    first, *others = views.values() if isinstance(views, dict) else views
    wanted, *unchanged = expected.values() if isinstance(expected, dict) else expected
    assert torch.equal(first, data.prepare((wanted, classes))[0])
    assert first.dtype == torch.float32
    assert all(map(torch.equal, others, unchanged))
    data.close()


def test_a_transform_that_returns_no_tensor_is_told():
    data = Stored(transform=lambda image: image.resize((8, 8)))
    said = r"the samples of Stored make no batch, as part 1 of a sample is a Image: let its transforms return tensors"
    with pytest.raises(DataError, match=said):
        next(Loader(data, torch.device("cpu")).load([[0, 1]]))
    data.close()
