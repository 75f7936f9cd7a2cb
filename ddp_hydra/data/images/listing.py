"""Lists the images that a store holds under a prefix; the listing can be kept on the disk."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS
from ddp_hydra.data.names import is_leftover
from ddp_hydra.errors import RecordError
from ddp_hydra.storage import Store
from ddp_hydra.storage.files import user_cache, write_atomic


class StringArray:
    """A sequence of strings in two blocks of memory.

    A million paths need 50 MB less than in a list, and pickle to a few MB. Names of files that are not UTF-8 come back
    as Python gives them.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode(errors="surrogateescape") for string in strings]
        self._text = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        return self._text[self._ends[index] : self._ends[index + 1]].decode(errors="surrogateescape")

    def __getstate__(self) -> dict[str, Any]:
        # Sorted paths are so similar that the fastest level compresses them well.
        return {"text": zlib.compress(self._text, 1), "lengths": np.diff(self._ends).astype(np.uint32)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._text = zlib.decompress(state["text"])
        self._ends = np.concatenate([[0], np.cumsum(state["lengths"], dtype=np.int64)])


@dataclass
class Listing:
    """The images under a prefix."""

    keys: StringArray  # in the order of torchvision's ImageFolder: by class, by folder, by file
    sizes: np.ndarray  # int64 (images,), bytes
    others: Counter[str]  # other objects by extension; "hidden": what `is_leftover` tells


def kinds_of(others: Counter[str]) -> str:
    kinds = [f"{count:,} {kind or 'without extension'}" for kind, count in others.most_common(5)]
    return ", ".join(kinds) + (", ..." if len(others) > len(kinds) else "")


def list_images(store: Store, prefix: str, in_folders: bool = True) -> Listing:
    found: list[tuple[str, str, str, int]] = []
    others: Counter[str] = Counter()
    inside = len(prefix) + 1 if prefix else 0
    folders: dict[str, tuple[str, str, bool]] = {}  # {folder: its class, itself, and whether it is left out}
    for key, size in store.objects(prefix):
        # There may be a million keys, and a path object would take ten times as long.
        end = key.rfind("/") + 1
        folder = key[: end - 1] if end else ""
        if folder not in folders:
            folders[folder] = folder[inside:].partition("/")[0], folder, is_leftover(folder[inside:])
        label, folder, hidden = folders[folder]  # one object for equal folders is compared fast
        if hidden or is_leftover(key[end:]):
            others["hidden"] += size > 0  # an empty one may be the marker of a folder
        elif key[key.rfind(".") :].lower() in IMAGE_EXTENSIONS and (label or not in_folders):
            found.append((label, folder, key, size))
        elif size or PurePosixPath(key).suffix:  # empty objects without an extension mark folders
            extension = PurePosixPath(key).suffix.lower()
            others["images outside a class folder" if extension in IMAGE_EXTENSIONS else extension] += 1
    found.sort()
    sizes = np.fromiter((size for *_, size in found), np.int64, len(found))
    return Listing(StringArray(key for _, _, key, _ in found), sizes, +others)


def holds_images(store: Store, folder: str) -> bool:
    # Ends at the first one.
    inside = len(folder) + 1
    return any(
        key[key.rfind(".") :].lower() in IMAGE_EXTENSIONS and not is_leftover(key[inside:])
        for key, _ in store.objects(folder)
    )


def list_images_once(store: Store, prefix: str, max_age_s: float, in_folders: bool = True) -> Listing:
    # max_age_s: how old a listing on the disk may be, in seconds; 0: always list the store.
    if not max_age_s:
        return list_images(store, prefix, in_folders)
    identity = f"3 {store.endpoint_url} {store.url} {prefix}{'' if in_folders else ' *'}"
    path = user_cache() / "listings" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json.gz"
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zlib.error):  # none, or damaged
        if time.time() - path.stat().st_mtime < max_age_s:
            saved = json.loads(gzip.decompress(path.read_bytes()))
            return Listing(StringArray(saved["keys"]), np.array(saved["sizes"], np.int64), Counter(saved["others"]))
    listing = list_images(store, prefix, in_folders)
    saved = {"keys": list(listing.keys), "sizes": listing.sizes.tolist(), "others": listing.others}
    with contextlib.suppress(RecordError, OSError):  # a disk that refuses it is no reason to stop
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, gzip.compress(json.dumps(saved).encode(), 1), durable=False)
    return listing
