"""Reads the files of a run, which are in a folder or in a store; keeps its tags.

The first tags are from the config; tags.json holds them once they are changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import Store, urls
from ddp_hydra.storage.base import ObjectChangedError
from ddp_hydra.storage.files import flocked, write_atomic
from ddp_hydra.storage.run_ref import RunRef

log = logging.getLogger(__name__)
MOST_BYTES = 16 * 2**20
"""Larger files are not read: none that a run writes about itself comes near."""


class LocalRunFiles:
    """The files of a run in a folder; `place` is its path."""

    def __init__(self, folder: str | Path) -> None:
        self.place = str(folder)

    def read(self, name: str, last_bytes: int = 0) -> bytes:
        """Return the content of a file; b"" if there is none, or it is not a file, or too large.

        Args:
            last_bytes: bytes to read at the end, of a file of any size; 0: all of it.
        """
        try:
            handle = open_below(self.place, name)
        except (OSError, ValueError):
            return b""
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or (found.st_size > MOST_BYTES and not last_bytes):
                return b""
            with open(handle, "rb", closefd=False) as file:
                if last_bytes:
                    file.seek(max(0, found.st_size - last_bytes))
                return file.read(last_bytes or MOST_BYTES)
        except OSError:
            return b""
        finally:
            os.close(handle)

    def refuse_closed(self, name: str) -> None:
        """Raise ConfigError for a file that is there and may not be read; `read` takes it for none."""
        try:
            os.close(open_below(self.place, name))
        except PermissionError as error:
            advice = "check its rights and those of its folders"
            raise ConfigError(f"{self.place}/{name}: {error.strerror}: {advice}") from None
        except (OSError, ValueError):
            pass

    def sizes(self, without: Collection[str] = (), seen: set[tuple[int, int]] | None = None) -> dict[str, int]:
        """Return the size in bytes of each file, by name; 0 for links, and for further names of a file.

        A warning names each folder that may not be read.

        Args:
            without: folders that are left out: other runs inside this one.
            seen: files of other runs, by device and inode, which have size 0, too; the files of this run are added.
        """
        found: dict[str, int] = {}
        seen = set() if seen is None else seen
        for folder, inner, names in os.walk(self.place, onerror=_warn):
            inner[:] = [name for name in inner if os.path.join(folder, name) not in without]  # noqa: PTH118
            for name in names:
                path = os.path.join(folder, name)  # noqa: PTH118, a run may have very many files
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    inode = (status.st_dev, status.st_ino)
                    counts = stat.S_ISREG(status.st_mode) and inode not in seen
                    found[os.path.relpath(path, self.place)] = status.st_size if counts else 0
                    seen.add(inode)
        return found


def _warn(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # removed meanwhile
        log.warning("%s: %s: what it holds is not counted", error.filename, error.strerror)


def open_below(folder: str, name: str) -> int:
    """Open a file below a folder to read it, and return its descriptor. No link below the folder is followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    *inner, last = name.split("/")
    if not inner:
        return os.open(f"{folder}/{last}", flags)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for one in inner:
        try:
            below = os.open(one, flags | os.O_DIRECTORY, dir_fd=at)
        finally:
            os.close(at)
        at = below
    try:
        return os.open(last, flags, dir_fd=at)
    finally:
        os.close(at)


class StoredRunFiles:
    """The files of a run in a store; `place` is its URL.

    Args:
        store: holds the run.
        folder: of the run in the store; "" for the store itself.
        listed: the size of each object, if they are listed already.
    """

    def __init__(self, store: Store, folder: str = "", listed: dict[str, int] | None = None) -> None:
        self.store, self._folder, self._listed = store, folder, listed
        self.place = f"{store.url}/{folder}".rstrip("/")

    def key(self, name: str) -> str:
        return f"{self._folder}/{name}".lstrip("/")

    def read(self, name: str, last_bytes: int = 0) -> bytes:
        key, content = self.key(name), b""
        with contextlib.suppress(FileNotFoundError), reachable():
            size = self.store.size(key) if self._listed is None or last_bytes else self._listed.get(name)
            if size and last_bytes:
                content = self.store.get_range(key, max(0, size - last_bytes), size)
            elif size and size <= MOST_BYTES:
                content = self.store.get(key)
        return content

    def sizes(self) -> dict[str, int]:
        if self._listed is not None:
            return self._listed
        with reachable():
            return {key.removeprefix(self._folder).lstrip("/"): size for key, size in self.store.objects(self._folder)}


RunFiles = LocalRunFiles | StoredRunFiles
"""The files of one run, wherever they are."""


@contextmanager
def reachable() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except ConnectionError as error:
        raise ConfigError(f"{error}: try again later") from None


def open_run(run: str) -> RunFiles:
    ref = RunRef.named(run)
    place = ref.folder
    if ref.is_stored:
        stored = StoredRunFiles(ref.store())
        if not any(stored.read(name) for name in ("status.json", "summary.json", ".hydra/config.yaml")):
            raise ConfigError(f"{place} holds no run: ddp-hydra runs ls <URL> lists the runs below one")
        return stored
    folder = Path(place)
    if not folder.is_dir():
        raise ConfigError(
            f"{place}: there is no such folder"
            + text.after(text.meant_path(place), "type ddp-hydra runs ls, which lists the runs of outputs and multirun")
        )
    if not is_run(set(os.listdir(folder))):  # noqa: PTH208
        raise ConfigError(f"{place} is not a run directory; ddp-hydra runs ls {place} lists the runs below it")
    return LocalRunFiles(place)


MARKS = frozenset({".hydra", "summary.json", "status.json", "metrics.jsonl", urls.POINTER})
"""Names of which a run directory has at least one."""


def is_run(names: set[str]) -> bool:
    return not MARKS.isdisjoint(names)


def yaml_value(content: bytes) -> Any:
    try:
        return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if content else None  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


TAGS = "tags.json"
MOST_TAGS = 100
"""The most tags that a run has."""
_TAG = re.compile(r"[^\W_][\w.:/@-]{0,63}")
_TRIES = 5


def read_tags(files: RunFiles, of_config: Sequence[str]) -> list[str]:
    try:
        kept: Sequence[str] = msgspec.json.decode(files.read(TAGS), type=list[str])
    except (ValueError, RecursionError):  # there is none, or it is broken
        kept = of_config
    return [tag[:64] for tag in kept[:MOST_TAGS]]


def change_tags(files: RunFiles, of_config: Sequence[str], words: Sequence[str]) -> list[str]:
    for word in words:
        if not (word[:1] == "-" or (word[:1] == "+" and _TAG.fullmatch(word[1:]))):
            raise ConfigError(f"{word!r}: give +good or -old, of at most 64 letters, digits and . _ : / @ -")
    if isinstance(files, StoredRunFiles):
        return _change_stored_tags(files, of_config, words)
    files.refuse_closed(TAGS)
    with flocked(Path(files.place)):
        found = changed_tags(read_tags(files, of_config), words)
        write_atomic(Path(files.place) / TAGS, _encoded_tags(found), durable=False)
    return found


def changed_tags(tags: Sequence[str], words: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(tags))
    for word in words:
        sign, tag = word[0], word[1:]
        if sign == "-" and tag not in found:
            raise ConfigError(f"the run has no tag {tag}; it has {', '.join(tags) or 'none'}")
        found = [one for one in found if one != tag] + [tag] * (sign == "+")
    if len(found) > MOST_TAGS:
        raise ConfigError(f"a run has {MOST_TAGS} tags at most: remove some with -<tag>")
    return found


def _change_stored_tags(files: StoredRunFiles, of_config: Sequence[str], words: Sequence[str]) -> list[str]:
    for _ in range(_TRIES):
        with reachable():
            etag = files.store.etag(files.key(TAGS))
            found = changed_tags(read_tags(files, of_config), words)
            with contextlib.suppress(ObjectChangedError):
                try:
                    files.store.put_if(files.key(TAGS), _encoded_tags(found), etag)
                except NotImplementedError:  # a store without conditional writes
                    files.store.put(files.key(TAGS), _encoded_tags(found))
                return found
    raise ConfigError(f"others change the tags of {files.place} all the time: try again")


def _encoded_tags(tags: Sequence[str]) -> bytes:
    return (json.dumps(list(tags)) + "\n").encode()
