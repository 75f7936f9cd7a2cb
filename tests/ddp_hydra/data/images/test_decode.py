"""Decoding: every usual format and mode becomes RGB bytes; what is not an image says so."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import ExifTags, Image, ImageOps

from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS, decode, decode_jpeg, read_jpeg_header
from ddp_hydra.data.transforms import EvalTransform

ROWS, COLUMNS = np.mgrid[0:24, 0:36]
COLOURS = np.stack([ROWS * 10, COLUMNS * 7, (ROWS + COLUMNS) * 4], axis=-1).astype(np.uint8)


def encode(image: Image.Image, format: str, **options) -> bytes:  # noqa: A002
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_come_out_pixel_by_pixel(format):  # noqa: A002
    image = decode(encode(Image.fromarray(COLOURS), format))
    assert image.dtype == torch.uint8
    assert image.permute(1, 2, 0).is_contiguous()
    assert np.array_equal(image.permute(1, 2, 0).numpy(), COLOURS)


@pytest.mark.parametrize(("format", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("WEBP", "RGB")])
def test_lossy_formats_come_out_nearly(format, mode):  # noqa: A002
    image = decode(encode(Image.fromarray(COLOURS).convert(mode), format, quality=95))
    assert np.abs(image.permute(1, 2, 0).int().numpy() - COLOURS).mean() < 4


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_grey_becomes_three_equal_channels(format):  # noqa: A002
    image = decode(encode(Image.fromarray(COLOURS[..., 0]), format))
    assert image.shape == (3, 24, 36)
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])


def test_transparency_is_dropped_and_the_colours_stay():
    alpha = np.concatenate([COLOURS, (COLUMNS * 7).astype(np.uint8)[..., None]], axis=-1)
    assert np.array_equal(decode(encode(Image.fromarray(alpha), "PNG")).permute(1, 2, 0).numpy(), COLOURS)


def test_a_palette_becomes_its_colours():
    flat = np.zeros((4, 4, 3), dtype=np.uint8)
    flat[:2], flat[2:] = (255, 0, 0), (0, 0, 255)
    image = decode(encode(Image.fromarray(flat).quantize(4), "PNG"))
    assert np.array_equal(image.permute(1, 2, 0).numpy(), flat)


@pytest.mark.parametrize(("format", "kind"), [("PNG", np.uint16), ("TIFF", np.uint16), ("TIFF", np.int32)])
def test_whole_numbers_of_many_bits_become_their_upper_eight_where_pillow_would_cut_them_off(format, kind):  # noqa: A002
    deep = (ROWS * 2800 + COLUMNS * 7).astype(kind)
    image = decode(encode(Image.fromarray(deep), format))
    assert np.array_equal(image[0].numpy(), deep // 256)
    assert torch.equal(image[0], image[2])


def test_of_numbers_beyond_sixteen_bits_and_of_fractions_the_range_is_bounded():
    assert decode(encode(Image.fromarray(np.array([[-5, 2**30]], np.int32)), "TIFF"))[0].tolist() == [[0, 255]]
    assert decode(encode(Image.fromarray(np.array([[-5, 7.5, 300]], np.float32)), "TIFF"))[0].tolist() == [[0, 7, 255]]


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (5, 5), colour) for colour in ("red", "blue")]
    image = decode(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert image[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "BMP"])
def test_half_a_file_is_damaged(format):  # noqa: A002
    whole = encode(Image.fromarray(COLOURS), format)
    with pytest.raises(ValueError, match="image"):
        decode(whole[: len(whole) // 2])


@pytest.mark.parametrize(("data", "said"), [(b"I am a text.", "starts with b'I am a text.'"), (b"", "is empty")])
def test_what_is_no_image_says_what_it_is(data, said):
    with pytest.raises(ValueError, match=said):
        decode(data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "WEBP", "PNG"])
def test_a_turned_photo_is_turned_upright(format, orientation):  # noqa: A002
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encode(Image.fromarray(COLOURS), format, exif=exif, quality=95)
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
    assert np.abs(decode(data).permute(1, 2, 0).numpy() - upright).mean() < 4
    if format == "JPEG":
        header = read_jpeg_header(data)
        assert (header.height, header.width, header.orientation) == (*upright.shape[:2], orientation)


@pytest.mark.parametrize("parts", [1, 9])  # of a profile: a segment has 64 KiB at most
@pytest.mark.parametrize("kind", ["exif", "xmp"])
def test_a_photo_is_turned_upright_by_what_stands_behind_a_large_profile(kind, parts):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    said = {"exif": {"exif": exif}, "xmp": {"xmp": b'<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>'}}[kind]
    data = encode(Image.fromarray(COLOURS), "JPEG", quality=95, **said)
    profile = b"\xff\xe2" + (60_002).to_bytes(2, "big") + b"ICC_PROFILE\0\1\1".ljust(60_000, b"x")
    data = data[:2] + parts * profile + data[2:]
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
    assert upright.shape == (36, 24, 3)
    assert np.abs(decode(data).permute(1, 2, 0).numpy() - upright).mean() < 4


def test_damaged_exif_is_no_reason_to_lose_a_photo():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encode(Image.fromarray(COLOURS), "JPEG", exif=exif).replace(b"Exif\0\0", b"Exif\0\0\xff\xff", 1)
    assert decode(data).shape == (3, *COLOURS.shape[:2])


@pytest.mark.parametrize(("share", "shrunk"), [(1.0, 1), (0.6, 1), (0.5, 2), (0.3, 2), (0.25, 4), (0.1, 8), (0.01, 8)])
def test_a_jpeg_is_decoded_as_small_as_will_do(share, shrunk):
    data = encode(Image.fromarray(COLOURS), "JPEG", quality=95)
    header = read_jpeg_header(data)
    image = decode_jpeg(data, header, share)
    assert image.shape == (-(-header.height // shrunk), -(-header.width // shrunk), 3)


def test_an_odd_jpeg_is_left_to_the_thorough_decoder():
    data = encode(Image.fromarray(COLOURS), "JPEG", quality=95)
    odd = data[:2] + b"\xff\xff\xff" + data[2:]  # fill bytes before a marker, which the standard allows
    assert np.abs(decode(odd).permute(1, 2, 0).numpy() - COLOURS.astype(int)).mean() < 4


def test_pixels_of_a_jpeg_are_those_of_pillow():
    data = encode(Image.fromarray(COLOURS), "JPEG", quality=80)
    theirs = np.array(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(decode(data).permute(1, 2, 0).numpy() - theirs).max() <= 2


@pytest.mark.parametrize("sampling", ["444", "440", "422", "420", "411"])
@pytest.mark.parametrize("size", [250, 120, 50])
def test_an_evaluation_sees_what_pillow_decodes_whatever_is_shrunk_on_the_way(sampling, size):
    rough = np.random.RandomState(0).randint(0, 255, (12, 16, 3), np.uint8)
    pixels = np.array(Image.fromarray(rough).resize((640, 480), Image.Resampling.BICUBIC))
    data = simplejpeg.encode_jpeg(pixels, 90, "RGB", sampling)
    seen = EvalTransform(size).of_jpeg(data, read_jpeg_header(data), random.Random(0))
    whole = torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1))
    expected = EvalTransform(size)(whole, random.Random(0))
    assert (seen.int() - expected.int()).abs().float().mean() < 1.2


@pytest.mark.medium
def test_an_image_too_large_for_the_memory_is_refused_before_it_is_decoded():
    data = bytearray(encode(Image.fromarray(COLOURS), "JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = (30_000).to_bytes(2, "big") * 2
    with pytest.raises(ValueError, match=r"too large an image: 30,000 x 30,000 pixels, more than 178,956,970"):
        decode(bytes(data))
    header = read_jpeg_header(bytes(data))
    with pytest.raises(ValueError, match="damaged"):  # an eighth of it is not too large, and is tried
        decode_jpeg(bytes(data), header, at_least=0.01)


@pytest.mark.parametrize(("name", "format"), [("a.JFIF", "JPEG"), ("b.jpe", "JPEG"), ("c.avif", "AVIF")])
def test_rarer_names_of_images_are_known(name, format):  # noqa: A002
    kind = f".{name.rpartition('.')[2].lower()}"
    if kind == ".avif" and not Image.registered_extensions().get(".avif"):
        pytest.skip("this Pillow reads no AVIF")
    assert kind in IMAGE_EXTENSIONS
    assert decode(encode(Image.fromarray(COLOURS), format)).shape == (3, *COLOURS.shape[:2])
