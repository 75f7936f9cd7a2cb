"""Writes tar shards from an image folder, and the index of existing shards."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import re
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddp_hydra.data.names import class_names, class_of
from ddp_hydra.data.shards.download import download, is_packed
from ddp_hydra.data.shards.index import KIND, VERSION, Shard, absolute, read_index
from ddp_hydra.data.shards.tar_index import TarMembers, read_members
from ddp_hydra.data.threads import Lookahead
from ddp_hydra.storage import Access, Store, bare_url, is_remote

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
    """
    if shard_mb <= 0:
        raise ValueError(f"shard-mb is {shard_mb:g}, and must be above 0: type --shard-mb 128")
    name = name if name is not None else re.sub(r"[^\w.-]", "_", absolute(source).rstrip("/").rpartition("/")[2])
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ValueError(f"the name is {name!r}, and must be letters, digits, dots and dashes: type --name train")
    access = access or Access(setting="SOURCE")
    target, folder = _open_target(out, access)
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
    shards: list[dict[str, Any]] = []
    with contextlib.closing(_samples(store, prefix, images, number_of)) as samples:
        for first in samples:
            shard = {"url": f"{name}-{len(shards):06d}.tar"}
            place = getattr(target, "folder", None) or tempfile.gettempdir()
            with _named(place), tempfile.NamedTemporaryFile(prefix=".part-", dir=place) as file:
                shard |= _write_shard(file, itertools.chain([first], samples), shard_mb * MIB)
                target.put(f"{folder}{shard['url']}", file)
            shards.append(shard)
            report(f"{shard['url']}: {shard['nsamples']:,} samples, {shard['filesize']:,} bytes")
    info = {"classes": classes, "source": bare_url(source), "seed": seed}
    return _write_index(target, f"{folder}{INDEX_NAME}", shards, info, name=name)


def write_index(
    tars: Sequence[str],
    out: str,
    *,
    name: str | None = None,
    base: str | None = None,
    info: Any = None,
    access: Access | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the index of existing shards.

    Args:
        tars: paths or URLs of tar files, in order; remote files are downloaded one after the other.
        out: path of the index; shards below its folder get relative names.
        name: of the data set; None: no name.
        base: the folder or URL of the shards that the index names; None: none.
        info: the description in the index.
        access: how URLs are read.
        report: called with a line of text for each shard.

    Returns:
        The index.
    """
    access = access or Access(setting="TAR")
    target = Path(absolute(out))
    if target.is_dir():
        raise ValueError(f"{out} is a folder: give the path of a file, such as {target.name}/index.json")
    shards: list[dict[str, Any]] = []
    for tar in tars:
        url = absolute(tar)
        sums, members = _examine(url, access)
        if not len(members):
            raise ValueError(f"{bare_url(url)} holds no samples: its files need names with an extension")
        inside = not is_remote(url) and Path(url).is_relative_to(target.parent)
        named = Path(url).relative_to(target.parent).as_posix() if inside else url
        shards.append({"url": named, "nsamples": len(members), **sums})
        report(f"{bare_url(url)}: {len(members):,} samples, {sums['filesize']:,} bytes")
    return _write_index(*access.open(str(target)), shards, info or {}, name=name, base=base)


def _write_index(
    store: Store, key: str, shards: list[dict[str, Any]], info: Any, **named: str | None
) -> dict[str, Any]:
    given = {name: value for name, value in named.items() if value}
    index = {"__kind__": KIND, "wids_version": VERSION, **given, "info": info, "shardlist": shards}
    store.put(key, json.dumps(index, indent=1, ensure_ascii=False).encode())
    return index


def _images(store: Store, prefix: str, source: str, report: Callable[[str], None]) -> list[tuple[str, int]]:
    # It imports torch, which takes seconds that `index` need not spend.
    from ddp_hydra.data.images.listing import kinds_of, list_images

    found = list_images(store, prefix)
    skipped = f"skipped: {kinds_of(found.others)}"
    if not len(found.keys):
        reason = skipped if found.others else "it is empty"
        raise FileNotFoundError(f"{source} holds no images in class folders, {source}/<class>/<file>.jpg; {reason}")
    if found.others:
        report(skipped)
    return list(zip(found.keys, found.sizes.tolist(), strict=True))


def _classes(source: str, access: Access, report: Callable[[str], None]) -> list[str]:
    if bare_url(source).endswith(".json"):
        info = read_index(source, access=access).info
        classes = info.get("classes") if isinstance(info, dict) else None
        where, advice = f"the index {bare_url(source)}", "type another --classes-from"
        if not isinstance(classes, list | dict):
            raise ValueError(f"{where} names no classes (info.classes): {advice}")
        return [str(name) for name in class_names(classes, f"{where} (info.classes)", advice)]
    store, prefix = access.open(absolute(source))
    return sorted({class_of(key, prefix) for key, _ in _images(store, prefix, source, report)})


def _samples(
    store: Store, prefix: str, images: list[tuple[str, int]], number_of: dict[str, int]
) -> Generator[list[tuple[str, Any]]]:
    with Lookahead((partial(store.get, *image) for image in images), _READERS, 2 * _READERS) as contents:
        for number, ((key, _), content) in enumerate(zip(images, contents, strict=True)):
            stem, extension = os.path.splitext(key.rpartition("/")[2])  # noqa: PTH122
            # The number makes the key unique, the name is for people; a key ends at its first dot.
            sample = f"{number:08d}-{stem.replace('.', '_')}"
            label = str(number_of[class_of(key, prefix)]).encode()
            yield [(f"{sample}{extension.lower()}", content), (f"{sample}.cls", label)]


def _open_target(out: str, access: Access) -> tuple[Store, str]:
    # Return the store of a folder, and what the keys of its files begin with; refuse a folder that has an index.
    if out.startswith(("http://", "https://")):
        raise ValueError(f"{out!r} can't be written to: give a folder, or s3://bucket/prefix")
    store, prefix = access.open_folder(absolute(out))
    folder = f"{prefix}/" if prefix else ""
    if store.size_or_none(f"{folder}{INDEX_NAME}") is not None:
        raise FileExistsError(f"{out} holds an {INDEX_NAME} already: remove it, or give another folder")
    if not is_remote(out):
        Path(absolute(out)).mkdir(parents=True, exist_ok=True)
    return store, folder


@contextlib.contextmanager
def _named(folder: str | Path) -> Iterator[None]:
    # The error of a full disk names no file.
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(folder)
        raise


def _write_shard(file: Any, samples: Iterator[list[tuple[str, Any]]], n_bytes: float) -> dict[str, Any]:
    count = 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for sample in samples:
            for name, content in sample:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            count += 1
            if tar.offset >= n_bytes:
                break
    return {"nsamples": count, **_sums(file)}


def _sums(file: Any) -> dict[str, Any]:
    file.seek(0)
    md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return {"filesize": file.tell(), "md5sum": md5.hexdigest()}


def _examine(url: str, access: Access) -> tuple[dict[str, Any], TarMembers]:
    if not is_remote(url) and not is_packed(url):
        with Path(url).open("rb") as file:
            return _sums(file), read_members(Path(url))
    store, key = access.open(url)
    with tempfile.NamedTemporaryFile(prefix="shard-", suffix=".tar") as file:
        md5 = hashlib.md5(usedforsecurity=False)
        size = download(Shard(url, 0), store, key, file.fileno(), lambda n_bytes: None, md5.update)
        return {"filesize": size, "md5sum": md5.hexdigest()}, read_members(Path(file.name))
