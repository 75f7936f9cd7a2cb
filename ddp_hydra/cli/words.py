"""Reads overrides, and joins the saved ones of a run or sweep with those that are typed now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from hydra.errors import HydraException

from ddp_hydra.config.hydra_compat import parse_override

MODES = {
    "-m", "--multirun", "-r", "--run", "hydra.mode", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion",
}  # fmt: skip
"""Of these words of a command, Hydra takes one."""
ONE_RUN = "hydra.mode=RUN"
SWEEP = "--multirun"
SWEEPS = {"-m", SWEEP, "hydra.mode=MULTIRUN"}


def joined(saved: Sequence[str], typed: Sequence[str], given: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return the saved words that still count, and the typed ones, for Hydra to apply in this order.

    Hydra removes only a key that is there, so what `~key` removes stays in front of it. And a key that was begun
    with `+` is changed without it.

    Args:
        saved: words of a run or sweep.
        typed: words that are typed now; they have priority.
        given: more keys and groups of which no saved word counts.
    """
    removals = [word for word in typed if _is_removal(word)]
    others = [word for word in typed if word not in removals]
    now = {*given, *map(full_key_of, others), *(package_of(word) for word in others if "@" in word.partition("=")[0])}
    kept: list[str] = []
    for index, word in enumerate(saved):
        if any(_covers(removal, word) and not _above(removal) & now for removal in removals):
            kept.append(word)
            continue
        last = next((later for later in reversed(saved[index + 1 :]) if _covers(later, word)), word)
        if not places_of(last) & now:
            kept.append(word)
    return kept, [_as_begun(word, saved, now) for word in typed if not _is_done(word, saved, kept, now)]


def is_removed(word: str, later: Sequence[str]) -> bool:
    """Return whether one of the later words removes what a word has set."""
    return any(_covers(other, word) for other in later)


def _is_removal(word: str) -> bool:
    # `~group`, without a dot, is for the list of options, which Hydra reads before any key.
    return word.startswith("~") and "." in key_of(word)


def _covers(removal: str, word: str) -> bool:
    return _is_removal(removal) and full_key_of(removal) in places_of(word)


def _above(word: str) -> set[str]:
    parts = package_of(word).split(".")
    return {".".join(parts[:size]) for size in range(1, len(parts))}


def _is_done(word: str, saved: Sequence[str], kept: Sequence[str], now: set[str]) -> bool:
    """Return whether a word removes what is not there: removed before, or an option that a dropped word has added."""
    key = full_key_of(word)
    if _is_removal(word):
        last = next((other for other in reversed(kept) if _covers(word, other)), "")
        return last.startswith("~") and full_key_of(last) == key
    added = any(other.startswith("+") and full_key_of(other) == key for other in saved)
    return added and word.startswith("~") and not _above(word) & now


def _as_begun(word: str, saved: Sequence[str], now: set[str]) -> str:
    """Add the `+` of the saved word for a key; `++` where saved words have added keys below it."""
    key = full_key_of(word)
    if word.startswith(("+", "~", "-")) or _above(word) & now:
        return word
    last = next((other for other in reversed(saved) if full_key_of(other) == key), "")
    if last.startswith(("+", "~")):
        return "+" * (len(last) - len(last.lstrip("+"))) + word
    below = [other for index, other in enumerate(saved) if not is_removed(other, saved[index + 1 :])]
    added = any(other.startswith("+") and key in places_of(other) for other in below)
    return f"++{word}" if added and "." in key_of(word) else word


def value_of(word: str) -> str:
    value = word.partition("=")[2]
    if value[:1] in ("'", '"'):
        with contextlib.suppress(HydraException):  # Hydra says later what is wrong with it
            return str(parse_override(word).value())
    return value


def package_of(word: str) -> str:
    """Return the place in the config that an override is for: of a group that is chosen for a package, the package."""
    key = full_key_of(word)
    return key.partition("@")[2] or key


def places_of(word: str) -> set[str]:
    """Return what a later override would have to name so that this one no longer counts: its key, or a node above."""
    parts = package_of(word).split(".")
    return {full_key_of(word), *(".".join(parts[:size]) for size in range(1, len(parts) + 1))}


def full_key_of(override: str) -> str:
    """Return the key of an override, with the package that a group is chosen for: transform@data.val.transform."""
    return override.partition("=")[0].lstrip("+~")


def key_of(override: str) -> str:
    return full_key_of(override).partition("@")[0]


def is_sweep(word: str) -> bool:
    with contextlib.suppress(HydraException):  # an option is none, and Hydra names an override that it can't read
        return bool(parse_override(word).is_sweep_override())
    return False
