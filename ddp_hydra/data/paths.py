"""Tells what the path of a file in a data set says: its class, and whether a system or a program left it there."""

from __future__ import annotations

_NAMES = frozenset(
    ["__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "thumbs.db", "desktop.ini"]
)
"""Files and folders of macOS' archiver, Synology, Windows and Linux' file systems, in lower case."""


def is_leftover(path: str) -> bool:
    """Return whether a file was left by a system or a program: it is hidden, or has a name that they use.

    Names with a dot in front are hidden: `.DS_Store` and `._1.png` of macOS, `.ipynb_checkpoints` of Jupyter, `.git`.

    Args:
        path: of the file or folder, with slashes, below the folder that the user named: that one may be hidden.
    """
    if "/" not in path:
        return path.lower() in _NAMES or (path[:1] == "." and bool(path.strip(".")))
    return any(is_leftover(part) for part in path.split("/"))


def class_of(key: str, prefix: str) -> str:
    """Return the class of a file: the first folder below the prefix, as torchvision's ImageFolder has it; "": none.

    Args:
        key: of the file, below the prefix.
        prefix: a folder, without a slash at its end; "": the whole store.
    """
    inside = len(prefix) + 1 if prefix else 0
    return key[inside : max(inside, key.find("/", inside))]
