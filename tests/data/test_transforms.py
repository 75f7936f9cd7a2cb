"""Transforms of images: size, chance from the given source alone, and what a bad argument says."""

from __future__ import annotations

import random

import pytest
import torch

from data.transforms import EvalTransform, TrainTransform


def picture(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


SIZES = [(32, 32), (8, 8), (50, 31), (31, 50), (1, 1), (1, 200), (200, 1), (240, 320)]
TRAIN = [TrainTransform(32), TrainTransform(32, pad_crop=4), TrainTransform(32, (0.8, 1.0), (0.9, 1.1), 0.0)]


@pytest.mark.parametrize("transform", [EvalTransform(32), EvalTransform(32, resize=40), *TRAIN])
@pytest.mark.parametrize("size", SIZES)
def test_any_image_becomes_a_square_of_bytes(transform, size):
    image = picture(*size)
    before = image.clone()
    for seed in range(5):
        out = transform(image, random.Random(seed))
        assert out.shape == (3, 32, 32)
        assert out.dtype == torch.uint8
    assert torch.equal(image, before), "the input was changed"


@pytest.mark.parametrize("transform", TRAIN)
def test_the_same_source_of_chance_gives_the_same_image_and_another_one_another(transform):
    image = picture(50, 40)
    first = transform(image, random.Random(1))
    assert torch.equal(first, transform(image, random.Random(1)))
    assert not torch.equal(first, transform(image, random.Random(2)))


def test_train_draws_from_nothing_global():
    image = picture(50, 40)
    torch.manual_seed(0)
    random.seed(0)
    first = TrainTransform(32)(image, random.Random(1))
    assert torch.equal(first, TrainTransform(32)(image, random.Random(1)))


def test_eval_leaves_an_image_of_the_right_size_as_it_is():
    image = picture(32, 32)
    assert torch.equal(EvalTransform(32)(image, random.Random(0)), image)


def test_eval_cuts_out_the_centre():
    image = torch.zeros(3, 40, 80, dtype=torch.uint8)
    image[:, :, 30:50] = 200
    assert torch.all(EvalTransform(20, resize=40)(image, random.Random(0)) == 200)


def test_flip_mirrors_always_at_one_and_never_at_zero():
    image = picture(32, 32)
    whole = {"size": 32, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    assert torch.equal(TrainTransform(**whole, flip=0.0)(image, random.Random(0)), image)
    assert torch.equal(TrainTransform(**whole, flip=1.0)(image, random.Random(0)), image.flip(-1))


def test_pad_crop_shifts_the_image_over_black():
    image = torch.full((3, 32, 32), 255, dtype=torch.uint8)
    transform = TrainTransform(32, flip=0.0, pad_crop=4)
    dark = [int((transform(image, random.Random(seed))[0] == 0).sum()) for seed in range(20)]
    assert max(dark) > 0
    assert max(dark) <= 32 * 32 - 28 * 28


def test_crops_stay_within_the_given_share_of_the_area():
    # Each pixel tells its row and column, so the corners of a crop tell its size.
    image = torch.stack(torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")).to(torch.uint8)
    image = torch.cat([image, image[:1]])
    transform = TrainTransform(64, scale=(0.25, 0.5), ratio=(1.0, 1.0), flip=0.0)
    for seed in range(20):
        rows = transform(image, random.Random(seed))[0].int()
        assert 95 <= int(rows.max() - rows.min()) <= 145


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        ({"size": 0}, r"data\.image_size="),
        ({"size": 32, "scale": (0.5, 1.5)}, r"data\.crop_scale="),
        ({"size": 32, "scale": (0.5,)}, r"data\.crop_scale="),
        ({"size": 32, "ratio": (2.0, 1.0)}, r"data\.crop_ratio="),
        ({"size": 32, "flip": 1.1}, r"data\.flip="),
        ({"size": 32, "pad_crop": -1}, r"data\.pad_crop="),
    ],
)
def test_train_refuses_a_value_out_of_range_and_says_what_to_type(arguments, typed):
    with pytest.raises(ValueError, match=typed):
        TrainTransform(**arguments)


def test_eval_refuses_to_cut_out_more_than_there_is():
    with pytest.raises(ValueError, match=r"resize is 20 and image_size 32.*data\.resize=32"):
        EvalTransform(32, resize=20)
