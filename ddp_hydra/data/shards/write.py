"""Tar shards out of an image folder, and the index of shards that exist."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ddp_hydra.data.shards.download import download, is_packed
from ddp_hydra.data.shards.index import KIND, VERSION, Shard, absolute, is_local, shown
from ddp_hydra.data.shards.tar_index import TarMembers, read_members
from ddp_hydra.storage import Access, Store
from ddp_hydra.storage.files import replacing

MIB = 2**20
INDEX_NAME = "index.json"
_READERS = 16


def make(
    source: str,
    out: str,
    *,
    shard_mb: float = 128,
    seed: int = 0,
    name: str | None = None,
    access: Access | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the images of a folder into shards, in random order, and their index last.

    Args:
        source: a local folder or s3://bucket/prefix with images as <class>/<file>.
        out: a local folder for the shards, made where it is missing, or s3://bucket/prefix.
        shard_mb: size at which a shard ends, MiB.
        seed: of the order.
        name: of the data set, and what the shards' names start with; None: the last part of `source`.
        access: how buckets are reached.
        say: called with a line for each shard.

    Returns:
        The index.

    Raises:
        ValueError: an argument that can't be, or images outside class folders only.
        FileNotFoundError: there is no such folder, or no image in it.
        FileExistsError: `out` has an index already.
        PermissionError: a bucket refuses.
        ConnectionError: a bucket is not reachable.
        OSError: `source` can't be read or `out` not be written.
    """
    if shard_mb <= 0:
        raise ValueError(f"shard-mb is {shard_mb:g}, and must be above 0: type --shard-mb 128")
    name = name if name is not None else re.sub(r"[^\w.-]", "_", absolute(source).rstrip("/").rpartition("/")[2])
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ValueError(f"the name is {name!r}, and must be letters, digits, dots and dashes: type --name train")
    access = access or Access(setting="SOURCE")
    with contextlib.ExitStack() as cleaning:
        target = cleaning.enter_context(_Target.open(out, access))
        store, prefix = access.open(absolute(source))
        images = _images(store, prefix, source, say)
        classes = sorted({_class(key) for key, _ in images})
        number_of = {label: number for number, label in enumerate(classes)}
        random.Random(seed).shuffle(images)  # noqa: S311
        samples = cleaning.enter_context(contextlib.closing(_samples(store, images, number_of)))
        shards: list[dict[str, Any]] = []
        while (shard := _write_shard(target, f"{name}-{len(shards):06d}.tar", samples, shard_mb * MIB)) is not None:
            shards.append(shard)
            say(f"{shard['url']}: {shard['nsamples']:,} samples, {shard['filesize']:,} bytes")
        index = _index(name, shards, {"classes": classes, "source": shown(source), "seed": seed})
        with target.writing(INDEX_NAME) as file:
            file.write(_json(index))
    return index


def index_of(
    tars: Sequence[str],
    out: str,
    *,
    name: str | None = None,
    access: Access | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the index of shards that exist.

    Args:
        tars: paths or URLs of tar files, in order; those from elsewhere are downloaded one after the other.
        out: path of the index; shards below its folder are named relative to it.
        name: of the data set; None: none.
        access: how URLs are read.
        say: called with a line for each shard.

    Returns:
        The index.

    Raises:
        ValueError: a damaged tar file, or one without samples.
        FileNotFoundError: there is no such file.
        OSError: a file can't be read or written.
    """
    access = access or Access(setting="TAR")
    target = Path(absolute(out))
    shards: list[dict[str, Any]] = []
    for tar in tars:
        url = absolute(tar)
        size, md5, members = _examine(url, access)
        if not len(members):
            raise ValueError(f"{shown(url)} holds no samples: its files need names with an extension")
        inside = is_local(url) and Path(url).is_relative_to(target.parent)
        named = Path(url).relative_to(target.parent).as_posix() if inside else url
        shards.append({"url": named, "nsamples": len(members), "filesize": size, "md5sum": md5})
        say(f"{shown(url)}: {len(members):,} samples, {size:,} bytes")
    index = _index(name, shards, {})
    target.parent.mkdir(parents=True, exist_ok=True)
    with _writing(target) as file:
        file.write(_json(index))
    return index


def _index(name: str | None, shards: list[dict[str, Any]], info: dict[str, Any]) -> dict[str, Any]:
    named = {"name": name} if name else {}
    return {"__kind__": KIND, "wids_version": VERSION, **named, "info": info, "shardlist": shards}


def _images(store: Store, prefix: str, source: str, say: Callable[[str], None]) -> list[tuple[str, int | None]]:
    """Return key and size of the images in class folders, sorted."""
    from ddp_hydra.data.images.listing import (  # torch takes seconds that `index` need not spend
        kinds_of,
        known_size,
        list_images,
    )

    found = list_images(store, prefix)
    others = f"skipped: {kinds_of(found.others)}"
    if not len(found.keys):
        said = others if found.others else "it is empty"
        raise FileNotFoundError(f"{source} holds no images in class folders, {source}/<class>/<file>.jpg; {said}")
    if found.others:
        say(others)
    return [(key, known_size(size)) for key, size in zip(found.keys, found.sizes.tolist(), strict=True)]


def _class(key: str) -> str:
    return key.rsplit("/", 2)[-2]


def _samples(
    store: Store, images: list[tuple[str, int | None]], number_of: dict[str, int]
) -> Generator[list[tuple[str, Any]]]:
    """Yield names and contents of the members of each sample."""
    with ThreadPoolExecutor(_READERS, "shard-images") as pool:
        waiting: deque[Any] = deque()
        coming = iter(enumerate(images))
        try:
            while True:
                while len(waiting) < 2 * _READERS and (item := next(coming, None)) is not None:
                    waiting.append((item, pool.submit(store.get, *item[1])))
                if not waiting:
                    return
                (number, (key, _)), content = waiting.popleft()
                stem, extension = os.path.splitext(key.rpartition("/")[2])  # noqa: PTH122
                # The number makes it unique, the rest says to people what it is; the first dot ends a key.
                sample = f"{number:08d}-{stem.replace('.', '_')}"
                label = str(number_of[_class(key)]).encode()
                yield [(f"{sample}{extension.lower()}", content.result()), (f"{sample}.cls", label)]
        finally:
            pool.shutdown(cancel_futures=True)


class _Target:
    """Where shards are written to: each file whole or not at all.

    Args:
        folder: of the files, or where they are until they are in the bucket.
        store: the bucket; None: the folder is what is wanted.
        prefix: in the bucket.
    """

    def __init__(self, folder: Path, store: Store | None = None, prefix: str = "") -> None:
        self._folder, self._store, self._prefix = folder, store, prefix

    @classmethod
    @contextlib.contextmanager
    def open(cls, out: str, access: Access) -> Iterator[_Target]:
        """Reach the place, and refuse one that has an index."""
        taken = f"{out} holds an {INDEX_NAME} already: remove it, or give another folder"
        if is_local(out):
            folder = Path(absolute(out))
            if (folder / INDEX_NAME).exists():
                raise FileExistsError(taken)
            folder.mkdir(parents=True, exist_ok=True)
            yield cls(folder)
            return
        if not out.startswith("s3://"):
            raise ValueError(f"{out!r} can't be written to: give a folder, or s3://bucket/prefix")
        store, prefix = access.open(out)
        prefix = f"{prefix}/" if prefix else ""
        with contextlib.suppress(FileNotFoundError):
            store.size(f"{prefix}{INDEX_NAME}")
            raise FileExistsError(taken)
        with tempfile.TemporaryDirectory(prefix="shards-") as temporary:
            yield cls(Path(temporary), store, prefix)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that gets its name at the end of the block."""
        path = self._folder / name
        with _writing(path) as file:
            yield file
        if self._store is not None:
            self._store.put(f"{self._prefix}{name}", path)
            path.unlink()


def _write_shard(
    target: _Target, name: str, samples: Iterator[list[tuple[str, Any]]], n_bytes: float
) -> dict[str, Any] | None:
    """Write one shard; None where no samples are left."""
    first = next(samples, None)
    if first is None:
        return None
    with target.writing(name) as file:
        hashed = _Hashed(file)
        count = _write_tar(hashed, first, samples, n_bytes)
    return {"url": name, "nsamples": count, "filesize": hashed.size, "md5sum": hashed.md5.hexdigest()}


def _write_tar(
    file: Any, first: list[tuple[str, Any]], samples: Iterator[list[tuple[str, Any]]], n_bytes: float
) -> int:
    count = 0
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        sample: list[tuple[str, Any]] | None = first
        while sample is not None:
            for name, content in sample:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            count += 1
            sample = next(samples, None) if tar.offset < n_bytes else None
    return count


class _Hashed:
    """A file that knows the MD5 and the size of what was written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.md5 = hashlib.md5(usedforsecurity=False)
        self.size = 0

    def write(self, content: bytes) -> int:
        self.md5.update(content)
        self.size += len(content)
        return self._file.write(content)


def _examine(url: str, access: Access) -> tuple[int, str, TarMembers]:
    """Return size and MD5 of a tar file, and its members."""
    if is_local(url) and not is_packed(url):
        with Path(url).open("rb") as file:
            md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
            size = file.tell()
        return size, md5.hexdigest(), read_members(Path(url))
    store, key = access.open(url)
    with tempfile.NamedTemporaryFile(prefix="shard-", suffix=".tar") as file:
        md5 = hashlib.md5(usedforsecurity=False)
        size = download(Shard(url, 0), store, key, file.fileno(), lambda n_bytes: None, md5.update)
        return size, md5.hexdigest(), read_members(Path(file.name))


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name at the end of the block, when the disk has all of it."""
    with replacing(path) as part, part.open("wb") as file:
        yield file


def _json(index: dict[str, Any]) -> bytes:
    return json.dumps(index, indent=1, ensure_ascii=False).encode()
