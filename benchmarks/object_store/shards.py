"""Makes tar files of the same photos with an index, as webdataset's wids reads them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from pathlib import Path

PREFIX = "shards"
INDEX = "index.json"
SAMPLES = 100
"""Photos a shard: 20 shards, twice as many as wids keeps open."""


def write(photos: Path, folder: Path) -> None:
    """Write shards and index, photos in random order.

    Args:
        photos: a folder with one folder a class.
        folder: for the shards.
    """
    folder.mkdir(parents=True)
    files = sorted(photos.rglob("*.jpg"))
    random.Random(0).shuffle(files)
    classes = sorted({file.parent.name for file in files})
    listed = []
    for start in range(0, len(files), SAMPLES):
        shard = folder / f"photos-{start // SAMPLES:05d}.tar"
        with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            for file in files[start : start + SAMPLES]:
                _add(tar, f"{file.stem}.jpg", file.read_bytes())
                _add(tar, f"{file.stem}.cls", str(classes.index(file.parent.name)).encode())
        data = shard.read_bytes()
        listed.append(
            {
                "url": shard.name,
                "nsamples": len(files[start : start + SAMPLES]),
                "filesize": len(data),
                "md5sum": hashlib.md5(data).hexdigest(),
            }
        )
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "photos", "shardlist": listed}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
