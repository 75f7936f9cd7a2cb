"""Pauses Python's search for garbage while modules are imported, of which it takes a quarter of the time.

Imports leave 8 MiB of garbage, which then stays, unless a process that lives long asks for one search.
"""

from __future__ import annotations

import gc


def pause() -> None:
    gc.disable()


def resume(searches: bool = False) -> None:
    """Search again, if it was paused.

    All objects that exist now count as permanent: later searches do not walk through them, and searches in forks do not
    touch, and so copy, their pages.

    Args:
        searches: search once before that, which takes 0.15 s.
    """
    if not gc.isenabled():
        if searches:
            gc.collect()
        gc.freeze()
        gc.enable()
