"""Our side of the data benchmark, each part in a process of its own: `python -m benchmarks.data_ours images ...`."""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import data_common as common
from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.images.decode import read_jpeg_header
from ddp_hydra.data.loader import Loader
from ddp_hydra.data.transforms import EvalTransform, TrainTransform

BUCKET, PREFIX, MANY = "photos", "train", "many"


def photos(endpoint: str, prefix: str = PREFIX) -> S3ImageFolder:
    """Make the data set as a user does."""
    transform = TrainTransform(common.SIDE)
    return S3ImageFolder(BUCKET, prefix, endpoint_url=endpoint, anon=True, transform=transform)


def images(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Read batches as a rank does: as bytes for a GPU, or normalised on the CPU."""
    for endpoint in arguments.endpoints:
        dataset = photos(endpoint)
        if arguments.bytes:
            dataset.prepare = lambda batch: batch  # the device's work
        loader = Loader(dataset, torch.device("cpu"), channels_last=True)
        order = common.shuffled(arguments.images, arguments.seed)
        common.count(loader.load(common.in_batches(order[:16], 4)))
        yield common.timed(lambda loader=loader, order=order: common.count(loader.load(common.in_batches(order))))
        dataset.close()


def decoding(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """JPEGs in memory to crops, in threads."""
    transform, rng = EvalTransform(common.SIDE, center_crop=0.875, smooth=False), random.Random(0)
    files = sorted(Path(arguments.folder).rglob("*.jpg"))[:: common.IMAGES // arguments.images]
    jpegs = [file.read_bytes() for file in files]
    torch.set_num_threads(1)
    yield common.in_threads(
        lambda jpeg: transform.of_jpeg(jpeg, read_jpeg_header(jpeg), rng), jpegs, arguments.threads[0]
    )


def listing(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Measure the constructor with many keys, in units of one "image" per second of CPU: `seconds` is CPU time."""
    for endpoint in arguments.endpoints:
        photos(endpoint).close()  # the client and its threads are up
        begin = common.cpu_s()
        dataset = photos(endpoint, MANY)
        yield {"keys": len(dataset), "seconds": common.cpu_s() - begin}
        dataset.close()


def shards(endpoint: str, folder: str) -> Any:
    """Return the shards as a user opens them."""
    from ddp_hydra.data.wids import WidsShards

    return WidsShards(f"{endpoint}/{BUCKET}/shards/index.json", cache_dir=folder)


def shards_random(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Random reads from shards that are all there."""
    for endpoint in arguments.endpoints:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            dataset = shards(endpoint, folder)
            read_shards(dataset, list(range(common.IMAGES)))
            order = [i for epoch in range(arguments.epochs) for i in common.shuffled(common.IMAGES, epoch)]
            yield common.timed(lambda dataset=dataset, order=order: read_shards(dataset, order))
            dataset.close()


def shards_cold(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Read an epoch, shard after shard, with an empty cache."""
    for endpoint in arguments.endpoints:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            dataset = shards(endpoint, folder)
            order = list(range(common.IMAGES))
            dataset.expect(order)  # as our loader does
            yield common.timed(lambda dataset=dataset, order=order: read_shards(dataset, order))
            dataset.close()


def read_shards(dataset: Any, order: list[int]) -> int:
    """Read samples in batches, as our loader does."""
    return sum(common.touched([dataset.fields(index) for index in batch]) for batch in common.in_batches(order))


PARTS = {
    "images": images,
    "decoding": decoding,
    "listing": listing,
    "shards-random": shards_random,
    "shards-cold": shards_cold,
}


def main() -> None:
    """Do one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--endpoints", nargs="+", default=[])
    parser.add_argument("--images", type=int, default=common.IMAGES)
    parser.add_argument("--threads", nargs="+", type=int, default=[32])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    gc.freeze()  # as in a rank, which a process with these modules has forked: a search in all of them takes 0.1 s
    common.say(list(PARTS[arguments.part](arguments)))


if __name__ == "__main__":
    main()
