"""Reads images as most users write it by hand: an ImageFolder like torchvision's, with one boto3 client per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import boto3
import data_common as common
import data_loader
from botocore.config import Config
from torch.utils.data import Dataset


class Photos(Dataset):
    """Images of a bucket, one folder a class.

    Args:
        endpoint: URL of the store.
        decoded: makes pixels of a file.
    """

    def __init__(self, endpoint: str, decoded: Callable[[bytes], Any] = data_loader.decoded) -> None:
        self.endpoint, self.decoded = endpoint, decoded
        self.clients: dict[int, Any] = {}
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket="photos", Prefix="train/")
        self.keys = [item["Key"] for page in pages for item in page["Contents"]]
        classes = sorted({key.split("/")[-2] for key in self.keys})
        self.targets = [classes.index(key.split("/")[-2]) for key in self.keys]

    def client(self) -> Any:
        """This process's client."""
        if os.getpid() not in self.clients:
            config = Config(s3={"addressing_style": "path"})
            self.clients = {os.getpid(): boto3.client("s3", endpoint_url=self.endpoint, config=config)}
        return self.clients[os.getpid()]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        body = self.client().get_object(Bucket="photos", Key=self.keys[index])["Body"]
        return self.decoded(body.read()), self.targets[index]


def main() -> None:
    """Read in each run."""
    arguments = common.arguments()
    results = []
    for workers, endpoint, images in common.runs(arguments):
        order = common.shuffled(images, arguments.seed)
        results += data_loader.read_through_loader(Photos(endpoint), order, workers)
    common.say(results)


if __name__ == "__main__":
    main()
