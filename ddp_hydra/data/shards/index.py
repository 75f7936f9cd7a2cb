"""Reads wids indexes: JSON files that list tar shards with their numbers of samples."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeGuard
from urllib.parse import unquote, urlsplit, urlunsplit

from ddp_hydra.storage import Access
from ddp_hydra.storage.fsspec_schemes import is_known

KIND = "wids-shard-index-v1"
VERSION = 1
SCHEMES = ("s3", "http", "https", "file")
DEEPEST = 8
"""How many levels of indexes may name other indexes."""
_SET_INDEX = "check data.index=..."


@dataclass(frozen=True)
class Shard:
    """One tar file of an index.

    Args:
        url: s3://, http(s):// or an absolute path.
        n_samples: how many samples it holds.
        size: of the file, bytes; None: the index does not say.
        md5: of the file, in hexadecimal digits; None: the index does not say.
        dataset: name of the data set that it belongs to.
    """

    url: str
    n_samples: int
    size: int | None = None
    md5: str | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class ShardIndex:
    """All shards of an index and its sub-datasets, in order.

    Args:
        name: of the data set; "": the index gives no name.
        info: the description in the index; `write_shards` puts the classes there.
        shards: the tar files.
    """

    name: str
    shards: tuple[Shard, ...]
    info: dict[str, Any] = field(default_factory=dict)


Index = str | Sequence[Mapping[str, Any]] | IO[Any]
"""A URL, the entries of a shard list, or an open file with the JSON."""


def read_index(
    index: Index, *, base: str | None = None, dataset: str | None = None, access: Access | None = None
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

    Raises:
        ValueError: the file is not such an index, or names what it may not name.
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ConnectionError: its host is not reachable.
    """
    reader = _Reader(access or Access(setting="data.index"))
    if isinstance(index, str):
        source = absolute(index)
        document = reader.load(source)
    else:
        source = absolute("the list of shards" if isinstance(index, Sequence) else "the open index")
        content = {"wids_version": VERSION, "shardlist": list(index)} if isinstance(index, Sequence) else index.read()
        document = content if isinstance(content, dict) else reader.parse(content, source)
    folder = None if base is None else _Folder(absolute(base).rstrip("/"), is_local(source))
    found = list(reader.shards(document, source, folder, names=(), above=()))
    if not found:
        raise ValueError(f"the index {shown(source)} names no shards: {_SET_INDEX}")
    if dataset is not None:
        known = {name: None for names, _ in found for name in names if name}
        found = [(names, shard) for names, shard in found if dataset in names]
        if not found:
            has = f"has: {', '.join(known)}" if known else "names none"
            raise ValueError(f"the index {shown(source)} has no data set {dataset!r}; it {has}. Check data.dataset=...")
    info = document.get("info")
    return ShardIndex(
        name=dataset or str(document.get("name") or ""),
        shards=tuple(shard for _, shard in found),
        info=info if isinstance(info, dict) else {},
    )


class _Reader:
    """Reads an index and the indexes that it names."""

    def __init__(self, access: Access) -> None:
        self.access = access

    def load(self, source: str) -> dict[str, Any]:
        """Read an index, and check its kind."""
        try:
            store, key = self.access.open(source)
            content = bytes(store.get(key))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            reason = f"there is no file {shown(source)}" if is_local(source) else str(error)
            raise FileNotFoundError(f"the index can't be read: {reason}; {_SET_INDEX}") from None
        return self.parse(content, source)

    def parse(self, content: bytes | str, source: str) -> dict[str, Any]:
        """Return an index, checked as far as its kind."""
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the index {shown(source)} is no JSON ({error}): {_SET_INDEX}") from None
        if not isinstance(document, dict):
            raise ValueError(
                f"the index {shown(source)} holds {_short(document)}, and must be a JSON object: {_SET_INDEX}"
            )
        kind, version = document.get("__kind__", KIND), document.get("wids_version")
        if kind != KIND:
            raise ValueError(
                f"the index {shown(source)} is of the kind {_short(kind)}, and must be {KIND!r}: {_SET_INDEX}"
            )
        if version != VERSION or isinstance(version, bool):
            problem = "has no wids_version" if version is None else f"has wids_version {_short(version)}"
            raise ValueError(f"the index {shown(source)} {problem}, and only {VERSION} can be read: {_SET_INDEX}")
        return document

    def shards(
        self,
        document: dict[str, Any],
        source: str,
        folder: _Folder | None,
        names: tuple[str, ...],
        above: tuple[str, ...],
    ) -> Iterator[tuple[tuple[str, ...], Shard]]:
        """Yield each shard, together with the names of the data sets that it belongs to, outermost first.

        Args:
            document: an index, or one of its sub-datasets.
            source: URL of the index.
            folder: folder of its shards; None: the one that it names, else its own.
            names: of the data sets that contain it.
            above: URLs of the indexes that led to it.
        """
        folder = folder or _Folder.of(source).within(_text(document, "base", source))
        names = (*names, name) if (name := _text(document, "name", source)) else names
        for number, entry in enumerate(_list(document, "shardlist", source)):
            yield names, _shard(entry, number, folder, source, names)
        for number, entry in enumerate(_list(document, "datasets", source)):
            where = f"data set {number} of the index {shown(source)}"
            if not isinstance(entry, dict):
                raise ValueError(f"{where} is {_short(entry)}, and must be a JSON object")
            if (named := _text(entry, "source_url", source)) is not None:
                yield from self._nested(_Folder.of(source).join(named), entry, source, folder, names, above)
            elif "shardlist" in entry or "datasets" in entry:
                inner = folder.within(_text(entry, "base", source))
                yield from self.shards(entry, source, inner, names, above)
            else:
                raise ValueError(f"{where} has neither a shardlist nor a source_url")

    def _nested(
        self,
        nested: str,
        entry: dict[str, Any],
        source: str,
        folder: _Folder,
        names: tuple[str, ...],
        above: tuple[str, ...],
    ) -> Iterator[tuple[tuple[str, ...], Shard]]:
        above = (*above, source)
        if nested in above:
            raise ValueError(f"the index {shown(source)} leads back to {shown(nested)}: take it out of its datasets")
        if len(above) > DEEPEST:
            raise ValueError(f"the index {shown(nested)} is named {len(above)} indexes deep, and {DEEPEST} are allowed")
        document = self.load(nested)
        if name := _text(entry, "name", source):
            document = {**document, "name": name}
        base = _text(entry, "base", source)
        inner = None if base is None else _Folder(folder.join(base).rstrip("/"), is_local(nested))
        yield from self.shards(document, nested, inner, names, above)


@dataclass(frozen=True)
class _Folder:
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
        return cls(source.rpartition("/")[0], is_local(source))

    def within(self, base: str | None) -> _Folder:
        """Return the folder that an index names as its base, or this one."""
        return self if base is None else _Folder(self.join(base).rstrip("/"), self.trusted)

    def join(self, url: str) -> str:
        """Return the absolute form of a URL that an index names."""
        names_file = url.startswith(("/", "file:"))
        if names_file and not self.trusted:
            raise ValueError(
                f"{url!r} is a file of this machine, and is named by an index from the network: write a relative or a "
                "whole URL there"
            )
        if names_file or _is_read(scheme := _scheme(url)):
            return absolute(url)
        if scheme:
            raise ValueError(
                f"{url!r} can't be read: URLs of an index are relative, or start with "
                f"{', '.join(f'{known}://' for known in SCHEMES)}"
            )
        head, path = _split(self.root)
        joined = posixpath.normpath(f"{path}/{url}")
        if not head:
            if not self.trusted and not joined.startswith(f"{path}/"):
                raise ValueError(f"{url!r} leads out of {path}, and is named by an index from the network")
            return joined
        return f"{head}/{joined.lstrip('/')}"


def is_local(url: str) -> bool:
    """Return whether an absolute URL is a file of this machine."""
    return not _scheme(url) or url.startswith("file:")


def absolute(url: str) -> str:
    """Return a path or a file:// URL as an absolute path, and any other URL unchanged.

    Raises:
        ValueError: URLs of this kind can't be read.
    """
    if url.startswith("file:"):
        return os.path.normpath(unquote(urlsplit(url).path))
    if not (scheme := _scheme(url)):
        return os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111 (Path keeps "..")
    if not _is_read(scheme):
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{url!r} can't be read: give a path, or a URL that starts with {known}")
    return url


def shown(url: str) -> str:
    """Return a URL without its possible secrets: user, password and query."""
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _is_read(scheme: str) -> bool:
    return scheme in SCHEMES or (bool(scheme) and is_known(scheme))


def _scheme(url: str) -> str:
    """Return the scheme of a URL, "pipe" for a command, or "" for a path."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://|(pipe):", url)
    return (found[1] or found[2]) if found else ""


def _split(root: str) -> tuple[str, str]:
    """Return scheme and host (or bucket) of a folder, and its path; "" and its path if it is local."""
    found = re.match(r"([a-z0-9]+://[^/]*)(.*)", root, re.DOTALL)
    return (found[1], found[2]) if found else ("", root)


def _shard(entry: Any, number: int, folder: _Folder, source: str, names: tuple[str, ...]) -> Shard:
    where = f"shard {number} of the index {shown(source)}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {_short(entry)}, and no JSON object with url and nsamples")
    url, n_samples, size, md5 = (entry.get(key) for key in ("url", "nsamples", "filesize", "md5sum"))
    if not isinstance(url, str) or not url:
        raise ValueError(f"{where} has the url {_short(url)}, and must have one")
    where = f"{where} ({shown(url)})"
    if not _is_count(n_samples):
        raise ValueError(f"{where} has the nsamples {_short(n_samples)}, and must have a number, 0 or more")
    if size is not None and not _is_count(size):
        raise ValueError(f"{where} has the filesize {_short(size)}, which is a number of bytes, or left out")
    if md5 is not None and not (isinstance(md5, str) and re.fullmatch(r"[0-9A-Fa-f]{32}", md5)):
        raise ValueError(f"{where} has the md5sum {_short(md5)}, which is 32 hexadecimal digits, or left out")
    return Shard(folder.join(url), n_samples, size, md5.lower() if md5 else None, names[-1] if names else None)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list(document: dict[str, Any], key: str, source: str) -> list[Any]:
    value = document.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key} of the index {shown(source)} is {_short(value)}, and must be a list")
    return value


def _text(document: dict[str, Any], key: str, source: str) -> str | None:
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} of the index {shown(source)} is {_short(value)}, and must be text")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
