"""Remove runs from a store."""

from __future__ import annotations

from ddp_hydra.errors import ConfigError, TakenOver
from ddp_hydra.job.remote.fence import OWNER, FencedStore
from ddp_hydra.job.remote.uploader import is_active
from ddp_hydra.runs import find_stored
from ddp_hydra.runs.run_files import StoredRun, reachable
from ddp_hydra.storage import results_root

_LAST = (".hydra", "summary.json", "status.json", OWNER)
"""Removed last, so that a run that is removed in part is still known as a run, and has an owner."""


def removable(url: str) -> StoredRun:
    """Return the run at a URL.

    Raises:
        ConfigError: there is none, it holds other runs, or the store does not answer.
    """
    found = find_stored.runs(url)
    run = next((one for one in found if one.place == url.rstrip("/")), None)
    if run is None:
        raise ConfigError(f"{url} holds no run: give the URL that a run has printed; ddp-hydra runs ls {url} lists")
    if len(found) > 1:
        other = next(one for one in found if one is not run)
        raise ConfigError(f"{url} holds other runs, too, such as {other.place}: remove these first")
    return run


def remove(url: str) -> int:
    """Remove a run from a store, and return the bytes that are freed.

    This process becomes the owner of the run, so that no driver writes there meanwhile or later.

    Raises:
        ConfigError: as `removable`, the run is running or was resumed meanwhile, or an object can't be removed.
    """
    run = removable(url)
    store, sizes = FencedStore(results_root.open_folder(url)), run.sizes()
    with reachable():
        owner = store.owner()
        if is_active(store):
            raise ConfigError(f"{url} is running: end it first, with ddp-hydra attach run={url} stop=true")
        try:
            store.acquire(owner)
            for name in sorted({*sizes, OWNER}, key=_order):
                store.delete(name)
        except TakenOver:
            raise ConfigError(f"{url}: another driver has resumed the run meanwhile") from None
    return sum(sizes.values())


def _order(name: str) -> tuple[int, str]:
    top = name.partition("/")[0]
    return (_LAST.index(top) if top in _LAST else -1), name
