"""Tells what the name of a sample says: its class, its split, and whether a system or a program left its file there.

Checks arguments that data sets have in common, and reads names of classes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Number
from typing import Any

_NAMES = frozenset(
    ["__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "thumbs.db", "desktop.ini"]
)
"""Files and folders of macOS' archiver, Synology, Windows and Linux' file systems, in lower case."""


def is_leftover(path: str) -> bool:
    """Return whether a file was left by a system or a program: it is hidden, or has a name that they use.

    Names with a dot in front are hidden: `.DS_Store` and `._1.png` of macOS, `.ipynb_checkpoints` of Jupyter, `.git`.
    The path begins below the folder that the user named: that one may be hidden.
    """
    if "/" not in path:
        return path.lower() in _NAMES or (path[:1] == "." and bool(path.strip(".")))
    return any(is_leftover(part) for part in path.split("/"))


def class_of(key: str, prefix: str) -> str:
    """Return the class of a file: the first folder below the prefix, as torchvision's ImageFolder has it; "": none."""
    inside = len(prefix) + 1 if prefix else 0
    return key[inside : max(inside, key.find("/", inside))]


def check(holdout: float, split: str) -> None:
    """Refuse a share of the distinct names that is no share, and a split that is neither "train" nor "val"."""
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout is {holdout}, and is a share from 0 to below 1: type data.holdout=0.1")
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}, and is train or val")


def is_of(name: str, holdout: float, split: str) -> bool:
    """Return whether a sample with this name belongs to a split; arguments: see `check`."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    is_held_out = int.from_bytes(digest[:8], "big") < holdout * 2**64
    return is_held_out == (split == "val")


def check_range(
    name: str, value: float, low: float, high: float = math.inf, *, example: float, above: bool = False
) -> None:
    """Refuse a value of the key data.<name> that is below `low`, or at it where it must be above, or above `high`."""
    if not low <= value <= high or (above and value == low):
        span = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise ValueError(f"{name} is {value}, and must be {span}: type data.{name}={example}")


def class_names(given: Any, where: str, advice: str) -> list[Any]:
    """Return the names of classes in the order of their numbers.

    Args:
        given: how many classes there are, their names in order, {name: number} or {number: name}. In a dict, numbers
            may be texts. A dict without numbers has the names as keys, in order.
        where: where they are given, for an error.
        advice: what to type instead.

    Raises:
        ValueError: the numbers of a dict do not go from 0 to one less than there are classes.
    """
    if isinstance(given, Integral):
        return [str(number) for number in range(int(given))]
    if not isinstance(given, Mapping):
        return list(given)
    keys, values = [str(key) for key in given], list(given.values())
    of_keys, of_values = [_whole(key) for key in given], [_whole(value) for value in values]
    wanted = set(range(len(keys)))
    if set(of_values) == wanted:
        return [keys[of_values.index(number)] for number in range(len(keys))]
    if set(of_keys) == wanted and not all(isinstance(value, Number) for value in values):
        names = [str(value) for value in values] if _are_names(values) else keys
        return [names[of_keys.index(number)] for number in range(len(keys))]
    if all(number is None for number in of_values) and (set(of_keys) <= {None} or not _are_names(values)):
        return keys
    shown = [*map(str, keys if all(number is None for number in of_values) else values)]
    numbers = ", ".join(shown[:10]) + (", …" if len(shown) > 10 else "")
    raise ValueError(
        f"{where} gives {len(keys)} classes the numbers {numbers}, and they go from 0 to {len(keys) - 1}: {advice}"
    )


def _are_names(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str | Number) for value in values)  # others, as lists, describe the classes


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isinstance(value, str) or number == value else None
