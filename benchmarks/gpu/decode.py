"""How fast a host decodes photos to random crops, from memory: `python -m benchmarks.gpu.decode FOLDER …`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from benchmarks.peers import data_common as common
from ddp_hydra.data.images.decode import read_jpeg_header
from ddp_hydra.data.transforms import TrainTransform


def main() -> None:
    """Decode all photos of a folder some times, and print images/s."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--side", type=int, required=True)
    parser.add_argument("--images", type=int, required=True, help="to decode in all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transform, rng = TrainTransform(given.side), random.Random(0)
    jpegs = [file.read_bytes() for file in sorted(given.folder.rglob("*.jpg"))]
    items = [jpegs[number % len(jpegs)] for number in range(given.images)]
    common.say(
        common.in_threads(lambda jpeg: transform.of_jpeg(jpeg, read_jpeg_header(jpeg), rng), items, given.threads)
    )


if __name__ == "__main__":
    main()
