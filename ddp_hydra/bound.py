"""Whether a run was bound by its data or by its computation."""

from __future__ import annotations

from collections.abc import Mapping

BOUND_BY_DATA = 0.1
"""From this share of the time on that the loop waits for batches, data is what a run is bound by."""


def describe(total: Mapping[str, float], train_s: float) -> str:
    """Say in a line what a run was bound by.

    Args:
        total: of `data_report.DataReport.total`.
        train_s: how long it trained, in seconds.
    """
    share = total["wait"]
    said = [
        f"bound by {'data' if share >= BOUND_BY_DATA else 'compute'}: a rank waited {total['wait_s']:.1f} of "
        f"{train_s:.1f} s ({share:.0%}) for batches"
    ]
    if "bytes" in total:
        said.append(f"{total['bytes'] / 1e6:,.1f} MB read, {total['bytes'] / 1e6 / max(train_s, 1e-9):,.1f} MB/s")
        asked = total["cache_hits"] + total["cache_misses"]
        said.append(f"{total['cache_hits'] / max(asked, 1):.0%} from the cache")
        said.append(f"{total['retries']:,.0f} retries")
        said.append(f"{total['bad_samples']:,.0f} bad samples")
    return "data: " + ", ".join(said)


SLOW = 1.15
"""From this multiple of the median on, a rank holds up the others notably."""


def describe_slowest(slowest: Mapping[str, float | None]) -> str | None:
    """Say in a line which rank held up the others; None where none did.

    Args:
        slowest: of `insight.stragglers.Stragglers.total`.
    """
    times = slowest.get("times")
    if times is None or times < SLOW:
        return None
    return (
        f"slow: rank {slowest['rank']:.0f} took {times:.2f} times as long as the median rank for its own part of a "
        "step (waiting for data, and the forward pass); the others waited for it"
    )
