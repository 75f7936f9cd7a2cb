"""s3torchconnector's S3MapDataset: one object after the other, or many at once in threads by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import data_common as common
import data_loader
from s3torchconnector import S3ClientConfig, S3MapDataset, S3Reader
from torch.utils.data import Dataset


def decoded(reader: S3Reader) -> tuple[Any, int]:
    """Return a crop and its class."""
    return data_loader.decoded(reader.read()), int(reader.key.split("/")[-2].removeprefix("class-"))


class InThreads(Dataset):
    """Makes the images of a batch in threads.

    Args:
        dataset: what makes one.
        threads: how many at once.
    """

    def __init__(self, dataset: Dataset, threads: int) -> None:
        self.dataset = dataset
        self.threads = threads
        self.pool: ThreadPoolExecutor | None = None

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Make a batch."""
        self.pool = self.pool or ThreadPoolExecutor(self.threads)
        return list(self.pool.map(self.dataset.__getitem__, indices))


def main() -> None:
    """Read in each run."""
    arguments = common.arguments()
    results = []
    for workers, endpoint, images in common.runs(arguments):
        dataset: Any = S3MapDataset.from_prefix(
            "s3://photos/train/",
            region="us-east-1",
            endpoint=endpoint,
            transform=decoded,
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        len(dataset)  # lists now, so that workers do not each
        if arguments.threads[0]:
            dataset = InThreads(dataset, arguments.threads[0])
        order = common.shuffled(images, arguments.seed)
        results += data_loader.read_through_loader(dataset, order, workers)
    common.say(results)


if __name__ == "__main__":
    main()
