"""Transforms of images: size, chance from the given source alone, and what a bad argument says."""

from __future__ import annotations

import io
import random

import pytest
import torch
from PIL import Image

from ddp_hydra.data.images.decode import ColorParams, decode, read_jpeg_header
from ddp_hydra.data.transforms import EvalTransform, TrainTransform


def picture(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


SIZES = [(32, 32), (8, 8), (50, 31), (31, 50), (1, 1), (1, 200), (200, 1), (240, 320)]
TRAIN = [TrainTransform(32), TrainTransform(32, pad_crop=4), TrainTransform(32, (0.8, 1.0), (0.9, 1.1), 0.0)]


@pytest.mark.parametrize("transform", [EvalTransform(32), EvalTransform(32, center_crop=0.8), *TRAIN])
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
    state = torch.get_rng_state(), random.getstate()
    first = transform(image, random.Random(1))
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()  # noqa: PT018
    assert torch.equal(first, transform(image, random.Random(1)))
    assert not torch.equal(first, transform(image, random.Random(2)))


def test_eval_cuts_out_the_centre():
    assert torch.equal(EvalTransform(32)(picture(32, 32), random.Random(0)), picture(32, 32))
    image = torch.zeros(3, 40, 80, dtype=torch.uint8)
    image[:, :, 30:50] = 200
    assert torch.all(EvalTransform(20, center_crop=0.5)(image, random.Random(0)) == 200)


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


@pytest.mark.parametrize("share", [0.0, 1.2, -1.0])
def test_eval_refuses_to_cut_out_more_than_there_is_or_nothing(share):
    with pytest.raises(ValueError, match=rf"center_crop is {share}.*data\.center_crop=0\.875"):
        EvalTransform(32, center_crop=share)


def smooth(height: int, width: int) -> torch.Tensor:
    """A picture without noise, in which a shift of a part of a pixel changes little."""
    rows, columns = torch.meshgrid(torch.linspace(0, 9, height), torch.linspace(0, 7, width), indexing="ij")
    channels = [torch.sin(rows + k) * torch.cos(columns - k) for k in range(3)]
    return (torch.stack(channels) * 120 + 128).to(torch.uint8)


def test_eval_is_what_torchvision_makes_of_it():
    from torchvision.transforms.v2 import functional as F

    image = smooth(375, 500)
    theirs = F.center_crop(F.resize(image, [256], antialias=True), [224, 224])
    ours = EvalTransform(224, center_crop=0.875)(image, random.Random(0))
    assert (ours.int() - theirs.int()).abs().float().mean() < 1


@pytest.mark.medium
@pytest.mark.parametrize("transform", [EvalTransform(64, center_crop=0.875), TrainTransform(64, (0.3, 1.0))])
def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(transform):
    data = jpeg(smooth(900, 1200))
    header = read_jpeg_header(data)
    ours = transform.of_jpeg(data, header, random.Random(3))
    whole = transform(decode(data), random.Random(3))
    assert (ours.int() - whole.int()).abs().float().mean() < 3


def jpeg(image: torch.Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.mark.parametrize(
    ("color", "theirs"),
    [
        (ColorParams(1.3, 1.0, 1.0, 0.0), lambda torchvision, image: torchvision.adjust_brightness(image, 1.3)),
        (ColorParams(1.0, 0.6, 1.0, 0.0), lambda torchvision, image: torchvision.adjust_contrast(image, 0.6)),
        (ColorParams(1.0, 1.0, 0.3, 0.0), lambda torchvision, image: torchvision.adjust_saturation(image, 0.3)),
        (ColorParams(0.8, 1.2, 0.5, 0.0), lambda torchvision, image: torchvision.adjust_saturation(
            torchvision.adjust_contrast(torchvision.adjust_brightness(image, 0.8), 1.2), 0.5)),
    ],
)  # fmt: skip
def test_colours_change_as_torchvision_changes_them(color, theirs):
    from torchvision.transforms.v2 import functional as F

    image = smooth(40, 50) // 2 + 64  # nothing is cut off at black and white
    assert (color.apply(image).int() - theirs(F, image).int()).abs().max() <= 3  # they cut off three times


def test_hue_turns_red_to_green_to_blue_and_leaves_grey_alone():
    red = torch.zeros(3, 4, 4, dtype=torch.uint8)
    red[0] = 150
    assert ColorParams(1, 1, 1, 1 / 3).apply(red)[:, 0, 0].argmax() == 2
    assert ColorParams(1, 1, 1, -1 / 3).apply(red)[:, 0, 0].argmax() == 1
    grey = torch.full((3, 4, 4), 77, dtype=torch.uint8)
    for hue in (-0.5, -0.2, 0.1, 0.5):
        assert torch.equal(ColorParams(1, 1, 1, hue).apply(grey), grey)
        assert torch.allclose(ColorParams(1, 1, 1, hue).matrix().sum(1), torch.ones(3), atol=1e-5)
    assert torch.equal(ColorParams(1, 1, 1, 0).apply(picture(20, 30)), picture(20, 30))


def test_erasing_makes_a_rectangle_mean_grey_within_the_share_of_the_area():
    white = torch.full((3, 50, 50), 255, dtype=torch.uint8)
    transform = TrainTransform(50, (1.0, 1.0), (1.0, 1.0), flip=0, erase=1.0, fill=(0.5, 0.25, 0.0))
    for seed in range(30):
        out = transform(white, random.Random(seed))
        erased = out[2] == 0
        assert 0.01 < erased.float().mean() < 0.4
        assert set(out[:, erased].unique().tolist()) == {0, 64, 128}
        assert set(out[:, ~erased].unique().tolist()) == {255}
    never = TrainTransform(50, (1.0, 1.0), (1.0, 1.0), flip=0, erase=0.0)
    assert torch.equal(never(white, random.Random(0)), white)


def test_what_is_not_asked_for_draws_no_chance():
    """So that a run without colours goes on as it was when colours were not there."""
    image = picture(50, 40)
    plain = TrainTransform(32)(image, random.Random(5))
    with_colours = TrainTransform(32, hue=1e-12, erase=1e-12)(image, random.Random(5))
    assert torch.equal(plain, with_colours)
