"""Shards over HTTP into a folder, and nothing else: what a cold epoch can't be faster than."""

from __future__ import annotations

import http.client
import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import data_common as common


def download(host: str, names: list[str], folder: Path) -> None:
    """Download some shards through one connection, one after the other."""
    connection = http.client.HTTPConnection(host)
    for name in names:
        connection.request("GET", f"/photos/shards/{name}")
        with (folder / name).open("wb") as file:
            shutil.copyfileobj(connection.getresponse(), file, 1 << 20)


def main() -> None:
    """Download all shards from each endpoint."""
    arguments = common.arguments()
    results = []
    for endpoint in arguments.endpoints:
        host = urlsplit(endpoint).netloc
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            folder, threads = Path(place), arguments.threads[0]
            download(host, ["index.json"], folder)
            shards = json.loads((folder / "index.json").read_text())["shardlist"]
            names = [shard["url"] for shard in shards]

            def read(host: str = host, names: list[str] = names, folder: Path = folder, threads: int = threads) -> int:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(lambda start: download(host, names[start::threads], folder), range(threads)))
                return common.IMAGES

            results.append(common.timed(read))
            assert all((folder / shard["url"]).stat().st_size == shard["filesize"] for shard in shards)
    common.say(results)


if __name__ == "__main__":
    main()
