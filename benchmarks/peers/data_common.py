"""Parses the options of the data scripts, and times their reading. Without torch, so that bare scripts start fast."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

BATCH_SIZE = 64
IMAGES = 2000
SIDE = 224
PAGE = 4096
"""Bytes of memory that are mapped at once."""


def arguments() -> argparse.Namespace:
    """Read the command line that all data scripts have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoints", nargs="+", required=True, help="URLs of the server, one measurement each")
    parser.add_argument("--images", nargs="+", type=int, default=[IMAGES], help="read in each run, or in all")
    parser.add_argument("--workers", nargs="+", type=int, default=[0], help="of the DataLoader, a run for each number")
    parser.add_argument("--threads", nargs="+", type=int, default=[0], help="that fetch, where the script has them")
    parser.add_argument("--passes", type=int, default=1, help="over the images, where the script has them")
    parser.add_argument("--seed", type=int, default=0, help="of the order of images")
    parser.add_argument("--folder", help="for caches, where the script has one")
    return parser.parse_args()


def runs(arguments: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """Yield workers, endpoint and images of each run."""
    images = itertools.cycle(arguments.images) if len(arguments.images) == 1 else iter(arguments.images)
    for workers in arguments.workers:
        for endpoint in arguments.endpoints:
            yield workers, endpoint, next(images)


def shuffled(images: int, seed: int) -> list[int]:
    """Some images of all, in random order."""
    return random.Random(seed).sample(range(IMAGES), images)


def in_batches(indices: list[int], size: int = BATCH_SIZE) -> list[list[int]]:
    """Indices as batches."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def count(loader: Iterable[Any]) -> int:
    """Go through batches, see that they are what they should be, and count the images."""
    images = 0
    for pixels, classes in loader:
        assert pixels.shape == (len(classes), 3, SIDE, SIDE), pixels.shape
        images += len(classes)
    return images


def timed(read: Callable[[], int]) -> dict[str, float]:
    """Return how many images per second this process and its children read, and the CPU time per image.

    Args:
        read: reads, and returns how many images.
    """
    computed, begin = cpu_s(), time.perf_counter()
    images = read()
    took = time.perf_counter() - begin
    return {
        "images": images,
        "images_per_s": images / took,
        "cpu_ms_per_image": (cpu_s() - computed) / images * 1000,
        "seconds": took,
    }


def in_threads(action: Callable[[Any], Any], items: list[Any], threads: int) -> dict[str, float]:
    """Time an action on each item, in threads that are up before the clock starts.

    Args:
        action: on an item.
        items: one an image.
        threads: how many at once.
    """
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(action, items[: 4 * threads]))
        return timed(lambda: sum(1 for _ in pool.map(action, items)))


def touched(samples: Iterable[dict[str, Any]]) -> int:
    """Touch every page of each image, be it copied or mapped, and count the samples."""
    count = 0
    for sample in samples:
        image = sample[".jpg"]
        bytes(memoryview(image.getbuffer() if hasattr(image, "getbuffer") else image)[::PAGE])
        count += 1
    return count


def cpu_s() -> float:
    """CPU time of this process and of all it started, in seconds."""
    this = psutil.Process(os.getpid())
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        spent = process.cpu_times()
        # The last two are of children that have ended: programs that a library calls, say.
        total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def say(result: Any) -> None:
    """Print the result as the last line."""
    print(f"\n{json.dumps(result)}", flush=True)
