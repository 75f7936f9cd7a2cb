"""litdata's StreamingRawDataset: the objects of a batch all at once."""

from __future__ import annotations

import tempfile
from typing import Any

import boto3
import data_common as common
import data_loader
from litdata import StreamingRawDataset
from litdata.raw.indexer import BaseIndexer, FileMetadata
from litdata.streaming import downloader
from torch.utils.data import Dataset

# It opens its store for https alone.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


class Listed(BaseIndexer):
    """Lists with boto3; its own way needs s3fs, and writes an index into the bucket.

    Args:
        endpoint: URL of the store.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def build_or_load_index(self, *_: Any) -> list[FileMetadata]:
        """List the bucket."""
        client = boto3.client("s3", endpoint_url=self.endpoint)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="photos", Prefix="train/")
        return [FileMetadata(f"s3://photos/{item['Key']}", item["Size"]) for page in pages for item in page["Contents"]]

    def discover_files(self, *_: Any) -> list[FileMetadata]:
        """List the bucket."""
        return self.build_or_load_index()


class Photos(Dataset):
    """Crops with their classes, which it leaves to the user.

    Args:
        endpoint: URL of the store.
        folder: for its cache, which stays empty.
    """

    def __init__(self, endpoint: str, folder: str) -> None:
        self.images = StreamingRawDataset(
            "s3://photos/train/",
            cache_dir=folder,
            indexer=Listed(endpoint),
            storage_options={"endpoint_url": endpoint},
            transform=data_loader.decoded,
        )
        self.targets = [int(file.path.split("/")[-2].removeprefix("class-")) for file in self.images.files]

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        """Make a batch."""
        return list(zip(self.images.__getitems__(indices), [self.targets[index] for index in indices], strict=True))


def main() -> None:
    """Read in each run."""
    arguments = common.arguments()
    results = []
    for workers, endpoint, images in common.runs(arguments):
        order = common.shuffled(images, arguments.seed)
        with tempfile.TemporaryDirectory() as folder:
            results += data_loader.read_through_loader(Photos(endpoint, folder), order, workers)
    common.say(results)


if __name__ == "__main__":
    main()
