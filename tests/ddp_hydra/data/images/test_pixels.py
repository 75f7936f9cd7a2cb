"""Transforms that take a PIL image, as torchvision's."""

from __future__ import annotations

import functools
import io
import pickle
import random

import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from ddp_hydra.data import S3ImageFolder
from ddp_hydra.data.images.decode import PilTransform, adapted
from ddp_hydra.data.transforms import EvalTransform

OLD = transforms.Compose([transforms.Resize(10), transforms.CenterCrop(8), transforms.ToTensor()])
NEW = v2.Compose([v2.Resize(10), v2.CenterCrop(8), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
RANDOM = transforms.Compose(
    [transforms.RandomResizedCrop(8), transforms.RandomHorizontalFlip(), transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
     transforms.RandomRotation(10), transforms.ToTensor(), transforms.RandomErasing()]
)  # fmt: skip


def to_text(image):
    return f"{image.mode} {image.size}"


def ours(image, rng):
    return image


@pytest.fixture
def folder(tmp_path):
    """Six images of two classes."""
    chance = random.Random(0)
    for number in range(6):
        file = tmp_path / "all" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = Image.frombytes("RGB", (12, 16), chance.randbytes(12 * 16 * 3))
        pixels.save(file)
    return f"file://{tmp_path}"


@pytest.mark.parametrize("transform", [OLD, NEW, to_text, functools.partial(to_text), transforms.ToTensor()])
def test_what_takes_one_image_gets_pil(transform):
    assert isinstance(adapted(transform), PilTransform)


@pytest.mark.parametrize("transform", [None, ours, EvalTransform(8), functools.partial(ours), lambda image, rng: image])
def test_what_takes_the_samples_random_numbers_is_called_as_it_is(transform):
    assert adapted(transform) is transform


@pytest.mark.parametrize("transform", [OLD, NEW])
def test_torchvision_makes_of_a_sample_what_it_makes_of_the_file(folder, transform):
    data = pickle.loads(pickle.dumps(S3ImageFolder(folder, "all", transform)))
    for index, (key, target) in enumerate(data.samples):
        with Image.open(f"{folder.removeprefix('file://')}/{key}") as image:
            assert torch.equal(data[index][0], transform(image.convert("RGB")))
        assert data[index][1] == target
    images, targets = data.prepare(data.collate(data.__getitems__(range(6))))
    assert images.shape == (6, 3, 8, 8)
    assert torch.equal(images[2], data[2][0])  # floats are not normalised again
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    data.close()


def test_bytes_are_normalised_by_prepare(folder):
    data = S3ImageFolder(folder, "all", transforms.Compose([transforms.CenterCrop(8), transforms.PILToTensor()]))
    images, _ = data.prepare(data.collate(data.__getitems__([0, 1])))
    assert images.dtype == torch.float32
    assert images.min() < 0
    crops = torch.randint(0, 256, (2, 5, 3, 8, 8), dtype=torch.uint8)
    views, whole = data.prepare(((crops, crops[:, 0]), None))[0]
    assert torch.equal(views[:, 1], data.prepare((crops[:, 1].contiguous(), None))[0])
    assert torch.equal(whole, views[:, 0])
    mask = torch.randint(0, 2, (2, 8, 8), dtype=torch.uint8)
    assert data.prepare(((mask, crops), None))[0][0] is mask
    data.close()


def test_random_transforms_depend_on_seed_epoch_and_sample_alone(folder):
    data = S3ImageFolder(folder, "all", RANDOM)
    state = torch.random.get_rng_state()
    first = [image for image, _ in data.__getitems__(range(6))]
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)
    again = S3ImageFolder(folder, "all", RANDOM, decoders=1)
    assert all(torch.equal(again[index][0], first[index]) for index in reversed(range(6)))
    again.set_epoch(1)
    assert not any(torch.equal(again[index][0], first[index]) for index in range(6))
    data.close()
    again.close()


def test_targets_are_transformed_and_the_classes_stay(folder):
    data = S3ImageFolder(folder, "all", to_text, lambda number: f"class {number}")
    assert data[4] == ("RGB (12, 16)", "class 1")
    assert data.targets.tolist() == [0, 0, 0, 1, 1, 1]
    fast = S3ImageFolder(folder, "all", EvalTransform(8), float)
    assert fast.collate(fast.__getitems__([0, 5]))[1].tolist() == [0.0, 1.0]
    data.close()
    fast.close()


def test_an_image_that_the_transform_refuses_is_a_bad_one(folder):
    def picky(image):
        if image.getpixel((0, 0)) == first:
            raise ValueError("not this one")
        return to_text(image)

    data = S3ImageFolder(folder, "all", picky, max_bad_fraction=0.5)
    with Image.open(io.BytesIO(bytes(data.fetch(0)))) as image:
        first = image.getpixel((0, 0))
    assert data[0] == ("RGB (12, 16)", 0)
    assert list(data.bad.values()) == ["not this one"]
    data.close()
