"""webdataset's wids, the last one there was: crops from shards over HTTP, cold and then warm."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import data_common as common
import data_loader
import wids
from torch.utils.data import Dataset


class Photos(Dataset):
    """Crops and classes.

    Args:
        endpoint: URL of the server.
        folder: for shards.
    """

    def __init__(self, endpoint: str, folder: str) -> None:
        index = f"{endpoint}/photos/shards/index.json"
        self.samples = wids.ShardListDataset(index, cache_dir=folder, transformations=[decoded])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.samples[index]


def decoded(sample: dict[str, Any]) -> tuple[Any, int]:
    """Return a crop and its class."""
    return data_loader.decoded(sample[".jpg"].getbuffer()), int(sample[".cls"].read())


def main() -> None:
    """Read in each run, twice: the second time all shards are there."""
    arguments = common.arguments()
    results = []
    for workers, endpoint, images in common.runs(arguments):
        folder = tempfile.mkdtemp(dir=arguments.folder)
        try:
            dataset = Photos(endpoint, folder)
            # Shard after shard, with the photos of each in random order, as it is meant to be used.
            order = list(wids.ChunkedSampler(dataset.samples, chunksize=100, seed=arguments.seed))
            results += data_loader.read_through_loader(dataset, order[:images], workers, passes=2)
        finally:
            shutil.rmtree(folder)
    common.say(results)


if __name__ == "__main__":
    main()
