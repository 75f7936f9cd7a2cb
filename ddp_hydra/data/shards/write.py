"""Writes tar shards from an image folder, and the index of existing shards."""

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
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ddp_hydra.data.names import class_of
from ddp_hydra.data.shards.download import download, in_parallel, is_packed
from ddp_hydra.data.shards.index import KIND, VERSION, Shard, absolute, is_local, read_index
from ddp_hydra.data.shards.tar_index import TarMembers, read_members
from ddp_hydra.storage import Access, Store, bare_url
from ddp_hydra.storage.files import replacing

MIB = 2**20
INDEX_NAME = "index.json"
_READERS = 16


def write_shards(
    source: str,
    out: str,
    *,
    shard_mb: float = 128,
    seed: int = 0,
    name: str | None = None,
    classes_from: str | None = None,
    access: Access | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the images of a folder into shards, in random order, and then the index.

    Args:
        source: a local folder or s3://bucket/prefix with images as <class>/<file>.
        out: a local folder for the shards, made if it is missing, or s3://bucket/prefix.
        shard_mb: a shard ends when it reaches this size, MiB.
        seed: of the order.
        name: of the data set; the names of the shards start with it. None: the last part of `source`.
        classes_from: folder of images or index of shards with the classes, so that validation shards have the numbers
            of the training shards; None: the class folders of `source`.
        access: how buckets are reached.
        report: called with a line of text for each shard.

    Returns:
        The index.

    Raises:
        ValueError: an argument is out of its range, or an image has a class that `classes_from` does not have.
        FileNotFoundError: there is no such folder, or it has no images in class folders.
        FileExistsError: `out` has an index already.
        PermissionError: a bucket refuses access.
        ConnectionError: a bucket is not reachable.
        OSError: `source` can't be read, or `out` can't be written.
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
        images = _images(store, prefix, source, report)
        found = {class_of(key, prefix) for key, _ in images}
        classes = sorted(found) if classes_from is None else _classes(classes_from, access, report)
        if unknown := sorted(found.difference(classes)):
            raise ValueError(
                f"{source} has classes that {bare_url(str(classes_from))} does not have: {', '.join(unknown[:10])}; it "
                f"has: {', '.join(classes[:10])}: type another --classes-from"
            )
        report(f"{len(classes):,} classes: {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}")
        number_of = {label: number for number, label in enumerate(classes)}
        random.Random(seed).shuffle(images)  # noqa: S311
        samples = cleaning.enter_context(contextlib.closing(_samples(store, prefix, images, number_of)))
        shards: list[dict[str, Any]] = []
        while (shard := _write_shard(target, f"{name}-{len(shards):06d}.tar", samples, shard_mb * MIB)) is not None:
            shards.append(shard)
            report(f"{shard['url']}: {shard['nsamples']:,} samples, {shard['filesize']:,} bytes")
        index = _index(name, shards, {"classes": classes, "source": bare_url(source), "seed": seed})
        with target.writing(INDEX_NAME) as file:
            file.write(_json(index))
    return index


def write_index(
    tars: Sequence[str],
    out: str,
    *,
    name: str | None = None,
    access: Access | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the index of existing shards.

    Args:
        tars: paths or URLs of tar files, in order; remote files are downloaded one after the other.
        out: path of the index; shards below its folder get relative names.
        name: of the data set; None: no name.
        access: how URLs are read.
        report: called with a line of text for each shard.

    Returns:
        The index.

    Raises:
        ValueError: a tar file is damaged or has no samples.
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
            raise ValueError(f"{bare_url(url)} holds no samples: its files need names with an extension")
        inside = is_local(url) and Path(url).is_relative_to(target.parent)
        named = Path(url).relative_to(target.parent).as_posix() if inside else url
        shards.append({"url": named, "nsamples": len(members), "filesize": size, "md5sum": md5})
        report(f"{bare_url(url)}: {len(members):,} samples, {size:,} bytes")
    index = _index(name, shards, {})
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as part:
        part.write_bytes(_json(index))
    return index


def _index(name: str | None, shards: list[dict[str, Any]], info: dict[str, Any]) -> dict[str, Any]:
    named = {"name": name} if name else {}
    return {"__kind__": KIND, "wids_version": VERSION, **named, "info": info, "shardlist": shards}


def _images(store: Store, prefix: str, source: str, report: Callable[[str], None]) -> list[tuple[str, int | None]]:
    from ddp_hydra.data.images.listing import (  # it imports torch, which takes seconds that `index` need not spend
        kinds_of,
        known_size,
        list_images,
    )

    found = list_images(store, prefix)
    skipped = f"skipped: {kinds_of(found.others)}"
    if not len(found.keys):
        reason = skipped if found.others else "it is empty"
        raise FileNotFoundError(f"{source} holds no images in class folders, {source}/<class>/<file>.jpg; {reason}")
    if found.others:
        report(skipped)
    return [(key, known_size(size)) for key, size in zip(found.keys, found.sizes.tolist(), strict=True)]


def _classes(source: str, access: Access, report: Callable[[str], None]) -> list[str]:
    if source.endswith(".json"):
        classes = read_index(source, access=access).info.get("classes")
        if not isinstance(classes, list):
            raise ValueError(
                f"the index {bare_url(source)} names no classes (info.classes): type another --classes-from"
            )
        return [str(name) for name in classes]
    store, prefix = access.open(absolute(source))
    return sorted({class_of(key, prefix) for key, _ in _images(store, prefix, source, report)})


def _samples(
    store: Store, prefix: str, images: list[tuple[str, int | None]], number_of: dict[str, int]
) -> Generator[list[tuple[str, Any]]]:
    # Yield the members of each sample: names and contents.
    with contextlib.closing(in_parallel(lambda image: store.get(*image), images, _READERS, 2 * _READERS)) as contents:
        for number, ((key, _), content) in enumerate(zip(images, contents, strict=True)):
            stem, extension = os.path.splitext(key.rpartition("/")[2])  # noqa: PTH122
            # The number makes the key unique, the name is for people; a key ends at its first dot.
            sample = f"{number:08d}-{stem.replace('.', '_')}"
            label = str(number_of[class_of(key, prefix)]).encode()
            yield [(f"{sample}{extension.lower()}", content), (f"{sample}.cls", label)]


class _Target:
    """The folder or bucket that shards are written to; each file is complete or not there.

    Args:
        folder: the folder; for a bucket, a temporary one for files that are not uploaded yet.
        store: the bucket; None: a local folder is the target.
        prefix: in the bucket.
    """

    def __init__(self, folder: Path, store: Store | None = None, prefix: str = "") -> None:
        self._folder, self._store, self._prefix = folder, store, prefix

    @classmethod
    @contextlib.contextmanager
    def open(cls, out: str, access: Access) -> Iterator[_Target]:
        """Open the target; refuse one that has an index."""
        taken = f"{out} holds an {INDEX_NAME} already: remove it, or give another folder"
        if is_local(out):
            folder = Path(absolute(out))
            if (folder / INDEX_NAME).exists():
                raise FileExistsError(taken)
            folder.mkdir(parents=True, exist_ok=True)
            yield cls(folder)
            return
        if out.startswith(("http://", "https://")):
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
        """Open a file that gets its final name, or is uploaded, when the block has ended and the disk has all of it."""
        path = self._folder / name
        with replacing(path) as part, part.open("wb") as file:
            yield file
        if self._store is not None:
            self._store.put(f"{self._prefix}{name}", path)
            path.unlink()


def _write_shard(
    target: _Target, name: str, samples: Iterator[list[tuple[str, Any]]], n_bytes: float
) -> dict[str, Any] | None:
    # Write one shard and return its entry for the index; return None if no samples are left.
    sample = next(samples, None)
    if sample is None:
        return None
    count = 0
    with target.writing(name) as file:
        hashed: Any = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            while sample is not None:
                for member_name, content in sample:
                    member = tarfile.TarInfo(member_name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                count += 1
                sample = next(samples, None) if tar.offset < n_bytes else None
    return {"url": name, "nsamples": count, "filesize": hashed.size, "md5sum": hashed.md5.hexdigest()}


class _Hashed:
    """A file that computes the MD5 and the size of its content."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.md5 = hashlib.md5(usedforsecurity=False)
        self.size = 0

    def write(self, content: bytes) -> int:
        self.md5.update(content)
        self.size += len(content)
        return self._file.write(content)


def _examine(url: str, access: Access) -> tuple[int, str, TarMembers]:
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


def _json(index: dict[str, Any]) -> bytes:
    return json.dumps(index, indent=1, ensure_ascii=False).encode()
