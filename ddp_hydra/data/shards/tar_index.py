"""Indexes the samples of a tar file, so that each of them can be read without the others; decodes their parts."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import mmap
import os
import pickle
import posixpath
import secrets
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import torch

from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS, decode
from ddp_hydra.data.names import is_leftover
from ddp_hydra.data.shards.index import Shard
from ddp_hydra.storage import bare_url
from ddp_hydra.storage.files import replacing

_FORMAT = 3
_PACKED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7-Zip",
}  # fmt: skip
"""The first bytes of compressed files."""
_CHECKED_BLOCKS, _CHECKED_BYTES = 64, 4096
_MOST_LINKS = 40


class TarMembers:
    """The samples of one tar file: their keys, and the places of their fields.

    Members that follow each other belong to one sample if their names are the same up to the first dot of the file
    name. The rest of the name, from that dot on and in lower case, names the field: ".jpg" or ".seg.png". Members
    without a dot belong to no sample, nor do hidden ones and others that `is_leftover` tells. A link is a field with
    the content of its target.

    Args:
        keys: all keys one after the other, UTF-8.
        extensions: all extensions, each once.
        arrays: key_ends, int64 (samples,): the end of each key in `keys`; first, int64 (samples + 1,): number of the
            first field of each sample; extension, uint32 (fields,): index into `extensions`; offset, int64 (fields,):
            bytes from the start of the file; size, int64 (fields,): bytes.
        file_size: of the tar file, bytes.
        checksum: `checksum_of_some` of the tar file, to notice changes; 0: not computed yet.
    """

    def __init__(
        self, keys: bytes, extensions: tuple[str, ...], arrays: dict[str, Any], file_size: int, checksum: int = 0
    ) -> None:
        self.keys, self.extensions, self.arrays = keys, extensions, arrays
        self.file_size, self.checksum = file_size, checksum
        # Reading a number from a memoryview costs half as much as from an array.
        self._ends, self._first = arrays["key_ends"].data, arrays["first"].data
        self._extension, self._offset, self._size = (arrays[name].data for name in ("extension", "offset", "size"))

    def __len__(self) -> int:
        return len(self._ends)

    def key(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self.keys[start : self._ends[index]].decode("utf-8", "surrogateescape")

    def fields(self, index: int, content: memoryview) -> dict[str, memoryview]:
        extensions, extension, offset, size = self.extensions, self._extension, self._offset, self._size
        found = {}
        for field in range(self._first[index], self._first[index + 1]):
            start = offset[field]
            found[extensions[extension[field]]] = content[start : start + size[field]]
        return found

    def save(self, path: Path) -> None:
        # Save the index: the file is complete or is not there.
        extensions = "\0".join(self.extensions).encode("utf-8", "surrogateescape")
        texts: Any = {"keys": np.frombuffer(self.keys, np.uint8), "names": np.frombuffer(extensions, np.uint8)}
        part = path.with_name(f"{path.name}.{secrets.token_hex(6)}.part")
        with part.open("wb") as file, replacing(path, durable=False, part=part):
            fcntl.flock(file, fcntl.LOCK_EX)  # so that nobody takes it for the file of a killed process
            np.savez(file, head=np.array([_FORMAT, self.file_size, self.checksum]), **texts, **self.arrays)
            file.flush()


def load_members(path: Path, file_size: int) -> TarMembers | None:
    # Return a saved index, or None if there is none for a tar file of this size.
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            arrays: dict[str, Any] = {name: saved[name] for name in saved.files}
        head, keys, names = (arrays.pop(name) for name in ("head", "keys", "names"))
        *known, checksum = head.tolist()
        if known != [_FORMAT, file_size]:
            return None
        extensions = tuple(names.tobytes().decode("utf-8", "surrogateescape").split("\0"))
        return TarMembers(keys.tobytes(), extensions, arrays, file_size, checksum)
    except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile):
        return None


def checksum_of_some(descriptor: int) -> int:
    # Return a checksum of blocks spread over a file; one of the whole file would take as long as reading the data.
    size, checksum = os.fstat(descriptor).st_size, 0
    for number in range(_CHECKED_BLOCKS):
        start = max(0, size - _CHECKED_BYTES) * number // (_CHECKED_BLOCKS - 1)
        checksum = zlib.crc32(os.pread(descriptor, _CHECKED_BYTES, start), checksum)
    return checksum


def read_members(path: Path, descriptor: int | None = None) -> TarMembers:
    with path.open("rb") if descriptor is None else os.fdopen(os.dup(descriptor), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise ValueError(f"{path} is empty, and must be a tar file")
        start = file.read(8)
        if kind := next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), None):
            advice = "name it .tar.gz, in the index, too" if kind == "gzip" else "unpack it, or pack it with gzip"
            raise ValueError(f"{path} is compressed with {kind}: {advice}")
        return _group(path, _members(file, path, size), size)


Member = tuple[str, int, int]
"""Name, offset of the content and its size, bytes."""


class Header(tarfile.TarInfo):
    """A header that notes why it was the last one, and refuses a negative size.

    With a negative size older Pythons would read in a circle for ever (CVE-2025-8194).
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Header:
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            tar.ended_by = type(error)(*error.args)  # type: ignore[attr-defined]  # without the frames that raised it
            raise

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.HeaderError(f"a member has {count} bytes")
        return int(super()._block(count))  # type: ignore[misc]


def damage_of(tar: tarfile.TarFile) -> tarfile.HeaderError | None:
    # Return why a tar file that was read to its end, with `Header`, is damaged: tarfile takes that for the end.
    ended_by = getattr(tar, "ended_by", None)
    return ended_by if type(ended_by).__name__ in ("InvalidHeaderError", "TruncatedHeaderError") else None


def _members(file: BinaryIO, path: Path, size: int) -> list[Member]:
    try:
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:", tarinfo=Header) as tar:
            members = tar.getmembers()
            damage = damage_of(tar)
            stopped_at = tar.offset
    except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
        raise ValueError(f"{path} is not a tar file, or a damaged one: {error}") from None
    if damage is not None:
        raise ValueError(
            f"{path} is a damaged tar file, or only the start of one: byte {stopped_at} of {size} ({damage})"
        )
    by_name = {posixpath.normpath(member.name): member for member in members}
    found: list[Member] = []
    for member in members:
        target = _target(member, by_name) if member.islnk() or member.issym() else member
        if target is not None and not target.isreg():
            continue
        if not split_name(member.name)[1] or is_leftover(member.name):
            continue
        if target is None:
            raise ValueError(
                f"{path} holds {member.name} as a link to {member.linkname}, which is not in it: write it anew with "
                "the files themselves, tar --dereference --hard-dereference"
            )
        if target.issparse():
            raise ValueError(f"{path} holds {member.name} as a sparse file: write it anew without tar --sparse")
        found.append((member.name, target.offset_data, target.size))
    return found


def _target(member: tarfile.TarInfo, by_name: Mapping[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    found: tarfile.TarInfo | None = member
    for _ in range(_MOST_LINKS):
        if found is None or not (found.islnk() or found.issym()):
            return found
        folder = posixpath.dirname(found.name) if found.issym() else ""
        found = by_name.get(posixpath.normpath(posixpath.join(folder, found.linkname)))
    return None


def split_name(name: str) -> tuple[str, str]:
    # Return the key of a sample and the extension of a field, from the name of a member; "": it is no field.
    dot = name.find(".", name.rfind("/") + 1)
    return (name, "") if dot < 0 else (name[:dot], name[dot:].lower())


def _group(path: Path, members: Iterable[Member], file_size: int) -> TarMembers:
    keys: list[bytes] = []
    first: list[int] = []
    extensions: dict[str, int] = {}
    fields: list[tuple[int, int, int]] = []
    own: set[str] = set()
    last: str | None = None
    for name, offset, size in members:
        key, extension = split_name(name)
        if key != last:
            keys.append(key.encode("utf-8", "surrogateescape"))
            first.append(len(fields))
            last, own = key, set()
        if extension in own:  # two samples with one name would be one
            raise ValueError(f"{path} holds {key}{extension} twice: give each sample a name of its own")
        own.add(extension)
        fields.append((extensions.setdefault(extension, len(extensions)), offset, size))
    table = np.array(fields, np.int64).reshape(-1, 3)
    arrays = {
        "key_ends": np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys))),
        "first": np.array([*first, len(fields)], np.int64),
        "extension": table[:, 0].astype(np.uint32),
        "offset": table[:, 1].copy(),
        "size": table[:, 2].copy(),
    }
    return TarMembers(b"".join(keys), tuple(extensions), arrays, file_size)


class OpenShard:
    """A shard that is mapped into memory; its file stays locked while any part of it is in use."""

    def __init__(self, descriptor: int, members: TarMembers) -> None:
        # The mapping keeps a copy of the descriptor, and with it the lock.
        self.content = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        self.members = members

    def fields(self, index: int) -> dict[str, memoryview]:
        return self.members.fields(index, self.content)


def checked(shard: Shard, members: TarMembers) -> TarMembers:
    # Return the members of a shard. More samples than the index says are no error: it stands for the first ones.
    if len(members) < shard.n_samples:
        raise ValueError(
            f"{bare_url(shard.url)} holds {len(members):,} samples, and the index says {shard.n_samples:,}: write the "
            "index again with python -m ddp_hydra.data.shards index"
        )
    return members


_PICKLES = (".pickle", ".pkl", ".pyd")
_TAKE_BYTES = "read its bytes yourself, WidsShards(...).fields(index)"


def decode_field(extension: str, content: memoryview) -> Any:
    """Decode one field.

    Images become uint8 (3, height, width); .cls, .cls2, .id, .index and .inx become whole numbers; .txt, .text and
    .transcript become text; .json, .npy, .mp and .msgpack become what they hold; .pt and .pth become what `torch.load`
    accepts with weights_only; .safetensors becomes a dict of tensors. A last .gz is decompressed first. A field with
    another extension stays bytes.

    Args:
        extension: of the field, e.g. ".jpg", ".seg.png" or ".txt.gz".
        content: its bytes.

    Raises:
        ValueError: it is damaged, or holds pickled objects.
        ModuleNotFoundError: it needs a package that is not installed.
    """
    *_, kind = extension.lower().rpartition(".")
    packed = kind == "gz"
    if packed:
        *_, kind = extension[:-3].lower().rpartition(".")
    kind = f".{kind}"
    if kind in _PICKLES:
        raise ValueError(
            f"{extension} holds pickled objects, which could run any program: store .npy or .json, or {_TAKE_BYTES}"
        )
    decoder = decode if kind in IMAGE_EXTENSIONS else _DECODERS.get(kind)
    try:
        plain = gzip.decompress(content) if packed else content
        return bytes(plain) if decoder is None else decoder(plain)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the readers of the many formats raise almost anything on damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = f"it holds more than tensors and could run any program ({reason}): {_TAKE_BYTES}"
        raise ValueError(f"{extension} can't be decoded: {reason}") from None


def missing_field(field: str, found: Iterable[str]) -> str:
    # Return what is wrong with a sample that lacks a field, and has those that were found.
    found = list(found)
    why = "the files of a sample have one name and follow each other, as tar --sort=name writes them"
    if any("." in extension.lstrip(".") for extension in found):
        why = "an extension begins at the first dot of a file's name: 000.1.jpg is the field .1.jpg of the sample 000"
    return f"it has no field {field}, only {', '.join(found) or 'none'} ({why})"


def not_a_class(extension: str, content: bytes | memoryview) -> str:
    # Return what is wrong with a field that should hold a class number.
    text = bytes(content[:40]).decode("utf-8", "replace")
    return f"its field {extension} holds {text!r}, and must hold the number of its class: 0, 1, 2, ..."


def _msgpack(content: Any) -> Any:
    import msgpack

    return msgpack.unpackb(content)


def _safetensors(content: Any) -> dict[str, Any]:
    try:
        from safetensors.torch import load
    except ImportError:
        raise ModuleNotFoundError(".safetensors needs safetensors: type `pip install safetensors`") from None
    return load(bytes(content))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((".cls", ".cls2", ".id", ".index", ".inx"), lambda content: int(bytes(content))),
    **dict.fromkeys((".text", ".transcript", ".txt"), lambda content: str(content, "utf-8")),
    **dict.fromkeys((".mp", ".msgpack"), _msgpack),
    **dict.fromkeys(
        (".pt", ".pth"), lambda content: torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    ),
    ".safetensors": _safetensors,
    ".json": lambda content: json.loads(bytes(content)),
    ".npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
}
