"""torch's Subset, random_split and ConcatDataset keep what the data set inside offers."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    random_split,
)

from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.streams import Part
from ddp_hydra.data.threads import is_thread_safe
from ddp_hydra.data.transforms import EvalTransform, TrainTransform
from ddp_hydra.data.wrappers import is_stream, look_into, own_getitems
from ddp_hydra.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "all" / name).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "all" / name / f"{number}.png")
    (tmp_path / "all" / "cats" / "1.png").write_bytes(b"nothing")
    return tmp_path


def folder(photos: Path, transform=None, **options) -> S3ImageFolder:
    return S3ImageFolder(f"file://{photos}", "all", transform or EvalTransform(16), max_bad_fraction=0.5, **options)


@pytest.mark.parametrize("nested", [False, True])
def test_a_subset_offers_what_is_inside(photos, nested):
    inside = folder(photos, TrainTransform(16))
    data = Subset(inside, [7, 1, 4])
    data = look_into(Subset(data, [0, 1, 2]) if nested else data)
    data.set_epoch(3)
    (x, y), *_ = Loader(data, CPU).load([[0, 1, 2]])
    (right, targets), *_ = Loader(inside, CPU).load([[7, 1, 4]])
    assert x.dtype == torch.float32
    assert torch.equal(x, right)
    assert y.tolist() == targets.tolist() == [1, 0, 1]
    assert data.classes == ["cats", "dogs"]
    assert data.targets.tolist() == [1, 0, 1]
    assert [data.sample_id(index) for index in range(3)] == [inside.sample_id(index) for index in (7, 1, 4)]
    assert list(data.bad) == ["all/cats/1.png"]
    assert data.error_of(1)
    assert not data.error_of(0)
    assert data.stats()["samples"] == 6
    assert data.max_bad_fraction == 0.5
    assert is_thread_safe(data)
    assert len(pickle.loads(pickle.dumps(data))) == 3
    data.close()


def test_a_concatenation_offers_what_its_parts_have_alike(photos):
    parts = [folder(photos), Subset(folder(photos), [6, 2])]
    data = look_into(ConcatDataset(parts))
    (x, y), *_ = Loader(data, CPU).load([[9, 0, 8, 7]])
    assert x.dtype == torch.float32
    assert y.tolist() == [0, 0, 1, 1]
    assert data.targets.tolist() == [0] * 4 + [1] * 4 + [1, 0]
    assert data.classes == ["cats", "dogs"]
    assert data.sample_id(9) == "all/cats/2.png"
    data.close()
    with pytest.raises(ConfigError, match=r"the parts of this ConcatDataset \(S3ImageFolder\) make batches by"):
        look_into(ConcatDataset([folder(photos), folder(photos, mean=[0, 0, 0])]))


class Rows(Dataset):
    def __init__(self, n=6):
        self.shard_lengths = [n // 2, n - n // 2]
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


def padded(samples, value=0):
    return samples


class Padding:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, samples):
        return samples


class Named(NamedTuple("Named", [("value", Any)])):
    __call__ = Padding.__call__


class Slotted(Padding):
    __slots__ = ("slot",)

    def __init__(self, value: Any) -> None:
        self.slot = value


@pytest.mark.parametrize("kind", [Named, Slotted])
def test_parts_with_settings_outside_of_attributes_do_not_share_a_collate(kind):
    data = ConcatDataset(parts := [Rows(), Rows()])
    for number, part in enumerate(parts):
        part.collate = kind(number)
    with pytest.raises(ConfigError, match=r"make batches by a collate\(\) of their own"):
        look_into(data)


@pytest.mark.parametrize("name", ["collate", "prepare"])
@pytest.mark.parametrize("make", [lambda value: partial(padded, value=value), Padding])
@pytest.mark.parametrize(("values", "is_common"), [((1, 1), True), ((1, 2), False), ((*np.ones((2, 2)),), False)])
def test_parts_share_what_a_config_makes_for_each_by_the_same_settings(name, make, values, is_common):
    data = ConcatDataset(parts := [Rows(), Rows()])
    for part, value in zip(parts, values, strict=True):
        setattr(part, name, make(value))
    if is_common:
        assert getattr(look_into(data), name)([5]) == [5]
        return
    with pytest.raises(ConfigError, match=rf"the parts of this ConcatDataset \(Rows\) make batches by a {name}\(\)"):
        look_into(data)


def test_shards_of_a_subset_are_the_runs_in_one_shard():
    assert look_into(Subset(Rows(), [0, 1, 4, 5, 2])).shard_lengths == [2, 2, 1]
    assert look_into(ConcatDataset([Rows(2), Rows(4)])).shard_lengths == [1, 1, 2, 2]


def test_what_the_user_sets_on_a_wrapper_goes_before():
    first, _ = random_split(Rows(), [4, 2])
    first.num_classes = 7
    first.collate = lambda samples: ("mine", len(samples))
    data = look_into(first)
    assert data.num_classes == 7
    assert list(Loader(data, CPU).load([[0, 1]])) == [("mine", 2)]
    assert not hasattr(data, "prepare")
    assert not is_thread_safe(data)


def test_a_batch_is_the_data_sets_own_where_it_makes_one():
    class Whole(Rows):
        def __getitems__(self, indices):
            return [-index for index in indices]

    assert own_getitems(look_into(Subset(Whole(), [3, 5])))
    assert not own_getitems(look_into(Subset(Rows(), [3])))
    assert not own_getitems(StackDataset(Rows(), Rows()))
    assert not own_getitems(look_into(Subset(StackDataset(Rows(), Rows()), [1])))
    assert [x.tolist() for x in Loader(look_into(Subset(Whole(), [3, 5])), CPU).load([[1, 0]])] == [[-5, -3]]


def test_thread_safe_is_what_says_so_itself(photos):
    class Other(S3ImageFolder):
        def target(self, index):
            return 0

    assert is_thread_safe(folder(photos))
    assert not is_thread_safe(folder(photos, lambda image: image))
    assert not is_thread_safe(folder(photos, target_transform=float))
    assert not is_thread_safe(Other(f"file://{photos}", "all", EvalTransform(16)))
    assert not is_thread_safe(Rows())


def test_one_thread_at_a_time_reads_a_data_set_and_transforms_its_images(photos):
    threads = set()

    class Noting(Rows):
        def __getitem__(self, index):
            threads.add(threading.current_thread())
            return index

        def collate(self, samples):
            threads.add(threading.current_thread())
            return samples

    list(Loader(Noting(), CPU).load([[0, 1], [2, 3]]))

    def note(image):
        threads.add(threading.current_thread())
        return np.array(image.resize((4, 4))).transpose(2, 0, 1)

    data = folder(photos, note)
    list(Loader(data, CPU).load([[0, 1], [4, 5]]))
    data.close()
    assert threads == {threading.main_thread()}


class Flipped(Dataset):
    """A wrapper of a user, as many write it for the two parts of a random_split."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        return x.flip(-1), y


@pytest.mark.parametrize("split", [False, True])
def test_a_users_wrapper_passes_on_what_a_data_set_inside_is_told_and_counts(photos, split):
    inside = folder(photos, TrainTransform(16))
    data = look_into(Flipped(Subset(inside, list(range(8))) if split else inside))
    for epoch in (0, 1):
        data.set_epoch(epoch)
        (x, y), *_ = Loader(data, CPU).load([[7, 1, 4]])
        (right, targets), *_ = Loader(inside, CPU).load([[7, 1, 4]])
        assert torch.equal(x, right.flip(-1))
        assert torch.equal(y, targets)
    assert list(data.bad) == ["all/cats/1.png"]
    assert data.max_bad_fraction == 0.5
    assert data.stats()["samples"] == 12
    assert not hasattr(data, "classes")  # the wrapper may have changed the targets
    assert not is_thread_safe(data)
    assert len(pickle.loads(pickle.dumps(data))) == 8
    data.close()


class Scaled(Rows):
    seen = 0

    def __getitem__(self, index):
        return torch.tensor([index], dtype=torch.uint8), 0

    def prepare(self, batch):
        return batch[0] / 255, batch[1]

    def set_epoch(self, epoch):
        self.seen = epoch


def test_a_data_set_may_hold_what_has_attributes_of_any_name_or_raises_for_them():
    class Keyed(dict):
        __getattr__ = dict.__getitem__

    class Remote:
        """As a collection of pymongo."""

        def __getattr__(self, name: str) -> Remote:
            if name.startswith("_"):
                raise AttributeError(name)
            return self

        def __call__(self, *_: object) -> None:
            raise TypeError("no such method")

        def __bool__(self) -> bool:
            raise NotImplementedError

    class Own(Dataset):
        def __init__(self) -> None:
            self.settings, self.all, self.rows = Keyed(a=1), [Keyed(b=Keyed())], Remote()
            self.mock, self.kind = MagicMock(), Scaled

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            return index

    assert type(look_into(Own())) is Own


class Told(Rows):
    seen = 0

    def set_epoch(self, epoch):
        self.seen = epoch


def test_what_passes_names_on_to_the_data_set_inside_is_told_the_epoch():
    class Cached:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            if name == "inner":
                raise AttributeError(name)
            return getattr(self.inner, name)

    inside = Told()
    look_into(Flipped(Cached(inside))).set_epoch(3)
    assert inside.seen == 3
    own = SimpleNamespace(set_epoch=Told().set_epoch)
    look_into(Flipped(own)).set_epoch(3)
    assert own.set_epoch.__self__.seen == 3


def test_a_users_wrapper_that_hides_how_batches_are_made_is_refused(photos):
    with pytest.raises(
        ConfigError, match=r"Flipped holds Scaled, whose prepare\(\) is hidden by it: define it in Flipped"
    ):
        look_into(Flipped(Scaled()))

    class Open(Flipped):
        def prepare(self, batch):
            return self.inner.prepare(batch)

    data = look_into(Open(Scaled()))
    data.set_epoch(3)
    assert data.parts[0].seen == 3
    ((x, _),) = Loader(data, CPU).load([[0, 5]])
    assert x.flatten().tolist() == pytest.approx([0, 5 / 255])
    paired = StackDataset(folder(photos), folder(photos))
    with pytest.raises(ConfigError, match=r"StackDataset holds S3ImageFolder, whose prepare\(\) is hidden by it"):
        look_into(paired)

    class Numbered(Flipped):
        def __getitem__(self, index):
            return *super().__getitem__(index), index

    with pytest.raises(ConfigError, match=r"whose prepare\(\) can't take its batches \(ValueError: .*return batch"):
        list(Loader(look_into(Numbered(folder(photos))), CPU).load([[2, 3]]))

    class Streamed(IterableDataset):
        def __init__(self, inner):
            self.inner = inner

        def __iter__(self):
            return map(self.inner.__getitem__, range(len(self.inner)))

    with pytest.raises(ConfigError, match=r"Streamed holds S3ImageFolder, whose prepare\(\) is hidden"):
        look_into(Streamed(folder(photos)))


def test_streams_inside_a_chain_are_told_the_epoch():
    class Numbers(IterableDataset):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 2)

    part = Part(ChainDataset([Numbers(), Numbers()]))
    part.open(5)
    assert part.take(4) == [5] * 4


class Taken(Dataset):
    """A data set whose attributes have the names of what the training loop asks for, and other meanings."""

    classes = 3
    close = "half past five"
    collate = None
    skipped = 4

    def __init__(self) -> None:
        self.stats, self.bad, self.labelled = {"mean": 0.5}, [], np.ones(4, bool)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index / 2, index % 2

    def prepare(self) -> None:
        self.stats = {}

    def set_epoch(self) -> None:
        self.stats = {}


def test_what_a_users_wrapper_and_its_data_set_do_for_themselves_stays_there(photos):
    class Mine(Subset):
        def __getitem__(self, index):
            return -super().__getitem__(index)

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    changed = Mine(Rows(), [3, 5])
    assert look_into(changed) is changed

    class Own(Rows):
        stats = (0.5, 0.2)  # mean and deviation
        bad = 3

    data = Flipped(Own())
    data.me = data
    data.others = [data, Rows()]
    assert look_into(data) is data

    class Named(Flipped):
        stats = (0.5, 0.2)

        def close(self, at: float) -> None:
            raise AssertionError("it is no close of ours")

    data = look_into(Named(folder(photos)))
    assert data.stats()["samples"] == 0
    data.close()


@pytest.mark.parametrize("around", [lambda data: data, lambda data: Subset(data, range(4))])
def test_names_that_a_data_set_uses_in_another_way_are_left_to_it(around):
    data = pickle.loads(pickle.dumps(look_into(around(Taken()))))
    for name in ("stats", "bad", "labelled", "skipped", "collate", "prepare", "set_epoch", "close"):
        assert not hasattr(data, name), name
    (x, y) = next(Loader(data, CPU).load([[1, 3]]))
    assert (x.tolist(), y.tolist(), data.classes, len(data)) == ([0.5, 1.5], [1, 1], 3, 4)


@pytest.mark.parametrize("found", [None, (0.5, 0.2), {"mean": 0.5}, {"samples": [3, 4]}, ZeroDivisionError])
@pytest.mark.parametrize("around", [lambda data: data, lambda data: ConcatDataset([Subset(data, [0]), Rows()])])
def test_what_the_stats_of_a_user_find_may_be_anything(found, around):
    class Measured(Rows):
        def stats(self):
            if found is ZeroDivisionError:
                raise found
            return found

    assert not hasattr(look_into(around(Measured())), "stats")


def test_what_set_epoch_returns_is_not_looked_at():
    class Fluent(Rows):
        def set_epoch(self, epoch):
            self.epoch = epoch
            return self

        def __getitem__(self, index):
            raise AssertionError("it was iterated over")

    data = Fluent()
    look_into(ConcatDataset([Subset(data, [0]), Rows()])).set_epoch(3)
    assert data.epoch == 3


STATEFUL = type("StatefulDataLoader", (DataLoader,), {"__module__": "torchdata.stateful_dataloader"})


@pytest.mark.parametrize("make", [DataLoader, STATEFUL])
def test_a_dataloader_of_samples_has_the_classes_and_batches_of_its_data_set(photos, make):
    def reversed_rows(sample):
        return sample

    data = look_into(make(folder(photos), batch_size=None))
    assert (data.classes, data.max_bad_fraction, len(data), is_stream(data)) == (["cats", "dogs"], 0.5, 8, True)
    assert not is_thread_safe(data)  # a shuffled one draws
    assert not hasattr(data, "set_epoch")
    assert data.prepare.__self__ is data.parts[0]
    data.close()
    changed = look_into(DataLoader(folder(photos), batch_size=None, collate_fn=reversed_rows))
    assert not hasattr(changed, "prepare")
    changed.close()
