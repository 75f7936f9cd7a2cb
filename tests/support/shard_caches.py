"""Shards of numbered samples on a server, and what tests ask of a cache of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import time
from pathlib import Path

from ddp_hydra.data.shards.cache import ShardCache
from ddp_hydra.data.shards.cache_folder import with_index
from ddp_hydra.data.shards.index import Shard
from tests.support.tar_server import TarServer, numbered

COUNT = 20
"""Samples of each shard."""
SIZE = with_index(len(numbered(0, COUNT)))
"""Of a shard and its index, at most."""


def shard_of(server: TarServer, path: str, content: bytes | None = None, count: int = COUNT, **said) -> Shard:
    """What an index says of a shard; with its size and MD5 where the content is given."""
    known = {} if content is None else {"size": len(content), "md5": hashlib.md5(content).hexdigest()}
    return Shard(server.url + path, count, **{**known, **said})


def serve(server: TarServer, names: str, known: bool = True, n_bytes: int = 50) -> list[Shard]:
    """Serve a shard for each letter."""
    contents = {name: numbered(number * COUNT, COUNT, n_bytes) for number, name in enumerate(names)}
    server.add(**contents)
    return [shard_of(server, f"/{name}.tar", contents[name] if known else None) for name in names]


def label(cache: ShardCache, number: int, index: int = 0) -> int:
    """The label of a sample of a shard: its number among all samples."""
    return int(bytes(cache.open(number).fields(index)[".cls"]))


def files(folder: Path) -> list[str]:
    """What is in a cache, without the hashes, and without the indexes of members, which may come later."""
    return sorted(re.sub(r"^[0-9a-f]{32}-", "", path.name) for path in folder.iterdir() if ".npz" not in path.name)


def settle(cache: ShardCache) -> None:
    """Wait for the indexes of members."""
    cache._index_saver.submit(lambda: None).result()


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def total(folder: Path) -> int:
    """The bytes that all files of a cache take."""
    with (folder / "lock").open("rb+") as file:  # nothing is evicted or added meanwhile
        fcntl.flock(file, fcntl.LOCK_EX)
        taken = 0
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # an index that was just made, and got its name
                taken += path.stat().st_size
    return taken
