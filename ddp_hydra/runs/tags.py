"""Keeps the tags of a run. The first ones are from its config; tags.json holds them once they are changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddp_hydra.errors import ConfigError
from ddp_hydra.runs.run_files import RunFiles, StoredRunFiles, reachable
from ddp_hydra.storage.base import ObjectChangedError
from ddp_hydra.storage.files import write_atomic

NAME = "tags.json"
MOST = 100
"""The most tags that a run has."""
_TAG = re.compile(r"[^\W_][\w.:/@-]{0,63}")
_TRIES = 5


def read(files: RunFiles, of_config: object) -> list[str]:
    """Return the tags of a run."""
    try:
        kept = json.loads(files.read(NAME) or b"null")
    except (ValueError, RecursionError):
        kept = None
    found = kept if isinstance(kept, list) else of_config
    return [str(one)[:64] for one in found if isinstance(one, str | int)][:MOST] if isinstance(found, list) else []


def change(files: RunFiles, of_config: object, words: Sequence[str]) -> list[str]:
    for word in words:
        if word[:1] not in ("+", "-") or not _TAG.fullmatch(word[1:]):
            raise ConfigError(
                f"{word!r}: +good adds a tag, -old removes one; a tag has letters, digits and . _ : / @ -, 64 at most"
            )
    if isinstance(files, StoredRunFiles):
        return _change_stored(files, of_config, words)
    with _changing(Path(files.place)):
        found = changed(read(files, of_config), words)
        write_atomic(Path(files.place) / NAME, _encode(found), durable=False)
    return found


def changed(tags: Sequence[str], words: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(tags))
    for word in words:
        sign, tag = word[0], word[1:]
        if sign == "-" and tag not in found:
            raise ConfigError(f"the run has no tag {tag}; it has {', '.join(found) or 'none'}")
        found = [one for one in found if one != tag] + [tag] * (sign == "+")
    if len(found) > MOST:
        raise ConfigError(f"a run has {MOST} tags at most: remove some with -<tag>")
    return found


def _change_stored(files: StoredRunFiles, of_config: object, words: Sequence[str]) -> list[str]:
    for _ in range(_TRIES):
        with reachable():
            etag = files.store.etag(files.key(NAME))
            found = changed(read(files, of_config), words)
            with contextlib.suppress(ObjectChangedError):
                try:
                    files.store.put_if(files.key(NAME), _encode(found), etag)
                except NotImplementedError:  # a store without conditional writes
                    files.store.put(files.key(NAME), _encode(found))
                return found
    raise ConfigError(f"others change the tags of {files.place} all the time: try again")


@contextmanager
def _changing(run_dir: Path) -> Iterator[None]:
    """Keep other commands from changing the tags inside the block."""
    handle = os.open(run_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _encode(tags: Sequence[str]) -> bytes:
    return (json.dumps(list(tags)) + "\n").encode()
