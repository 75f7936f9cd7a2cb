"""Whether a run was bound by its data or by its computation."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_hydra.console.plural import counted

ENOUGH_STEPS = 20
"""A run of fewer says little: the first steps wait for everything for the first time."""
BOUND_BY_DATA = 0.1
"""From this share of the time on that the loop waits for batches, data is what a run is bound by."""


def describe(total: Mapping[str, float], train_s: float, steps: int) -> str | None:
    """Say in a line what a run was bound by, if it was long enough, and what reading cost; None for neither.

    Args:
        total: of `data_report.DataStats.total`.
        train_s: how long it trained, in seconds.
        steps: of the run.
    """
    share = total["wait"]
    said = []
    if steps >= ENOUGH_STEPS:
        said.append(
            f"bound by {'data' if share >= BOUND_BY_DATA else 'compute'}: a rank waited {total['wait_s']:.1f} of "
            f"{train_s:.1f} s ({share:.0%}) for batches"
        )
    if "bytes" in total:
        said.append(f"{total['bytes'] / 1e6:,.1f} MB read, {total['bytes'] / 1e6 / max(train_s, 1e-9):,.1f} MB/s")
        asked = total["cache_hits"] + total["cache_misses"]
        said.append(f"{total['cache_hits'] / max(asked, 1):.0%} from the cache")
        said += [counted(total["retries"], "retry"), counted(total["bad_samples"], "bad sample")]
    return f"data: {', '.join(said)}" if said else None


SLOW = 1.15
"""From this multiple of the median on, a rank holds up the others notably."""


def describe_slowest(slowest: Mapping[str, float | None], steps: int) -> str | None:
    """Say in a line which rank held up the others; None where none did, or the run was too short to tell.

    Args:
        slowest: of `insight.stragglers.Stragglers.total`.
        steps: of the run.
    """
    times = slowest.get("times")
    if times is None or times < SLOW or steps < ENOUGH_STEPS:
        return None
    return (
        f"slow: rank {slowest['rank']:.0f} took {times:.2f} times as long as the median rank for its own part of a "
        "step (waiting for data, and the forward pass); the others waited for it"
    )
