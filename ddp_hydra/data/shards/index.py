"""Reads wids indexes: JSON files that list tar shards with their numbers of samples."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import replace

from ddp_hydra.checked import Count, prepare
from ddp_hydra.storage import Access, bare_url, is_remote
from ddp_hydra.storage.fsspec_store import is_known
from ddp_hydra.storage.urls import as_text, local_path

T = TypeVar("T")
KIND: Literal["wids-shard-index-v1"] = "wids-shard-index-v1"
VERSION: Literal[1] = 1
SCHEMES = ("s3", "http", "https", "file")
DEEPEST = 8
"""How many levels of indexes may name other indexes."""
_SET_INDEX = "check data.index=..."


class Shard(Struct, frozen=True):
    """One tar file of an index.

    Args:
        url: s3://, http(s):// or an absolute path; as the index says it, until that is read.
        n_samples: how many samples it holds.
        size: of the file, bytes; None: the index does not say.
        md5: of the file, in hexadecimal digits; None: the index does not say.
        dataset: name of the data set that it belongs to.
    """

    url: Annotated[str, Meta(min_length=1)]
    n_samples: Count = field(name="nsamples")
    size: Count | None = field(default=None, name="filesize")
    md5: Annotated[str, Meta(pattern=r"\A[0-9A-Fa-f]{32}\Z")] | None = field(default=None, name="md5sum")
    dataset: str | None = None


class ShardIndex(Struct, frozen=True):
    """All shards of an index and its sub-datasets, in order.

    Args:
        name: of the data set; "": the index gives no name.
        info: the description in the index, mostly a dict; `write_shards` puts the classes there.
        shards: the tar files.
    """

    name: str
    shards: tuple[Shard, ...]
    info: Any = {}


class _Dataset(Struct):
    """A sub-dataset, as the file says it: its shards, or where its own index is."""

    name: str | None = None
    base: str | None = None
    shardlist: list[Shard] | None = None
    datasets: list[_Dataset] | None = None
    source_url: str | None = None


class _File(_Dataset, kw_only=True):
    """An index, as the file says it."""

    wids_version: Literal[1]
    kind: Literal["wids-shard-index-v1"] = field(default=KIND, name="__kind__")
    info: Any = None


Index = str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | IO[Any]
"""A URL or path, the entries of a shard list, the index itself, or an open file with its JSON."""


def read_index(
    index: Index,
    *,
    base: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    access: Access | None = None,
) -> ShardIndex:
    """Read an index and the indexes that it names.

    Relative URLs of shards are relative to `base`, else to the base that the index names, else to the folder of the
    index; for a list or an open file, to the working folder. An index from the network may not name files of this
    machine.

    Args:
        index: the JSON file: s3://bucket/key, http(s)://host/path, file:///path, a path or a URL of fsspec; or open for
            reading; or a list of shards, each a dict with url and nsamples, and possibly filesize and md5sum.
        base: the folder or URL of the shards; None: as above.
        dataset: read only the sub-dataset of this name; None: read all.
        access: how URLs are read.
    """
    access = access or Access(setting="data.index")
    if isinstance(index, str | os.PathLike):
        source = absolute(as_text(index))
        file = _load(access, source)
    elif isinstance(index, Sequence):
        source = absolute("the list of shards")
        file = _File(shardlist=_converted([*index], list[Shard], source), wids_version=VERSION)
    else:
        source, content = absolute("the open index"), index if isinstance(index, Mapping) else index.read()
        file = _converted(content, _File, source) if isinstance(content, Mapping) else _parse(content, source)
    folder = None if base is None else _Folder(absolute(as_text(base)).rstrip("/"), not is_remote(source))
    found = list(_shards(access, file, source, folder))
    if not found:
        raise ValueError(f"the index {bare_url(source)} names no shards: {_SET_INDEX}")
    if dataset is not None:
        known = {name: None for names, _ in found for name in names if name}
        found = [(names, shard) for names, shard in found if dataset in names]
        if not found:
            has = f"has: {', '.join(known)}" if known else "names none"
            raise ValueError(
                f"the index {bare_url(source)} has no data set {dataset!r}; it {has}. Check data.dataset=..."
            )
    info = {} if file.info is None else file.info
    return ShardIndex(name=dataset or file.name or "", shards=tuple(shard for _, shard in found), info=info)


def _load(access: Access, source: str) -> _File:
    try:
        store, key = access.open(source)
        content = bytes(store.get(key))
    except IsADirectoryError:
        name = bare_url(source)
        raise FileNotFoundError(f"{name} is a folder: give the index in it, {name}/index.json; {_SET_INDEX}") from None
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"there is no file {bare_url(source)}" if not is_remote(source) else str(error)
        raise FileNotFoundError(f"the index can't be read: {reason}; {_SET_INDEX}") from None
    return _parse(content, source)


def _shards(
    access: Access,
    dataset: _Dataset,
    source: str,
    folder: _Folder | None,
    names: tuple[str, ...] = (),
    depth: int = 0,
) -> Iterator[tuple[tuple[str, ...], Shard]]:
    """Yield each shard, together with the names of the data sets that it belongs to, outermost first."""
    folder = folder or _Folder.of(source).within(dataset.base)
    names = (*names, dataset.name) if dataset.name else names
    for shard in dataset.shardlist or ():
        md5, name = shard.md5 and shard.md5.lower(), names[-1] if names else shard.dataset
        yield names, replace(shard, url=folder.join(shard.url), md5=md5, dataset=name)
    for number, inner in enumerate(dataset.datasets or ()):
        if inner.source_url is not None:
            nested = _Folder.of(source).join(inner.source_url)
            if depth >= DEEPEST:
                raise ValueError(
                    f"the index {bare_url(source)} leads back, or too deep, to {bare_url(nested)} (deepest: {DEEPEST})"
                )
            file = _load(access, nested)
            file.name = inner.name or file.name
            base = None if inner.base is None else _Folder(folder.join(inner.base).rstrip("/"), not is_remote(nested))
            yield from _shards(access, file, nested, base, names, depth + 1)
        elif inner.shardlist is not None or inner.datasets is not None:
            yield from _shards(access, inner, source, folder.within(inner.base), names, depth)
        else:
            where = f"data set {number} of the index {bare_url(source)}"
            raise ValueError(f"{where} has neither a shardlist nor a source_url")


def _parse(content: bytes | str, source: str) -> _File:
    if re.search(r"\.(tar|tgz|tar\.\w+)$", bare_url(source)):
        raise ValueError(
            f"{bare_url(source)} is a tar file, no index of tar files: type python -m ddp_hydra.data.shards index "
            f"{bare_url(source)} --out index.json, and then data.index=index.json"
        )
    try:
        return _converted(json.loads(content), _File, source)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the index {bare_url(source)} is not JSON ({error}): {_SET_INDEX}") from None


def _converted(content: Any, kind: type[T], source: str) -> T:
    try:
        return convert(content, kind)
    except ValidationError as error:
        raise ValueError(f"{bare_url(source)} is not an index of shards ({error}): {_SET_INDEX}") from None


class _Folder(Struct, frozen=True):
    """A folder for relative URLs.

    Args:
        root: path or URL of the folder.
        trusted: whether files of this machine may be named: only an index on this machine may do so.
    """

    root: str
    trusted: bool

    @classmethod
    def of(cls, source: str) -> _Folder:
        """Return the folder that holds an index."""
        if source.startswith(("http://", "https://")):
            source = source.partition("?")[0].partition("#")[0]
        return cls(source.rpartition("/")[0], not is_remote(source))

    def within(self, base: str | None) -> _Folder:
        """Return the folder that an index names as its base, or this one."""
        return self if base is None else _Folder(self.join(base).rstrip("/"), self.trusted)

    def join(self, url: str) -> str:
        """Return the absolute form of a URL that an index names."""
        names_file = url.startswith(("/", "file:"))
        if names_file and not self.trusted:
            raise ValueError(
                f"{url!r} is a file of this machine, and is named by an index from the network: write a relative URL"
            )
        if names_file or _scheme(url):
            return absolute(url)
        head, path = re.findall(r"\A([a-z0-9]+://[^/]*)?(.*)", self.root, re.DOTALL)[0]
        joined = posixpath.normpath(f"{path}/{url}")
        if head:
            return f"{head}/{joined.lstrip('/')}"
        if not self.trusted and not joined.startswith(f"{path}/"):
            raise ValueError(f"{url!r} leads out of {path}, and is named by an index from the network")
        return joined


def absolute(url: str) -> str:
    """Return a path or a file:// URL as an absolute path, and any other URL unchanged, if it can be read."""
    scheme = _scheme(url)
    if scheme in ("", "file"):
        return os.path.normpath(local_path(url))
    if scheme not in SCHEMES and not is_known(scheme):
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{url!r} can't be read: give a path, or a URL that starts with {known}")
    return url


def _scheme(url: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://|(pipe):", url)
    return (found[1] or found[2]) if found else ""


prepare(_Dataset, Shard)
