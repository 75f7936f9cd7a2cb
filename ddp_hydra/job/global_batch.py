"""The same global batch on another number of ranks: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """What each rank computes in a step.

    Args:
        size: samples at once, data.batch_size.
        parts: how many times, trainer.gradient_accumulation_steps.
    """

    size: int
    parts: int

    def on(self, ranks: int) -> int:
        """Return the global batch of so many ranks."""
        return self.size * self.parts * ranks


def share_out(batch: Batch, before: int, now: int) -> Batch:
    """Share a global batch out among another number of ranks.

    Args:
        batch: of each rank, of as many as there were before.
        before: number of ranks.
        now: number of ranks.

    Returns:
        With more parts and no larger ones where that can be, for memory may be full; parts of less than half the size
        would be slow, and then one part is larger. Where the global batch does not divide among the ranks, all stays.
    """
    each, rest = divmod(batch.on(before), now)
    if rest:
        return batch
    least = -(-each // batch.size)
    parts = next((parts for parts in range(least, 2 * least + 1) if each % parts == 0), 0)
    return Batch(each // parts, parts) if parts else Batch(each, 1)


def describe(batch: Batch, before: int, now: int, shared: Batch) -> str:
    """Say what another number of ranks changes.

    Args:
        batch: of each rank, before.
        before: number of ranks.
        now: number of ranks.
        shared: of each rank, now.
    """
    said, total = f"{now} ranks instead of {before}: ", batch.on(before)
    if shared.on(now) != total:
        return (
            f"{said}a global batch of {total} does not divide among them, so it is {shared.on(now)} now: "
            f"data.batch_size={shared.size}{_of(shared)} as before. The samples go on in their order, and the learning "
            "rate along its curve"
        )
    changes = []
    if shared.parts != batch.parts:
        changes.append(f"trainer.gradient_accumulation_steps is {shared.parts} instead of {batch.parts}")
    if shared.size != batch.size:
        changes.append(f"data.batch_size is {shared.size} instead of {batch.size}")
    more = ", which takes more memory" if shared.size > batch.size else ""
    return f"{said}{' and '.join(changes)}{more}, so the global batch stays {total}"


def _of(batch: Batch) -> str:
    return f" trainer.gradient_accumulation_steps={batch.parts}" if batch.parts > 1 else ""
