"""wids without decoding: a cold epoch shard after shard, or random reads from warm shards."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable

import data_common as common
import wids


def main() -> None:
    """Read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cold", "random"))
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--folder", help="for the cache")
    parser.add_argument("--shards-open", type=int, help="at once; as many as wids chooses unless given")
    parser.add_argument("--epochs", type=int, default=1, help="of random reads")
    arguments = parser.parse_args()
    index = f"{arguments.endpoint}/photos/shards/index.json"
    settings = {} if arguments.shards_open is None else {"lru_size": arguments.shards_open}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        dataset = wids.ShardListDataset(index, cache_dir=folder, transformations=[], **settings)

        def read(order: Iterable[int]) -> int:
            return common.touched(dataset[i] for i in order)

        if arguments.what == "random":
            read(range(len(dataset)))
            sampler = wids.DistributedChunkedSampler(dataset)  # with chunks as large as it makes them: of all shards
            order = [index for _ in range(arguments.epochs) for index in sampler]
            result = common.timed(lambda: read(order))
        else:
            result = common.timed(lambda: read(range(len(dataset))))
    common.say([result])


if __name__ == "__main__":
    main()
