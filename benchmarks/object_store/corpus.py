"""Makes the photos once from a seed, in a folder that git ignores."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from benchmarks import report
from benchmarks.commands import ROOT
from benchmarks.object_store import listing, shards

FOLDER = ROOT / ".bench-data"
"""Where it all is kept."""
BUCKET = "photos"
PREFIX = "train"
MANY = "many"
"""Prefix of keys that are listed and have no objects."""
MANY_KEYS = 100_000
IMAGES = 2000
CLASSES = 10
SIZE = (500, 375)
QUALITY = 90
GRAIN = (4.1, 24.5)
"""Least and most of the fine noise: JPEGs of about 45 to 105 KB at that quality."""
SKEW = 2.0
"""Makes fine grain the more usual the larger it is: 65 KB in the mean."""
SEED = 2026
_FIELDS = 24
_MADE = f"{IMAGES} images, seed {SEED}, quality {QUALITY}, grain {GRAIN} {SKEW}, Pillow {PIL.__version__}, layout 5"


def make(folder: Path) -> Path:
    """Make photos, shards and listings unless they are there.

    Args:
        folder: of all that the benchmark keeps.

    Returns:
        The server's root: a folder for the bucket, and one for the pages of listings.
    """
    root, ready = folder / "root", folder / "ready"
    if ready.is_file() and ready.read_text() == _MADE:
        return root
    report.progress(f"making {IMAGES} photos in {folder.name}")
    ready.unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    shutil.rmtree(root, ignore_errors=True)
    photos = root / BUCKET / PREFIX
    write_photos(photos)
    shards.write(photos, root / BUCKET / shards.PREFIX)
    pages = root / listing.FOLDER
    files = [(f"{PREFIX}/{file.relative_to(photos)}", file.stat()) for file in sorted(photos.rglob("*.jpg"))]
    entries = [listing.Entry(key, stat.st_size, stat.st_mtime) for key, stat in files]
    listing.write(pages / PREFIX, BUCKET, PREFIX, entries)
    many = [listing.Entry(f"{MANY}/{i % 1000:04d}/{i:06d}.jpg", 65_000, 0) for i in range(MANY_KEYS)]
    listing.write(pages / MANY, BUCKET, MANY, sorted(many, key=lambda entry: entry.key))
    ready.write_text(_MADE)
    return root


def write_photos(folder: Path, images: int = IMAGES, of_fields: int = _FIELDS) -> None:
    """Write JPEGs of 500x375 in ten folders.

    Args:
        folder: of the folders.
        images: how many.
        of_fields: different random images that they are made of, at least 2.
    """
    rng = np.random.default_rng(SEED)
    fields = [_clouds(rng) for _ in range(of_fields)]
    noise = rng.standard_normal((2 * SIZE[1], 2 * SIZE[0], 1), dtype=np.float32)
    for number in range(images):
        first, second = rng.choice(of_fields, 2, replace=False)
        grain = GRAIN[0] * (GRAIN[1] / GRAIN[0]) ** (rng.uniform() ** SKEW)
        pixels = _part(fields[first], rng) + _part(fields[second], rng) + grain * _part(noise, rng) + 128
        picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        file = folder / f"class-{number % CLASSES:02d}" / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=QUALITY)
        file.write_bytes(data.getvalue())


def _clouds(rng: np.random.Generator) -> np.ndarray:
    """Noise of many scales, the coarser the stronger, as in photos; grey below 1/16 of the width, colour above."""
    width, height = 2 * SIZE[0], 2 * SIZE[1]
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        cells = 2**octave
        grey = _blown_up(rng, cells, width, height)[..., None] * 34 / cells**0.5
        total += grey
        if octave <= 5:
            for channel in range(3):
                total[..., channel] += _blown_up(rng, cells, width, height) * 9
    return total


def _blown_up(rng: np.random.Generator, cells: int, width: int, height: int) -> np.ndarray:
    small = rng.standard_normal((max(2, cells * height // width), cells), dtype=np.float32)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def _part(field: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a part of a random image, with the size of a photo."""
    top, left = rng.integers(field.shape[0] - SIZE[1]), rng.integers(field.shape[1] - SIZE[0])
    return field[top : top + SIZE[1], left : left + SIZE[0]]
